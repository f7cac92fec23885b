"""`rl-engine info` and `rl-engine explain`: what they print, and how they fail."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import rl_engine
from rl_engine.cli.app import app
from rl_engine.errors import RLEngineError
from rl_engine.registry import OpKind, kernel_registry

runner = CliRunner()


def run(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.stdout if code < 2 else result.stderr


def test_version() -> None:
    assert run("--version") == f"rl-engine {rl_engine.__version__}\n"


def test_info_lists_every_backend_in_the_order_of_priority() -> None:
    found = json.loads(run("info", "--json"))
    for op in OpKind:
        assert [entry["backend_id"] for entry in found["backends"][op]] == list(
            kernel_registry.backend_ids(op)
        )
    assert found["packages"]["torch"]


def test_info_prints_tables() -> None:
    text = run("info")
    assert "exact_torch" in text
    assert "layout_free" in text


def test_explain_names_the_selected_backend() -> None:
    report = json.loads(run("explain", "--tp", "4", "--json"))
    assert report["selected_backend"] == "exact_numba"
    assert report["contract"]["sharding"]["tp_world_size"] == 4
    assert [candidate["backend_id"] for candidate in report["candidates"]] == list(
        kernel_registry.backend_ids(OpKind.LOGPROB)
    )


def test_explain_exits_1_with_the_reasons_when_nobody_can_serve() -> None:
    report = json.loads(run("explain", "--tp", "3", "--tiles", "64", "--json", code=1))
    assert report["selected_backend"] is None
    assert all(candidate["reasons"] for candidate in report["candidates"])
    assert "whole tiles" in run("explain", "--tp", "3", "--tiles", "64", code=1)


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        (("--tp", "4", "--tiles", "32"), "tiled_torch"),
        (("--merge", "shard_lse"), "naive_torch"),
        (("--platform", "cuda"), "exact_torch"),
        (("--backend", "reference", "--entropy"), "exact_torch"),
        (("--op", "loss", "--dp", "3", "--beta", "0.04", "--normalizer", "fixed_constant"), "exact"),
        (("--op", "loss", "--merge", "shard_lse", "--backend", "naive"), "naive"),
    ],
)
def test_explain_builds_the_contract_of_its_options(arguments: tuple[str, ...], selected: str) -> None:
    assert json.loads(run("explain", *arguments, "--json"))["selected_backend"] == selected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "norm"), "--op is 'norm', expected logprob or loss"),
        (("--merge", "sorted"), "--merge is 'sorted', expected one of exact_words"),
        (("--merge", "shard_lse", "--tiles", "8"), "--tiles 8 goes with --merge max_sumexp_tiles"),
        (("--backend", "exact_trch"), "exact_trch"),
        (("--backend", "deterministic"), "determinism_scope"),
        (("--platform", "tpu"), "tpu"),
        (("--vocab", "10", "--padded-vocab", "8"), "padded_vocab_size"),
        (("--temperature", "0"), "temperature"),
        (("--dtype", "int8"), "int8"),
    ],
)
def test_explain_fails_with_one_line_on_stderr(arguments: tuple[str, ...], message: str) -> None:
    text = run("explain", *arguments, code=2)
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert message in text


def test_debug_lets_the_error_through() -> None:
    result = runner.invoke(app, ["explain", "--op", "norm", "--debug"])
    assert isinstance(result.exception, RLEngineError)


def test_an_unknown_option_is_a_usage_error() -> None:
    assert "No such option" in run("explain", "--tpp", "3", code=2)
