"""The elementwise part of the loss: what one token contributes, with its derivative in logp.

Order of operations and roundings: docs/numerics.md, section 7. With Δ = logp − old and r = exp(Δ), r' = r, so

    surrogate = −min(r·A, clip(r)·A)         d/dlogp = −r·A where r·A ≤ clip(r)·A, else 0
    k3 = exp(d) − 1 − d, d = ref − logp      d/dlogp = −(exp(d) − 1)
    k1 = logp − ref                          d/dlogp = 1

Where the clip is inactive the two products are the same number, so the first case holds, as in autograd of
`torch.min` over `torch.clamp` (Schulman et al., "Proximal Policy Optimization Algorithms", 2017, eq. 7; Shao
et al., "DeepSeekMath", 2024, eq. 3 and 4; k1 and k3: Schulman, "Approximating KL Divergence", 2020).

Shapes: N tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_engine.contracts import KLEstimator, ObjectiveSpec
from rl_engine.numerics.exp import exp32, expm1_32, phi32

__all__ = ["TokenTerms", "token_terms"]


class TokenTerms(NamedTuple):
    """Per-token values, +0 on inactive tokens.

    Attributes:
        surrogate: [N] fp32.
        kl: [N] fp32, or None without a reference.
        gradient: [N] fp32, derivative of surrogate + β·KL in logp, before the token's weight.
        guarded: [N] bool, active tokens whose log-ratio met the guard.
    """

    surrogate: Tensor
    kl: Tensor | None
    gradient: Tensor
    guarded: Tensor


def token_terms(
    logp: Tensor, old: Tensor, advantage: Tensor, ref: Tensor | None, active: Tensor, objective: ObjectiveSpec
) -> TokenTerms:
    """Evaluate the objective on every active token; inactive ones are selected away before any arithmetic.

    Args:
        logp: [N] fp32 live log-probs.
        old: [N] fp32 log-probs of the behaviour policy.
        advantage: [N] fp32.
        ref: [N] fp32 log-probs of the reference, or None.
        active: [N] bool.
        objective: The formula.

    Returns:
        Values and derivative.
    """
    logp, old, advantage = (torch.where(active, v, 0.0) for v in (logp, old, advantage))
    guard = float(np.float32(objective.log_ratio_guard))

    delta = logp - old
    over = delta > guard
    ratio = exp32(torch.where(over, guard, delta))
    low = float(np.float32(1.0 - objective.clip.clip_eps_low))
    high = float(np.float32(1.0 + objective.clip.clip_eps_high))
    unclipped = ratio * advantage
    clipped = ratio.clamp(low, high) * advantage
    surrogate = torch.where(active, -torch.minimum(unclipped, clipped), 0.0)
    gradient = torch.where((unclipped > clipped) | over, 0.0, -unclipped)  # NaN stays NaN

    kl = None
    guarded = over
    if ref is not None:
        ref = torch.where(active, ref, 0.0)
        if objective.kl_estimator is KLEstimator.K3_UNBIASED:
            d = ref - logp
            far = d > guard
            d = torch.where(far, guard, d)
            value, slope = phi32(d), torch.where(far, 0.0, -expm1_32(d))
            guarded = guarded | far
        else:
            value, slope = logp - ref, torch.ones_like(logp)
        kl = torch.where(active, value, 0.0)
        if objective.beta > 0:
            gradient = gradient + slope * float(np.float32(objective.beta))
    return TokenTerms(surrogate, kl, torch.where(active, gradient, 0.0), guarded & active)
