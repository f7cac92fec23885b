"""Section 7, a batch at a time: advantages, token weights, exact sums, the loss with its gradient in logp."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from tests.oracle import elementwise, sums
from tests.oracle.ieee import add32, fl32, mul32


def advantages(
    rewards: list[float], boundaries: list[int], *, normalizer: str = "mean_std_population", eps: float = 1e-6
) -> list[float]:
    """Group advantages of rewards (fp32 values, by global sequence index) under CSR group boundaries."""
    out: list[float] = []
    for start, end in itertools.pairwise(boundaries):
        group = rewards[start:end]
        n = len(group)
        mean = sums.close64(group) / n
        square_sum = 0.0
        for r in group:
            square_sum = square_sum + (r - mean) * (r - mean)
        if normalizer == "mean_only":
            out += [fl32(r - mean) for r in group]
        elif normalizer == "mean_std_population":
            std = max(math.sqrt(square_sum / n), eps)
            out += [fl32((r - mean) / std) for r in group]
        elif normalizer == "mean_std_sample":
            std = math.sqrt(square_sum / (n - 1)) + eps
            out += [fl32((r - mean) / std) for r in group]
        else:
            raise ValueError(normalizer)
    return out


class Loss(NamedTuple):
    """The reports and the gradient of the loss in every logp."""

    loss: float
    policy_loss: float
    kl: float | None
    grad: list[list[float]]
    per_sequence_policy: list[float]
    guarded: int


def grpo(
    logp: list[list[float]],
    old: list[list[float]],
    advantage: list[float],
    mask: list[list[bool]],
    *,
    ref: list[list[float]] | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3_unbiased",
    normalizer: str = "global_active_tokens",
    constant: float | None = None,
    dp_mean: int = 1,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    guard: float = 80.0,
) -> Loss:
    """The loss of [S][T] log-probs, all values fp32; `advantage` holds one number per sequence."""
    count = [sum(row) for row in mask]
    total = sum(count)
    sequences = len(mask) if normalizer == "per_sequence_then_mean_all" else sum(c > 0 for c in count)
    values: list[list[float]] = []
    kls: list[list[float]] = []
    grad: list[list[float]] = []
    guarded = 0
    for s, row in enumerate(mask):
        values.append([])
        kls.append([])
        grad.append([])
        for t, active in enumerate(row):
            if not active:
                grad[s].append(0.0)
                continue
            term = elementwise.surrogate(
                logp[s][t], old[s][t], advantage[s], eps_low=eps_low, eps_high=eps_high, guard=guard
            )
            values[s].append(term.value)
            met = term.guarded
            if normalizer == "global_active_tokens":
                w = dp_mean / total
            elif normalizer == "fixed_constant":
                assert constant is not None
                w = dp_mean / constant
            else:
                w = dp_mean / (count[s] * sequences)
            part = term.derivative
            if ref is not None:
                pair = (logp[s][t], ref[s][t])
                kl = (
                    elementwise.kl_k1(*pair)
                    if kl_estimator == "k1_log_ratio"
                    else elementwise.kl_k3(*pair, guard)
                )
                kls[s].append(kl.value)
                met = met or kl.guarded
                if beta != 0.0:
                    part = add32(part, mul32(fl32(beta), kl.derivative))
            guarded += met
            grad[s].append(mul32(part, fl32(w)) + 0.0)  # a gradient of zero is +0

    def reduce(per_token: list[list[float]]) -> float:
        if normalizer in ("per_sequence_then_mean", "per_sequence_then_mean_all"):
            means = [fl32(sums.close64(v) / len(v)) for v in per_token if v]
            return sums.close64(means) / sequences if sequences else 0.0
        exact = sums.close64([v for row in per_token for v in row])
        divisor = total if normalizer == "global_active_tokens" else constant
        return exact / divisor if divisor else 0.0

    policy64 = reduce(values)
    kl64 = reduce(kls) if ref is not None else None
    loss64 = policy64 if kl64 is None or beta == 0.0 else policy64 + beta * kl64
    return Loss(
        fl32(loss64),
        fl32(policy64),
        None if kl64 is None else fl32(kl64),
        grad,
        [sums.close32(v) for v in values],
        guarded,
    )
