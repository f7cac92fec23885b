"""What the numbers should be near: log-softmax, its gradient, the entropy in float64, sums by `math.fsum`."""

from __future__ import annotations

import math


def logsumexp(row: list[float], temperature: float = 1.0) -> float:
    """ln sum exp(x / T)."""
    top = max(row)
    return top / temperature + math.log(math.fsum(math.exp((x - top) / temperature) for x in row))


def logp(row: list[float], target: int, temperature: float = 1.0) -> float:
    """ln softmax(x / T) at the target, without the cancellation of two large numbers."""
    top = max(row)
    total = math.fsum(math.exp((x - top) / temperature) for x in row)
    if row[target] == top:  # log1p keeps the digits of a logp near 0
        rest = math.fsum(math.exp((x - top) / temperature) for j, x in enumerate(row) if j != target)
        return -math.log1p(rest)
    return (row[target] - top) / temperature - math.log(total)


def probabilities(row: list[float], temperature: float = 1.0) -> list[float]:
    """softmax(x / T)."""
    top = max(row)
    weights = [math.exp((x - top) / temperature) for x in row]
    total = math.fsum(weights)
    return [w / total for w in weights]


def mean_distance(row: list[float], target: int, temperature: float = 1.0) -> float:
    """|x_t - E[x]| under the softmax, which the error bound of the page is made of; -inf has no weight."""
    p = probabilities(row, temperature)
    mean = math.fsum(w * x for w, x in zip(p, row, strict=True) if w > 0.0)
    return abs(row[target] - mean)


def entropy(row: list[float], temperature: float = 1.0) -> float:
    """-sum p ln p."""
    top = max(row)
    total = math.fsum(math.exp((x - top) / temperature) for x in row)
    log_total = math.log(total)
    out = []
    for x in row:
        w = math.exp((x - top) / temperature)
        if w > 0.0:
            out.append(w / total * (log_total - (x - top) / temperature))
    return math.fsum(out)


def gradient(
    row: list[float], target: int, *, a: float = 0.0, b: float = 0.0, h: float = 0.0, temperature: float = 1.0
) -> list[float]:
    """d(a * logp + b * lse + h * entropy) / d(logits)."""
    p = probabilities(row, temperature)
    ent = entropy(row, temperature)
    out = []
    for j, w in enumerate(p):
        value = a * ((j == target) - w) + b * w
        if w > 0.0:
            value -= h * w * (math.log(w) + ent)
        out.append(value / temperature)
    return out


def grpo(
    logp: list[list[float]],
    old: list[list[float]],
    advantage: list[float],
    mask: list[list[bool]],
    *,
    ref: list[list[float]] | None = None,
    beta: float = 0.0,
    normalizer: str = "global_active_tokens",
    constant: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> tuple[float, list[list[float]]]:
    """The loss of [S][T] log-probs with k3, and its gradient, by the textbook in float64."""
    count = [sum(row) for row in mask]
    sequences = len(mask) if normalizer == "per_sequence_then_mean_all" else sum(c > 0 for c in count)
    terms: list[float] = []
    grad: list[list[float]] = []
    for s, row in enumerate(mask):
        divisor = {"global_active_tokens": sum(count), "fixed_constant": constant}.get(normalizer)
        weight = 1.0 / (count[s] * sequences if divisor is None else divisor) if count[s] else 0.0
        grad.append([])
        for t, active in enumerate(row):
            if not active:
                grad[s].append(0.0)
                continue
            ratio = math.exp(logp[s][t] - old[s][t])
            plain = ratio * advantage[s]
            clipped = min(max(ratio, 1.0 - eps_low), 1.0 + eps_high) * advantage[s]
            value, slope = -min(plain, clipped), -plain if plain <= clipped else 0.0
            if ref is not None and beta != 0.0:
                d = ref[s][t] - logp[s][t]
                value += beta * (math.expm1(d) - d)
                slope -= beta * math.expm1(d)
            terms.append(value * weight)
            grad[s].append(slope * weight)
    return math.fsum(terms), grad
