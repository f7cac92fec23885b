"""Batches: the same bits from a seed, there and back through a file, errors that say what was expected."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_engine.errors import InputError
from rl_engine.verify import Layout, LossBatch
from tests.bits import assert_bits_equal

TENSORS = ("logits", "targets", "old_logps", "rewards", "mask", "ref_logits")


def digest(batch: LossBatch) -> str:
    """Of every bit that the loss may read; what it may not holds NaN, whose sign is the machine's."""
    hashed = hashlib.sha256()
    real = batch.logits[batch.mask][:, : batch.vocab_size].contiguous()
    for tensor in (
        batch.mask.to(torch.int8),
        real.view(torch.int16),
        batch.targets[batch.mask],
        batch.rewards,
    ):
        hashed.update(tensor.numpy().tobytes())
    hashed.update(batch.old_logps[batch.mask].numpy().tobytes())
    return hashed.hexdigest()[:16]


def small(**changes: object) -> LossBatch:
    batch = LossBatch.generate(1, group_sizes=(2, 3), seq_len=4, vocab_size=16, padded_vocab_size=18)
    return dataclasses.replace(batch, **changes)  # type: ignore[arg-type]


def test_generated_bits_are_those_of_the_seed() -> None:
    assert digest(LossBatch.generate(0)) == digest(LossBatch.generate(0)) == "4ad4b04adb74cc66"
    assert digest(LossBatch.generate(1)) != digest(LossBatch.generate(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_generated_batches_are_awkward(dtype: torch.dtype, seed: int) -> None:
    batch = LossBatch.generate(seed, dtype=dtype)
    tokens = batch.mask.sum(-1)
    assert tokens.min() == 0 and tokens.max() == batch.seq_len
    assert len(set(tokens.tolist())) > 3
    active = batch.logits[batch.mask][:, : batch.vocab_size]
    assert not active.isnan().any() and not active.isposinf().any()
    assert active.isneginf().any() and (active == torch.finfo(dtype).min).any()
    target_logits = active.gather(1, batch.targets[batch.mask][:, None])
    assert target_logits.isfinite().all()
    assert batch.logits[~batch.mask].isnan().any()
    assert batch.logits[..., batch.vocab_size :].isnan().any()
    assert not batch.old_logps[~batch.mask].isfinite().all()
    assert batch.old_logps[batch.mask].isfinite().all()
    assert batch.rewards[0] != batch.rewards[1]
    for dp in (2, 3, 4):
        cuts = {start for start, _ in Layout(1, dp).sequence_bounds(batch.num_sequences)}
        assert not cuts <= set(batch.group_boundaries), f"no group straddles the ranks of dp {dp}"


@pytest.mark.parametrize("with_reference", [True, False])
def test_there_and_back(tmp_path: Path, with_reference: bool) -> None:
    batch = LossBatch.generate(3, seq_len=6, with_reference=with_reference)
    batch = dataclasses.replace(batch, temperature=0.7)
    path = tmp_path / "batch.safetensors"
    batch.save(path)
    again = LossBatch.load(path)
    for name in TENSORS:
        mine, theirs = getattr(batch, name), getattr(again, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_bits_equal(theirs, mine, name, nan_payload=True)
    assert again.group_boundaries == batch.group_boundaries
    assert (again.vocab_size, again.temperature) == (batch.vocab_size, 0.7)
    assert str(again) == str(batch)


def test_files_that_are_no_batch(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*nowhere"):
        LossBatch.load(tmp_path / "nowhere")
    text = tmp_path / "text"
    text.write_text("hello")
    with pytest.raises(InputError, match=r"text is no safetensors file \(.*\); LossBatch.save writes one"):
        LossBatch.load(text)

    path = tmp_path / "some.safetensors"
    save_file({"input_ids": torch.zeros(2)}, str(path))
    with pytest.raises(
        InputError, match="lacks logits, targets, old_logps, rewards, mask: it holds input_ids, expected"
    ):
        LossBatch.load(path)

    batch = small()
    tensors = {name: getattr(batch, name) for name in TENSORS}
    metadata = {"format": "rl_engine.loss_batch/1", "vocab_size": "16", "group_boundaries": "[0, 2, 5]"}
    save_file(tensors, str(path), metadata)
    assert LossBatch.load(path).temperature == 1.0
    save_file(tensors, str(path), metadata | {"format": "other"})
    with pytest.raises(
        InputError, match=r"says format 'other' in its metadata, expected 'rl_engine.loss_batch/1'"
    ):
        LossBatch.load(path)
    for key, value in {"vocab_size": "many", "group_boundaries": "0 2 5"}.items():
        save_file(tensors, str(path), metadata | {key: value})
        with pytest.raises(InputError, match=r"has metadata .*, expected vocab_size \(an integer\)"):
            LossBatch.load(path)
    save_file(tensors | {"mask": batch.mask.int()}, str(path), metadata)
    with pytest.raises(
        InputError, match=r"some.safetensors: mask is \[5, 4\] torch.int32, expected \[5, 4\] torch.bool"
    ):
        LossBatch.load(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"logits": torch.zeros(2, 3)}, r"logits are \[2, 3\], expected \[sequences, tokens, vocabulary\]"),
        ({"rewards": torch.zeros(4)}, r"rewards is \[4\] torch.float32, expected \[5\] torch.float32"),
        ({"old_logps": torch.zeros(5, 4).double()}, r"old_logps is \[5, 4\] torch.float64"),
        (
            {"ref_logits": torch.zeros(5, 4, 18)},
            r"ref_logits is .* torch.float32, expected .* torch.bfloat16",
        ),
        ({"vocab_size": 19}, r"vocab_size is 19, expected 1 … 18"),
        (
            {"group_boundaries": (0, 2)},
            r"group_boundaries are \[0, 2\], expected offsets that rise from 0 to 5",
        ),
        ({"group_boundaries": (0, 2, 2, 5)}, r"group_boundaries are \[0, 2, 2, 5\]"),
    ],
)
def test_parts_that_do_not_fit(changes: dict[str, object], text: str) -> None:
    with pytest.raises(InputError, match=text):
        small(**changes)


def test_sizes_that_cannot_be_generated() -> None:
    for sizes in ({"vocab_size": 8}, {"padded_vocab_size": 5}, {"seq_len": 3}, {"group_sizes": (2, 0)}):
        with pytest.raises(InputError, match="cannot generate group_sizes"):
            LossBatch.generate(**sizes)  # type: ignore[arg-type]
