"""Verify: one batch on many layouts of real ranks, every bit compared with the layout of one rank.

Steps:

1. the batch is written to files that all ranks map; the layout of one rank runs first and is the reference.
2. each layout runs on a pool of ranks (gloo; NCCL where there is a GPU a rank); ranks cut their own shards.
3. replicated outputs are compared between the ranks, then with the reference; gradients, put together in a
   file by the ranks, likewise.

A gradient of zeros, or one that is not finite, proves nothing and is refused.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import gcd
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rl_engine.contracts import (
    DataParallelReduction,
    DeterminismScope,
    LossReductionSpec,
    ObjectiveSpec,
    ReductionSpec,
    TokenNormalizer,
)
from rl_engine.errors import DeterminismError, InputError
from rl_engine.mesh.pool import RankPool, RankPoolError
from rl_engine.registry import kernel_registry
from rl_engine.verify.batch import LossBatch
from rl_engine.verify.compare import TensorComparison, compare_bits, is_same_bits
from rl_engine.verify.layouts import SINGLE, Layout
from rl_engine.verify.ranks import (
    Case,
    Job,
    RankReport,
    contract_of,
    evaluate_shard,
    gradient_path,
    map_file,
)
from rl_engine.verify.report import CaseReport, LayoutReport, ReplicaMismatch, VerifyReport, describe_machine

__all__ = ["default_cases", "verify"]

Progress = Callable[[int, int, str], None]
# Tiles of a tiled backend: it wants equal ones, and shards that hold whole tiles.
_MAX_TILES = 64


def default_cases(batch: LossBatch, *, beta: float = 0.04) -> tuple[Case, ...]:
    """Both families of normalisers, without a KL term and, where the batch has a reference, with one."""
    betas = (0.0, beta) if batch.ref_logits is not None else (0.0,)
    normalizers = {
        "token mean": TokenNormalizer.GLOBAL_ACTIVE_TOKENS,
        "sequence mean": TokenNormalizer.PER_SEQUENCE_THEN_MEAN,
    }
    return tuple(
        Case(
            name=f"{name}, β {value:g}",
            objective=ObjectiveSpec(beta=value),
            reduction=LossReductionSpec(token_normalizer=normalizer),
        )
        for name, normalizer in normalizers.items()
        for value in betas
    )


def verify(
    batch: LossBatch,
    layouts: Sequence[Layout],
    *,
    backend: str = "auto",
    objective: ObjectiveSpec | None = None,
    reduction: LossReductionSpec | None = None,
    cases: Sequence[Case] | None = None,
    uneven: bool = True,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    pool: RankPool | None = None,
    progress: Progress | None = None,
    timeout: float = 600.0,
) -> VerifyReport:
    """Run the batch on every layout and compare loss, totals, advantages and gradients, bit for bit.

    Args:
        batch: The whole batch.
        layouts: What to compare with tp 1 × dp 1, which runs first in any case.
        backend: Registry policy or id of the logprobs; "naive" is today's usual way (fp32, a log-sum-exp per
            shard, float all-reduces) in logprob and loss, "tiled" the fixed tiles.
        objective: The objective of a single case.
        reduction: The normaliser of a single case.
        cases: Several losses on the same batch; `default_cases(batch)` where nothing is given.
        uneven: Cut the vocabulary into shards of different widths at odd columns; equal ones otherwise, and
            for backends with tiles.
        device: Where the ranks compute; "auto" is a GPU a rank where there are enough, else the CPU. Ranks
            that share a GPU ("cuda" on a machine with too few) talk through gloo.
        pool: Ranks to use; an own pool for the call where None.
        progress: Called with (layouts done, layouts, what is running now).
        timeout: Seconds for one layout.

    Returns:
        The report; `report.ok` tells whether all bits agree.

    Raises:
        DeterminismError: the gradient of the reference is all zeros or not finite, so that nothing can be
            proven.
        InputError: arguments that do not go together.
        RLEngineError: no backend can serve the contract, or there is none of that name.
        RankPoolError: the reference itself fails.
    """
    chosen = _choose_cases(batch, objective, reduction, cases)
    plan = _Plan.make(backend, batch, chosen)
    wanted = list(dict.fromkeys([SINGLE, *layouts]))
    most_ranks = max(layout.world_size for layout in wanted)
    if pool is not None and pool.max_ranks < most_ranks:
        raise InputError(
            f"the layouts need {most_ranks} ranks and the pool has {pool.max_ranks}; "
            f"pass RankPool({most_ranks}), or none"
        )
    where, transport = _choose_device(device, most_ranks)
    started = time.monotonic()
    with ExitStack() as stack:
        directory = tempfile.mkdtemp(prefix="rl_engine_verify_")
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        ranks = pool
        if ranks is None:
            ranks = stack.enter_context(RankPool(most_ranks))
        _require_backends(plan.job(batch, SINGLE, directory, uneven=uneven), where)
        _write(Path(directory) / "logits", batch.logits)
        if batch.ref_logits is not None:
            _write(Path(directory) / "ref_logits", batch.ref_logits)
        reference: _Run | None = None
        norms: list[float] = []
        reports: list[LayoutReport] = []
        for index, layout in enumerate(wanted):
            if progress is not None:
                progress(index, len(wanted), str(layout))
            job = plan.job(batch, layout, directory, uneven=uneven)
            try:
                run = _run(ranks, job, where, transport, timeout)
            except RankPoolError as exc:
                if reference is None:
                    raise
                reports.append(LayoutReport(layout=layout, error=str(exc)))
                continue
            if reference is None:
                reference = run.keep()
                norms = [_norm(gradient) for gradient in reference.gradients]
                _refuse_nothing(norms, plan.cases)
            reports.append(_compare(run, reference, norms, job))
        if progress is not None:
            progress(len(wanted), len(wanted), "done")
    assert reference is not None
    return VerifyReport(
        batch=str(batch),
        backend=backend,
        backends=reference.backends,
        cases={case.name: f"{case.objective} | {case.reduction}" for case in plan.cases},
        norms={case.name: norm for case, norm in zip(plan.cases, norms, strict=True)},
        losses={
            case.name: float(outputs["loss"])
            for case, outputs in zip(plan.cases, reference.outputs, strict=True)
        },
        layouts=tuple(reports),
        uneven=uneven and plan.multiple_of is None,
        machine=describe_machine(where, transport),
        seconds=time.monotonic() - started,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What a backend's name asks of the registry, the same for every layout."""

    logprob_backend: str
    loss_backend: str
    logprob_reduction: ReductionSpec
    multiple_of: int | None
    cases: tuple[Case, ...]

    @classmethod
    def make(cls, backend: str, batch: LossBatch, cases: Sequence[Case]) -> _Plan:
        policy = {"naive": "naive_torch", "tiled": "tiled_torch"}.get(backend.strip(), backend.strip())
        loss, merge, multiple_of = "auto", ReductionSpec.exact(), None
        if policy == "naive_torch":
            loss, merge = "naive", ReductionSpec.naive()
        elif policy == "tiled_torch":
            tiles = gcd(batch.padded_vocab_size, _MAX_TILES)
            merge, multiple_of = ReductionSpec.tiled(tiles), batch.padded_vocab_size // tiles
        scope = merge.determinism_scope
        return cls(
            logprob_backend=policy,
            loss_backend=loss,
            logprob_reduction=merge,
            multiple_of=multiple_of,
            cases=tuple(_with_scope(case, scope) for case in cases),
        )

    def job(self, batch: LossBatch, layout: Layout, directory: str, *, uneven: bool) -> Job:
        multiple_of = self.multiple_of or (None if uneven else 1)
        return Job(
            layout=layout,
            directory=directory,
            shape=(batch.num_sequences, batch.seq_len, batch.padded_vocab_size),
            dtype=batch.logits.dtype,
            has_reference=batch.ref_logits is not None,
            targets=batch.targets,
            old_logps=batch.old_logps,
            rewards=batch.rewards,
            mask=batch.mask,
            group_boundaries=batch.group_boundaries,
            vocab_size=batch.vocab_size,
            temperature=batch.temperature,
            vocab_bounds=layout.vocab_bounds(batch.padded_vocab_size, multiple_of=multiple_of),
            sequence_bounds=layout.sequence_bounds(batch.num_sequences),
            logprob_reduction=self.logprob_reduction,
            logprob_backend=self.logprob_backend,
            loss_backend=self.loss_backend,
            cases=self.cases,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What came back from one layout; gradients are files until `keep` reads them."""

    outputs: tuple[dict[str, Tensor], ...]
    gradients: tuple[Tensor, ...]
    mismatches: tuple[ReplicaMismatch, ...]
    backends: str
    seconds: float

    def keep(self) -> _Run:
        """A copy whose gradients outlive the files."""
        return dataclasses.replace(self, gradients=tuple(gradient.clone() for gradient in self.gradients))


def _choose_cases(
    batch: LossBatch,
    objective: ObjectiveSpec | None,
    reduction: LossReductionSpec | None,
    cases: Sequence[Case] | None,
) -> tuple[Case, ...]:
    if cases is not None:
        if objective is not None or reduction is not None or not cases:
            raise InputError(
                "pass cases= with at least one case, or objective= and reduction= for a single one"
            )
        chosen = tuple(cases)
    elif objective is None and reduction is None:
        chosen = default_cases(batch)
    else:
        objective = objective or ObjectiveSpec(beta=0.04 if batch.ref_logits is not None else 0.0)
        reduction = reduction or LossReductionSpec()
        name = f"{reduction.token_normalizer}, β {objective.beta:g}"
        chosen = (Case(name=name, objective=objective, reduction=reduction),)
    for case in chosen:
        if case.objective.requires_reference and batch.ref_logits is None:
            raise InputError(f"case {case.name!r} has beta {case.objective.beta} and the batch no ref_logits")
        if case.reduction.data_parallel_reduction is not DataParallelReduction.SUM:
            raise InputError(
                f"case {case.name!r} has data_parallel_reduction='mean', which scales each rank's "
                f"gradient by the DP degree; verify compares the gradients themselves, pass 'sum'"
            )
    return chosen


def _with_scope(case: Case, scope: DeterminismScope) -> Case:
    if scope.covers(case.reduction.determinism_scope):
        return case
    return dataclasses.replace(case, reduction=dataclasses.replace(case.reduction, determinism_scope=scope))


def _choose_device(
    device: Literal["auto", "cpu", "cuda"], most_ranks: int
) -> tuple[Literal["cpu", "cuda"], Literal["gloo", "nccl"]]:
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus == 0:
        raise InputError("device is 'cuda' and this machine has no GPU that torch can see; pass device='cpu'")
    if device == "cpu" or (device == "auto" and gpus < most_ranks):
        return "cpu", "gloo"
    return "cuda", "nccl" if gpus >= most_ranks else "gloo"


def _require_backends(job: Job, device: str) -> None:
    """Raise before any rank is started where nobody can serve the contract; loads nothing otherwise."""
    for case in job.cases:
        contract = contract_of(job, case, 0, 0, job.shape[1])
        found = kernel_registry.explain(
            contract.logprob, device=device, requested_backend=job.logprob_backend
        )
        if found.selected_backend is None:
            kernel_registry.get_logprob_op(contract.logprob, job.logprob_backend, device)
        found = kernel_registry.explain(contract, device=device, requested_backend=job.loss_backend)
        if found.selected_backend is None:
            kernel_registry.get_loss_op(contract, job.loss_backend, device)


def _write(path: Path, tensor: Tensor) -> None:
    shape = (tensor.shape[0], tensor.shape[1], tensor.shape[2])
    map_file(path, shape, tensor.dtype, shared=True).copy_(tensor)


def _run(
    pool: RankPool,
    job: Job,
    device: Literal["cpu", "cuda"],
    backend: Literal["gloo", "nccl"],
    timeout: float,
) -> _Run:
    started = time.monotonic()
    gradients: list[Tensor] = []
    for index in range(len(job.cases)):
        path = gradient_path(job.directory, index)
        path.unlink(missing_ok=True)  # the reference may still map the former file
        gradient = map_file(path, job.shape, job.dtype, shared=True)
        gradient.fill_(torch.nan)  # what no rank writes is seen
        gradients.append(gradient)
    reports: list[RankReport] = pool.run(
        evaluate_shard,
        world_size=job.layout.world_size,
        args=(job,),
        backend=backend,
        device=device,
        timeout=timeout,
        group_timeout=timeout,
    )
    return _Run(
        outputs=reports[0].outputs,
        gradients=tuple(gradients),
        mismatches=_mismatches(reports, job),
        backends=reports[0].backends,
        seconds=time.monotonic() - started,
    )


def _norm(gradient: Tensor) -> float:
    """The Euclidean norm, for people; in float64, a sequence at a time."""
    squares = [float(sequence.double().square().sum()) for sequence in gradient]
    return sum(squares) ** 0.5


def _refuse_nothing(norms: Sequence[float], cases: Sequence[Case]) -> None:
    for case, norm in zip(cases, norms, strict=True):
        if norm == 0.0:
            raise DeterminismError(
                f"the gradient of case {case.name!r} is all zeros: every layout would agree on nothing; "
                f"pass a batch in which the rewards of a group differ and tokens are active"
            )
        if not norm < float("inf"):
            raise DeterminismError(
                f"the gradient of case {case.name!r} has norm {norm}: bits of NaN or inf prove nothing; "
                f"pass a batch whose active logits and log-probs are finite"
            )


def _mismatches(reports: Sequence[RankReport], job: Job) -> tuple[ReplicaMismatch, ...]:
    found: list[ReplicaMismatch] = []
    for index, case in enumerate(job.cases):
        for rank, report in enumerate(reports):
            for name, expected in reports[0].outputs[index].items():
                actual = report.outputs[index][name]
                if not is_same_bits(actual, expected):
                    found.append(
                        ReplicaMismatch(case=case.name, rank=rank, what=compare_bits(name, actual, expected))
                    )
                    break  # the first tensor of a rank tells enough
    return tuple(found)


def _compare(run: _Run, reference: _Run, norms: Sequence[float], job: Job) -> LayoutReport:
    cases: list[CaseReport] = []
    for index, case in enumerate(job.cases):
        tensors: list[TensorComparison] = [
            compare_bits(name, run.outputs[index][name], expected)
            for name, expected in reference.outputs[index].items()
        ]
        gradient = compare_bits("logits.grad", run.gradients[index], reference.gradients[index])
        norm = norms[index] if gradient.is_equal else _norm(run.gradients[index])
        cases.append(CaseReport(name=case.name, gradient_norm=norm, tensors=(*tensors, gradient)))
    return LayoutReport(
        layout=job.layout,
        vocab_bounds=job.vocab_bounds,
        sequence_bounds=job.sequence_bounds,
        cases=tuple(cases),
        mismatches=run.mismatches,
        seconds=run.seconds,
    )
