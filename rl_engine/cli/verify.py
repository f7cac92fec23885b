"""`rl-engine verify`: a batch from the options or a file, its cases, and how the run is shown."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rl_engine.contracts import LogitsDtype, LossReductionSpec, ObjectiveSpec, TokenNormalizer
from rl_engine.errors import InputError
from rl_engine.verify import Case, LossBatch, VerifyReport, layout_matrix, parse_degrees
from rl_engine.verify import verify as run_verify

__all__ = ["Options", "group_sizes", "progress_bar", "verify"]

_TORCH_DTYPES = {
    LogitsDtype.BF16: torch.bfloat16,
    LogitsDtype.FP16: torch.float16,
    LogitsDtype.FP32: torch.float32,
}
_GROUPS = (4, 5, 3)  # sizes that no DP degree divides alike, so that groups straddle ranks
_BETAS = (0.0, 0.04)
_FAMILIES = (TokenNormalizer.GLOBAL_ACTIVE_TOKENS, TokenNormalizer.PER_SEQUENCE_THEN_MEAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `rl-engine verify`; None where the user said nothing."""

    file: Path | None
    tp: str
    dp: str
    dtype: str
    vocab: int
    padded_vocab: int | None
    seqs: int
    length: int
    seed: int
    beta: float | None
    normalizer: str | None
    backend: str
    device: str
    even: bool
    timeout: float
    html: Path | None

    def batch(self) -> LossBatch:
        """Return the batch of the file, or a generated one."""
        if self.file is not None:
            return LossBatch.load(self.file)
        # Whoever names no padding gets some: at least one column, up to a multiple of 64.
        padded = -(-(self.vocab + 1) // 64) * 64 if self.padded_vocab is None else self.padded_vocab
        return LossBatch.generate(
            self.seed,
            group_sizes=group_sizes(self.seqs),
            seq_len=self.length,
            vocab_size=self.vocab,
            padded_vocab_size=padded,
            dtype=_TORCH_DTYPES[LogitsDtype.parse(self.dtype)],
            with_reference=self.beta != 0.0,
        )

    def cases(self, batch: LossBatch) -> tuple[Case, ...]:
        """Return the losses to compute: both families, with and without a KL term, by default."""
        betas = (0.0,) if batch.ref_logits is None else _BETAS
        betas = betas if self.beta is None else (self.beta,)
        normalizers = _FAMILIES if self.normalizer is None else (_normalizer(self.normalizer),)
        slots = float(batch.num_sequences * batch.seq_len)
        return tuple(
            Case(
                name=f"{normalizer}, β {beta:g}",
                objective=ObjectiveSpec(beta=beta),
                reduction=LossReductionSpec(
                    token_normalizer=normalizer,
                    fixed_normalizer_constant=slots if normalizer is TokenNormalizer.FIXED_CONSTANT else None,
                ),
            )
            for normalizer in normalizers
            for beta in betas
        )


def _normalizer(name: str) -> TokenNormalizer:
    try:
        return TokenNormalizer(name)
    except ValueError:
        raise InputError(f"--normalizer is {name!r}, expected one of {', '.join(TokenNormalizer)}") from None


def group_sizes(sequences: int) -> tuple[int, ...]:
    """Return sizes of groups, none of them 1, that add up to a number of sequences.

    Raises:
        InputError: Fewer than two sequences.

    Example:
        >>> group_sizes(12), group_sizes(10), group_sizes(13)
        ((4, 5, 3), (4, 6), (4, 5, 4))
    """
    if sequences < 2:
        raise InputError(f"--seqs is {sequences}, expected at least 2, since a group of one has no advantage")
    sizes: list[int] = []
    for size in cycle(_GROUPS):
        left = sequences - sum(sizes)
        if left - size < 2:  # too few for a group after this one
            sizes.append(left)
            break
        sizes.append(size)
    return tuple(sizes)


@contextmanager
def progress_bar(out: Console) -> Generator[Callable[[int, int, str], None]]:
    """Yield a function (done, total, what runs now) that moves a bar; the bar is gone at the end."""
    columns = (
        TextColumn("verify"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        task = progress.add_task("starting the ranks", total=None)

        def move(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        yield move


def verify(options: Options, progress: Callable[[int, int, str], None]) -> VerifyReport:
    """Run what the options ask for, and write the page if one is asked for.

    Raises:
        RLEngineError: Options that do not go together, or a batch that proves nothing.
    """
    if options.device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device is {options.device!r}, expected auto, cpu or cuda")
    layouts = layout_matrix(parse_degrees(options.tp, "--tp"), parse_degrees(options.dp, "--dp"))
    batch = options.batch()
    report = run_verify(
        batch,
        layouts,
        backend=options.backend,
        cases=options.cases(batch),
        uneven=not options.even,
        device=options.device,
        progress=progress,
        timeout=options.timeout,
    )
    if options.html is not None:
        report.write_html(options.html)
    return report
