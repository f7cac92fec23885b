"""The batch that verify runs: generated, or a file.

File form: safetensors with the tensors below under their names, and the metadata `format` =
"rl_engine.loss_batch/1", `vocab_size`, `group_boundaries` (a JSON list) and `temperature`.

Legend: S sequences, T token slots, V padded vocabulary, G groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rl_engine.contracts import LogitsDtype
from rl_engine.errors import InputError

__all__ = ["FORMAT", "LossBatch"]

FORMAT = "rl_engine.loss_batch/1"
_REQUIRED = ("logits", "targets", "old_logps", "rewards", "mask")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossBatch:
    """One whole batch of a GRPO loss, before it is cut into a layout.

    Attributes:
        logits: [S, T, V] bf16, fp16 or fp32; row t predicts target t.
        targets: [S, T] int64 sampled tokens; anything where inactive.
        old_logps: [S, T] fp32 log-probs at sampling; anything where inactive.
        rewards: [S] fp32.
        mask: [S, T] bool, the active tokens.
        group_boundaries: G + 1 offsets of the groups over the sequences.
        vocab_size: Real columns of the logits; what lies behind is padding.
        ref_logits: Like `logits`, or None.
        temperature: The logits are divided by it.

    Raises:
        InputError: shapes, dtypes or offsets that do not fit together.
    """

    logits: Tensor
    targets: Tensor
    old_logps: Tensor
    rewards: Tensor
    mask: Tensor
    group_boundaries: tuple[int, ...]
    vocab_size: int
    ref_logits: Tensor | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.logits.dim() != 3:
            raise InputError(
                f"logits are {list(self.logits.shape)}, expected [sequences, tokens, vocabulary]"
            )
        LogitsDtype.parse(self.logits.dtype)
        sequences, tokens, vocab = self.logits.shape
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "targets": ((sequences, tokens), torch.int64),
            "old_logps": ((sequences, tokens), torch.float32),
            "rewards": ((sequences,), torch.float32),
            "mask": ((sequences, tokens), torch.bool),
            "ref_logits": ((sequences, tokens, vocab), self.logits.dtype),
        }
        for name, (shape, dtype) in expected.items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
                raise InputError(
                    f"{name} is {list(tensor.shape)} {tensor.dtype}, expected {list(shape)} {dtype} "
                    f"beside logits {list(self.logits.shape)} {self.logits.dtype}"
                )
        if not 0 < self.vocab_size <= vocab:
            raise InputError(
                f"vocab_size is {self.vocab_size}, expected 1 … {vocab}, the columns of the logits"
            )
        bounds = self.group_boundaries
        rises = all(start < end for start, end in pairwise(bounds))
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != sequences or not rises:
            raise InputError(
                f"group_boundaries are {list(bounds)}, expected offsets that rise from 0 to {sequences}, "
                f"the number of sequences, such as [0, {sequences}]"
            )

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.logits.shape[0]

    @property
    def seq_len(self) -> int:
        """T."""
        return self.logits.shape[1]

    @property
    def padded_vocab_size(self) -> int:
        """V."""
        return self.logits.shape[2]

    def __str__(self) -> str:
        padded = f" of {self.padded_vocab_size}" if self.padded_vocab_size != self.vocab_size else ""
        reference = "with" if self.ref_logits is not None else "without"
        return (
            f"{self.num_sequences} sequences × {self.seq_len} tokens ({int(self.mask.sum())} active), "
            f"{len(self.group_boundaries) - 1} groups, vocabulary {self.vocab_size}{padded}, "
            f"{LogitsDtype.parse(self.logits.dtype)}, {reference} reference"
        )

    def save(self, path: str | Path) -> None:
        """Write the batch as one safetensors file."""
        import safetensors.torch

        tensors = {name: getattr(self, name).contiguous() for name in _REQUIRED}
        if self.ref_logits is not None:
            tensors["ref_logits"] = self.ref_logits.contiguous()
        metadata = {
            "format": FORMAT,
            "vocab_size": str(self.vocab_size),
            "group_boundaries": json.dumps(self.group_boundaries),
            "temperature": repr(self.temperature),
        }
        safetensors.torch.save_file(tensors, str(path), metadata)

    @classmethod
    def load(cls, path: str | Path) -> LossBatch:
        """Read a file that `save` wrote, or another program in the same form.

        Raises:
            InputError: no such file, no safetensors, another format, or tensors that are missing or do not
                fit.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise InputError(f"there is no file {path}; expected a batch that LossBatch.save wrote")
        try:
            with cast(Any, safe_open)(str(path), framework="pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                names: list[str] = list(file.keys())
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
        except SafetensorError as exc:
            raise InputError(f"{path} is no safetensors file ({exc}); LossBatch.save writes one") from exc
        return cls._from_parts(str(path), tensors, metadata)

    @classmethod
    def _from_parts(cls, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> LossBatch:
        missing = [name for name in _REQUIRED if name not in tensors]
        if missing:
            raise InputError(
                f"{path} lacks {', '.join(missing)}: it holds {', '.join(sorted(tensors)) or 'nothing'}, "
                f"expected {', '.join(_REQUIRED)} and perhaps ref_logits; LossBatch.save writes this form"
            )
        if metadata.get("format") != FORMAT:
            raise InputError(
                f"{path} says format {metadata.get('format')!r} in its metadata, expected {FORMAT!r}; "
                f"LossBatch.save writes it"
            )
        try:
            boundaries = tuple(int(offset) for offset in json.loads(metadata["group_boundaries"]))
            vocab_size, temperature = int(metadata["vocab_size"]), float(metadata.get("temperature", "1.0"))
        except (KeyError, TypeError, ValueError) as exc:
            raise InputError(
                f"{path} has metadata {dict(metadata)}, expected vocab_size (an integer), group_boundaries "
                f"(a JSON list of integers) and temperature (a number)"
            ) from exc
        known = {field.name for field in fields(cls)}
        try:
            return cls(
                group_boundaries=boundaries,
                vocab_size=vocab_size,
                temperature=temperature,
                **cast(Any, {name: tensor for name, tensor in tensors.items() if name in known}),
            )
        except InputError as exc:
            raise InputError(f"{path}: {exc}") from exc

    @classmethod
    def generate(
        cls,
        seed: int = 0,
        *,
        group_sizes: Sequence[int] = (4, 5, 3),
        seq_len: int = 24,
        vocab_size: int = 2039,
        padded_vocab_size: int = 2112,
        dtype: torch.dtype = torch.bfloat16,
        with_reference: bool = True,
    ) -> LossBatch:
        """A batch made to be awkward; the same bits on every machine, for it comes from integers.

        It has groups of different sizes that straddle DP ranks, sequences of different lengths, an empty one
        and one with holes, −inf and fill values among the logits, padding columns, and garbage (NaN, ±inf,
        targets outside the vocabulary) wherever nothing may be read.

        Args:
            seed: Of numpy's RandomState.
            group_sizes: Sequences of each group.
            seq_len: T.
            vocab_size: Real columns; at least 16.
            padded_vocab_size: V.
            dtype: Of the logits.
            with_reference: Whether there are reference logits.

        Raises:
            InputError: sizes that do not allow such a batch.
        """
        small = vocab_size < 16 or seq_len < 4 or min(group_sizes, default=0) < 1
        if small or padded_vocab_size < vocab_size:
            raise InputError(
                f"cannot generate group_sizes {tuple(group_sizes)}, seq_len {seq_len}, "
                f"vocab_size {vocab_size}, padded_vocab_size {padded_vocab_size}; "
                f"expected groups of at least 1 sequence, seq_len of at least 4, "
                f"16 ≤ vocab_size ≤ padded_vocab_size"
            )
        random = np.random.RandomState(seed)
        sequences = sum(group_sizes)
        mask = _random_mask(random, sequences, seq_len)
        targets = torch.from_numpy(random.randint(0, vocab_size, (sequences, seq_len)))
        logits = _random_logits(random, targets, padded_vocab_size, vocab_size, dtype)
        noise = torch.from_numpy(random.randint(-24, 25, (sequences, seq_len)))
        old = _quantised_logps(logits, targets, vocab_size, noise)
        rewards = torch.from_numpy(random.randint(0, 5, sequences)).float() / 4
        rewards[0], rewards[1] = 1.0, 0.0  # whatever the seed, one group is mixed
        reference = None
        if with_reference:
            shift = random.randint(-16, 17, (sequences, seq_len, padded_vocab_size)).astype(np.float32) / 64
            reference = (logits.float() + torch.from_numpy(shift)).to(dtype)
        for tensor in (logits, reference):
            if tensor is not None:
                _spoil_unread(tensor, mask, vocab_size)
        turn = torch.arange(int((~mask).sum())) % 3
        targets[~mask] = torch.tensor([-100, vocab_size + 7, -1])[turn]
        old[~mask] = torch.tensor([torch.nan, torch.inf, 1e30])[turn]
        return cls(
            logits=logits,
            targets=targets,
            old_logps=old,
            rewards=rewards,
            mask=mask,
            group_boundaries=(0, *accumulate(group_sizes)),
            vocab_size=vocab_size,
            ref_logits=reference,
        )


def _random_mask(random: np.random.RandomState, sequences: int, seq_len: int) -> Tensor:
    lengths = torch.from_numpy(random.randint(max(1, seq_len // 4), seq_len + 1, sequences))
    lengths[0] = seq_len
    mask = torch.arange(seq_len)[None] < lengths[:, None]
    if sequences > 2:
        mask[sequences // 2] = False  # a sequence without any token
        mask[2, 1::3] = False  # one with holes
    return mask


def _random_logits(
    random: np.random.RandomState, targets: Tensor, padded: int, vocab_size: int, dtype: torch.dtype
) -> Tensor:
    """[S, T, V]: nearly gaussian of deviation 2.3, targets favoured, some columns impossible."""
    shape = (*targets.shape, padded)
    total = np.zeros(shape, np.int32)
    for _ in range(4):
        total += random.randint(-128, 128, shape, np.int16)
    values = torch.from_numpy(total).float() / 64
    boost = torch.from_numpy(random.randint(0, 8, targets.shape)).float()
    own = values.gather(-1, targets[..., None]) + boost[..., None]
    values[:, 1::4, 3::11] = -torch.inf
    # a block of fill values, wide enough to be the whole of a shard
    values[:, ::3, vocab_size // 8 : vocab_size // 2] = torch.finfo(dtype).min
    return values.scatter(-1, targets[..., None], own).to(dtype)


def _quantised_logps(logits: Tensor, targets: Tensor, vocab_size: int, noise: Tensor) -> Tensor:
    """[S, T] fp32 near the policy's own log-probs; multiples of 1/64, so that no libm shows in them."""
    rows = [sequence[:, :vocab_size].double().log_softmax(-1) for sequence in logits]
    logps = torch.stack(rows).gather(-1, targets[..., None])[..., 0]
    return ((logps * 64).round() + noise).clamp_max(0).float() / 64


def _spoil_unread(logits: Tensor, mask: Tensor, vocab_size: int) -> None:
    """Garbage wherever the loss may not look: inactive rows and padding columns."""
    garbage = torch.tensor([torch.nan, torch.inf, 3e4, -torch.inf], dtype=logits.dtype)
    rows = (~mask).nonzero()
    logits[rows[:, 0], rows[:, 1]] = garbage[torch.arange(len(rows)) % 4][:, None]
    columns = logits.shape[-1] - vocab_size
    logits[..., vocab_size:] = garbage[torch.arange(columns) % 4]
