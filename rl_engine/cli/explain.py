"""`rl-engine explain`: who could serve a contract, and what stands against the others."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from rl_engine.contracts import (
    GRPOLossContract,
    LogprobContract,
    LogprobOutputSpec,
    LossReductionSpec,
    LossShardingSpec,
    MergeKind,
    ObjectiveSpec,
    ReductionSpec,
    ShardingSpec,
)
from rl_engine.errors import InputError
from rl_engine.registry import DispatchReport, kernel_registry

__all__ = ["Request", "explain", "print_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of `rl-engine explain`, in the words of the contract."""

    op: str
    role: str
    dtype: str
    vocab: int
    padded_vocab: int | None
    tp: int
    dp: int
    merge: str | None
    tiles: int | None
    entropy: bool
    temperature: float
    normalizer: str
    beta: float
    backend: str
    platform: str

    def logprob_contract(self) -> LogprobContract:
        """Return the contract of rank 0.

        Raises:
            LogprobContractError: An option breaks a rule of the contract.
        """
        return LogprobContract(
            role=self.role,  # pyright: ignore[reportArgumentType]  (words of a StrEnum are taken and checked)
            dtype=self.dtype,  # pyright: ignore[reportArgumentType]
            sharding=ShardingSpec.even(
                self.vocab, tp_rank=0, tp_world_size=self.tp, padded_vocab_size=self.padded_vocab
            ),
            reduction=self.reduction(),
            output=LogprobOutputSpec(entropy=self.entropy),
            temperature=self.temperature,
        )

    def reduction(self) -> ReductionSpec:
        """Return the merge that was asked for; `--tiles` alone asks for the tiled one."""
        tiled = self.tiles is not None
        merge = self.merge or (MergeKind.MAX_SUMEXP_TILES if tiled else MergeKind.EXACT_WORDS)
        if merge == MergeKind.MAX_SUMEXP_TILES:
            return ReductionSpec.tiled() if self.tiles is None else ReductionSpec.tiled(self.tiles)
        if tiled:
            raise InputError(
                f"--tiles {self.tiles} goes with --merge {MergeKind.MAX_SUMEXP_TILES}, got --merge {merge}"
            )
        if merge == MergeKind.SHARD_LSE:
            return ReductionSpec.naive()
        if merge == MergeKind.EXACT_WORDS:
            return ReductionSpec.exact()
        raise InputError(f"--merge is {merge!r}, expected one of {', '.join(MergeKind)}")

    def contract(self) -> LogprobContract | GRPOLossContract:
        """Return the contract of the op that was asked for.

        Raises:
            ContractError: An option breaks a rule of the contract.
            InputError: The op is neither of the two.
        """
        logprob = self.logprob_contract()
        if self.op == "logprob":
            return logprob
        if self.op != "loss":
            raise InputError(f"--op is {self.op!r}, expected logprob or loss")
        # Shapes do not decide who serves: two sequences a rank, in groups of two, stand for any batch.
        return GRPOLossContract(
            logprob=logprob,
            sharding=LossShardingSpec.even(2 * self.dp, 0, self.dp, padded_seq_len=1, group_size=2),
            objective=ObjectiveSpec(beta=self.beta),
            reduction=LossReductionSpec(
                token_normalizer=self.normalizer,  # pyright: ignore[reportArgumentType]
                fixed_normalizer_constant=1.0 if self.normalizer == "fixed_constant" else None,
                determinism_scope=logprob.reduction.determinism_scope,
            ),
        )


def explain(request: Request) -> DispatchReport:
    """Return how the contract of a request would be dispatched.

    Raises:
        RLEngineError: An option breaks a rule of the contract, or names no backend, op or platform.
    """
    return kernel_registry.explain(
        request.contract(), device=request.platform, requested_backend=request.backend
    )


def print_report(report: DispatchReport, out: Console) -> None:
    """Print a report as a table: each candidate with its verdict or with all that stands against it."""
    chosen = report.selected_backend
    verdict = f"[green]{chosen}[/green]" if chosen else "[red]nobody can serve[/red]"
    fallback = " (a fallback)" if report.was_fallback else ""
    out.print(
        f"[bold]{report.op}[/bold] on {report.platform} under '{report.requested_backend}': "
        f"{verdict}{fallback}"
    )
    out.print(f"asked: {report.contract}", style="dim", markup=False)
    table = Table()
    for column in ("backend", "tier", "verdict"):
        table.add_column(column)
    for candidate in report.candidates:
        if candidate.backend_id == chosen:
            text = "[green]selected[/green]"
        else:
            text = "\n".join(f"• {reason}" for reason in candidate.reasons) or "could serve"
        table.add_row(candidate.backend_id, str(candidate.implementation_kind or "undeclared"), text)
    out.print(table)
