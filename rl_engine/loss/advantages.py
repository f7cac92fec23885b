"""Group-relative advantages from the rewards of the whole batch, the same on every rank.

The mean is an exact sum divided once; deviations are squared and added in float64 in member order,
elementwise over groups, so that devices agree (docs/numerics.md, section 7). Equal rewards give exactly 0.

Shao et al., "DeepSeekMath", 2024, section 4.1 (mean and std of the group); Liu et al., "Understanding
R1-Zero-Like Training", 2025 (mean only).

Shapes: S sequences, G groups.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rl_engine.contracts import AdvantageNormalizer, AdvantageSpec
from rl_engine.numerics.accumulator import accumulate, close_fp64

__all__ = ["group_advantages"]


def group_advantages(rewards: Tensor, group_boundaries: tuple[int, ...], spec: AdvantageSpec) -> Tensor:
    """Advantages of every sequence.

    Args:
        rewards: [S] fp32, in global sequence order.
        group_boundaries: G + 1 offsets; group g holds sequences [boundaries[g], boundaries[g + 1]).
        spec: The normaliser.

    Returns:
        [S] fp32.

    Example:
        >>> group_advantages(torch.tensor([1e8, 1e8 + 8]), (0, 2), AdvantageSpec()).tolist()
        [-1.0, 1.0]
    """
    device = rewards.device
    start = torch.tensor(group_boundaries[:-1], device=device)
    size = torch.tensor([b - a for a, b in pairwise(group_boundaries)], device=device)
    group = torch.repeat_interleave(torch.arange(len(size), device=device), size, output_size=len(rewards))

    count = size.double()
    mean = close_fp64(accumulate(rewards, group, len(size))) / count
    deviation = rewards.double() - mean[group]
    if spec.normalizer is AdvantageNormalizer.MEAN_ONLY:
        return deviation.float()

    squares = torch.zeros_like(count)
    for member in range(max(b - a for a, b in pairwise(group_boundaries))):
        index = (start + member).clamp(max=len(rewards) - 1)
        squares = squares + torch.where(member < size, deviation[index] * deviation[index], 0.0)
    if spec.normalizer is AdvantageNormalizer.MEAN_STD_POPULATION:
        scale = (squares / count).sqrt().clamp(min=spec.std_eps)
    else:
        scale = (squares / (count - 1.0)).sqrt() + spec.std_eps
    return (deviation / scale[group]).float()
