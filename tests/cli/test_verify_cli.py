"""`rl-engine verify`: its exit codes, its JSON, its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rl_engine.cli.app import app
from rl_engine.cli.demo.rollouts import Rollouts
from rl_engine.cli.verify import Options, group_sizes
from rl_engine.errors import InputError
from rl_engine.verify import LossBatch

runner = CliRunner()
RECORDED = Path(__file__).resolve().parent.parent / "data" / "rollouts.safetensors"
SMALL = ("--tp", "1,2", "--dp", "1", "--vocab", "61", "--len", "6", "--seqs", "5")


def run(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, ["verify", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code < 2 else result.stderr


def options(**changes: object) -> Options:
    given: dict[str, object] = {
        "file": None,
        "tp": "1",
        "dp": "1",
        "dtype": "bf16",
        "vocab": 61,
        "padded_vocab": None,
        "seqs": 5,
        "length": 6,
        "seed": 0,
        "beta": None,
        "normalizer": None,
        "backend": "auto",
        "device": "auto",
        "even": False,
        "timeout": 60.0,
        "html": None,
    }
    return Options(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("sequences", range(2, 40))
def test_group_sizes_add_up_and_hold_no_group_of_one(sequences: int) -> None:
    sizes = group_sizes(sequences)
    assert sum(sizes) == sequences
    assert min(sizes) >= 2


def test_one_sequence_is_refused() -> None:
    with pytest.raises(InputError, match="--seqs is 1, expected at least 2"):
        group_sizes(1)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (
            {},
            [
                "global_active_tokens, β 0",
                "global_active_tokens, β 0.04",
                "per_sequence_then_mean, β 0",
                "per_sequence_then_mean, β 0.04",
            ],
        ),
        ({"beta": 0.0}, ["global_active_tokens, β 0", "per_sequence_then_mean, β 0"]),
        ({"beta": 0.5, "normalizer": "fixed_constant"}, ["fixed_constant, β 0.5"]),
        (
            {"normalizer": "per_sequence_then_mean_all"},
            ["per_sequence_then_mean_all, β 0", "per_sequence_then_mean_all, β 0.04"],
        ),
    ],
)
def test_cases_follow_the_options(changes: dict[str, object], names: list[str]) -> None:
    chosen = options(**changes)
    assert [case.name for case in chosen.cases(chosen.batch())] == names


def test_a_vocabulary_gets_padding_unless_told_otherwise() -> None:
    assert options(vocab=64).batch().padded_vocab_size == 128
    assert options(vocab=64, padded_vocab=64).batch().padded_vocab_size == 64


def test_equal_bits_exit_0_and_the_json_says_who_computed() -> None:
    report = json.loads(run(*SMALL, "--json"))
    assert report["ok"] is True
    assert [(entry["tp"], entry["dp"]) for entry in report["layouts"]] == [(1, 1), (2, 1)]
    assert all(case["gradient_norm"] > 0 for case in report["cases"])


def test_a_recorded_batch_is_verified_from_its_file(tmp_path: Path) -> None:
    rollouts = Rollouts.load(RECORDED)
    generator = torch.Generator().manual_seed(0)
    vocab = 49152  # of the model that sampled them; the logits here are random
    few = slice(0, 8)
    logits = torch.randn(8, rollouts.completion_mask.shape[1], vocab, generator=generator).bfloat16()
    batch = LossBatch(
        logits=logits,
        targets=rollouts.completion_ids[few].contiguous(),
        old_logps=rollouts.old_logps[few],
        rewards=rollouts.rewards[few],
        mask=rollouts.completion_mask[few],
        group_boundaries=(0, 8),
        vocab_size=vocab,
    )
    batch.save(tmp_path / "batch.safetensors")
    text = run(str(tmp_path / "batch.safetensors"), "--tp", "3", "--dp", "2")
    assert "all bits equal" in text


def test_the_naive_backend_differs_and_exits_1() -> None:
    text = run("--tp", "1,2", "--dp", "2", "--backend", "naive", code=1)
    assert "do not have the bits" in text
    assert "0x" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", "1,two"), "--tp is '1,two', expected positive integers"),
        (("--dp", "0"), "--dp is '0'"),
        (("--dtype", "fp8"), "fp8"),
        (("--normalizer", "tokens"), "--normalizer is 'tokens', expected one of global_active_tokens"),
        (("--device", "tpu"), "--device is 'tpu', expected auto, cpu or cuda"),
        (("--seqs", "1"), "--seqs is 1"),
        (("--backend", "magic"), "magic"),
        (("missing.safetensors",), "there is no file missing.safetensors"),
        ((str(RECORDED),), "lacks logits"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    text = run(*arguments, code=2)
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert message in text
