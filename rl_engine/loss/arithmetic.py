"""The arithmetic of a loss backend, and the exact one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from rl_engine.contracts import AdvantageSpec, LossReductionSpec, ObjectiveSpec
from rl_engine.loss import advantages, objective, sums
from rl_engine.loss.objective import TokenTerms
from rl_engine.loss.sums import LossSums
from rl_engine.mesh import Axis
from rl_engine.numerics import NUMERICS_ID

__all__ = ["ExactArithmetic", "LossArithmetic"]


class LossArithmetic(Protocol):
    """What differs between loss backends; checks, errors and the order of collectives are shared."""

    backend_id: str
    numerics_id: str

    def group_advantages(
        self, rewards: Tensor, group_boundaries: tuple[int, ...], spec: AdvantageSpec
    ) -> Tensor:
        """[S] fp32 rewards to [S] fp32 advantages."""
        ...

    def token_terms(
        self,
        logp: Tensor,
        old: Tensor,
        advantage: Tensor,
        ref: Tensor | None,
        active: Tensor,
        objective: ObjectiveSpec,
    ) -> TokenTerms:
        """Per-token values and derivative."""
        ...

    def token_weights(self, active_tokens: Tensor, reduction: LossReductionSpec, dp_size: int) -> Tensor:
        """[S] fp32 gradient weight of a token of each sequence; `dp_size` is the DP × CP degree."""
        ...

    def reduce_terms(
        self,
        terms: TokenTerms,
        sequence: Tensor,
        active_tokens: Tensor,
        extra: Tensor,
        *,
        objective: ObjectiveSpec,
        reduction: LossReductionSpec,
        axes: Sequence[Axis],
    ) -> LossSums:
        """Token terms of all ranks to the loss."""
        ...


class ExactArithmetic:
    """docs/numerics.md, sections 6 and 7: the same bits in every layout."""

    backend_id = "exact"
    numerics_id = NUMERICS_ID

    group_advantages = staticmethod(advantages.group_advantages)
    token_terms = staticmethod(objective.token_terms)
    token_weights = staticmethod(sums.token_weights)
    reduce_terms = staticmethod(sums.reduce_terms)
