"""What every rank knows of every sequence: its reward, its active tokens, and that it is held once.

One all-reduce(SUM) of four int64 per sequence over DP, and one over CP:

| word | low bits | high bits |
|---|---|---|
| 0 | active tokens, 32 | claimed slots |
| 1 | Σ low half of the reward's bit pattern, 32 | Σ high half |
| 2 | Σ (low half² + high half²), 48 | ranks that hold a part |
| 3 | Σ (end² − start²) of the claimed segments | |

The ranks that share a sequence all bring its reward: the pattern is the sum over their number, and by
Cauchy–Schwarz n·Σ|h|² = |Σh|² holds just when all brought the same. Segments that tile [0, L) have Σ(end −
start) = L and Σ(end² − start²) = L²; a sequence that two ranks hold whole has 2L and 2L². The words hold up
to 2^14 ranks that share one sequence.

Shapes: N local tokens, S sequences of the whole batch, S_local of which this rank holds a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from rl_engine.contracts import LossShardingSpec
from rl_engine.errors import InputError
from rl_engine.mesh import Axis, all_reduce_sum_over
from rl_engine.numerics.bits import fp32_bits, from_fp32_bits

__all__ = ["GatheredSequences", "TokenBatch", "gather_sequences", "token_batch"]

_HALF = 16
_HALF_MASK = (1 << _HALF) - 1
_LOW_MASK = (1 << 32) - 1
_SQUARES = 48
_SQUARES_MASK = (1 << _SQUARES) - 1


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """This rank's tokens of the batch.

    Attributes:
        old: [N] fp32 log-probs of the behaviour policy.
        active: [N] bool.
        sequence: [N] int64, the global sequence of each token.
        own_sequences: [S_local] int64, the global index of each of this rank's sequences, in row order.
        num_sequences: S.
        claims: [2, S_local] int64, Σ(end − start) and Σ(end² − start²) of the segments; None where the
            bounds of all ranks are known.
    """

    old: Tensor
    active: Tensor
    sequence: Tensor
    own_sequences: Tensor
    num_sequences: int
    claims: Tensor | None = None

    def spread(self, values: Tensor) -> Tensor:
        """[S_local] values of this rank's sequences to [N] of its tokens."""
        table = values.new_zeros(self.num_sequences)
        table[self.own_sequences] = values
        return table[self.sequence]


def token_batch(sharding: LossShardingSpec, old: Tensor, active: Tensor) -> TokenBatch:
    """The tokens of a rank whose sharding is known.

    Args:
        sharding: What this rank holds.
        old: [N] fp32.
        active: [N] bool, on the device of everything.
    """
    device = active.device
    if sharding.segments is None:
        start, end = sharding.local_sequence_start, sharding.local_sequence_end
        tokens = torch.arange(len(active), device=device)
        return TokenBatch(
            old=old,
            active=active,
            sequence=tokens // max(1, sharding.padded_seq_len) + start,
            own_sequences=torch.arange(start, end, device=device),
            num_sequences=sharding.num_sequences,
        )
    claims = dict[int, tuple[int, int]]()
    for i, start, end in sharding.segments:
        slots, squares = claims.get(i, (0, 0))
        claims[i] = slots + end - start, squares + end * end - start * start
    ids = [i for i, _, _ in sharding.segments]
    lengths = torch.tensor([end - start for _, start, end in sharding.segments], device=device)
    return TokenBatch(
        old=old,
        active=active,
        sequence=torch.repeat_interleave(
            torch.tensor(ids, dtype=torch.int64, device=device),
            lengths.to(torch.int64),
            output_size=len(active),
        ),
        own_sequences=torch.tensor(list(claims), dtype=torch.int64, device=device),
        num_sequences=sharding.num_sequences,
        claims=torch.tensor(list(claims.values()), dtype=torch.int64, device=device).view(-1, 2).T,
    )


@dataclass(frozen=True, slots=True)
class GatheredSequences:
    """What every rank knows of every sequence.

    Attributes:
        rewards: [S] fp32; zeros where advantages were given instead, NaN where nobody or not everybody who
            holds the sequence brought the same.
        active_tokens: [S] int64.
        num_holders: [S] int64, ranks that hold a part.
        reward_agrees: [S] bool, the ranks that share a sequence brought one reward.
        tiled: [S] bool, the claimed segments cover the sequence once.
    """

    rewards: Tensor
    active_tokens: Tensor
    num_holders: Tensor
    reward_agrees: Tensor
    tiled: Tensor

    def num_problems(self) -> Tensor:
        """0-dim int64, sequences that :meth:`explain` would name."""
        return ((self.num_holders == 0) | ~self.reward_agrees | ~self.tiled).sum()

    def explain(self) -> InputError | None:
        """The first sequence that is not held as it must be, as an error. Reads from the device."""
        for bad, text in (
            (
                self.num_holders == 0,
                "is held by no rank; every sequence must be held, with its mask empty if it shall not count",
            ),
            (
                ~self.tiled,
                "is not held once: the token ranges of the ranks do not tile [0, length); check the segments "
                "of every rank, and that no sequence is on two DP ranks",
            ),
            (
                ~self.reward_agrees,
                "has different rewards on the ranks that share it; pass the same reward on every CP rank",
            ),
        ):
            found = cast("list[int]", bad.nonzero()[:, 0].tolist())
            if found:
                others = f" ({len(found)} such sequences)" if len(found) > 1 else ""
                return InputError(f"sequence {found[0]} of the batch{others} {text}")
        return None


def gather_sequences(rewards: Tensor | None, batch: TokenBatch, axes: Sequence[Axis]) -> GatheredSequences:
    """Replicate rewards, active-token counts and who holds what. One collective per axis.

    Args:
        rewards: [S_local] fp32 of this rank's sequences, None where advantages were given.
        batch: This rank's tokens.
        axes: Those over which ranks hold other tokens: DP, CP.

    Returns:
        The same on every rank.
    """
    own = batch.own_sequences
    table = torch.zeros(4, batch.num_sequences, dtype=torch.int64, device=batch.active.device)
    table[0].scatter_add_(0, batch.sequence, batch.active.to(torch.int64))
    table[2, own] = 1 << _SQUARES
    if batch.claims is not None:
        table[0, own] += batch.claims[0] << 32
        table[3, own] = batch.claims[1]
    if rewards is not None:
        bits = fp32_bits(rewards)
        low, high = bits & _HALF_MASK, bits >> _HALF
        table[1, own] = low + (high << 32)
        table[2, own] += low * low + high * high
    table = all_reduce_sum_over(axes, table)

    slots, holders = table[0] >> 32, table[2] >> _SQUARES
    low, high = table[1] & _LOW_MASK, table[1] >> 32
    agrees = (table[2] & _SQUARES_MASK) * holders == low * low + high * high
    count = holders.clamp(min=1)
    values = from_fp32_bits(low // count + ((high // count) << _HALF))
    if rewards is not None:
        values = torch.where(agrees & (holders > 0), values, torch.nan)
    return GatheredSequences(
        rewards=values,
        active_tokens=table[0] & _LOW_MASK,
        num_holders=holders,
        reward_agrees=agrees,
        tiled=slots * slots == table[3],
    )
