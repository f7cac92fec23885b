"""Failures that users reported against software of this kind, as small inputs with the right value.

Each test is named after its row of the list of reports; lp, old and ref are log-probs, A an advantage.
"""

from __future__ import annotations

import itertools
import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import rl_engine
from rl_engine.contracts import (
    AdvantageNormalizer,
    AdvantageSpec,
    LogprobContract,
    LossReductionSpec,
    ObjectiveSpec,
    ShardingSpec,
    TokenNormalizer,
)
from rl_engine.errors import AgreementError, InputError
from rl_engine.logprob.op import VocabParallelLogprobOp
from rl_engine.loss.advantages import group_advantages
from rl_engine.mesh.pool import RankPool
from tests.bits import assert_bits_equal
from tests.golden import rank_functions as on_rank
from tests.oracle import float64

TOY = [2.0, 1.0, 0.0, -1.0, 0.5, -0.5]
TOY_LSE, TOY_LOGP = 2.6196174, -1.6196174
TOKENS = LossReductionSpec()
PER_SEQUENCE = LossReductionSpec(token_normalizer=TokenNormalizer.PER_SEQUENCE_THEN_MEAN)


def constant(value: float) -> LossReductionSpec:
    return LossReductionSpec(token_normalizer=TokenNormalizer.FIXED_CONSTANT, fixed_normalizer_constant=value)


def batch_of(lengths: list[int], *, seed: int = 0, slots: int | None = None) -> dict[str, Tensor]:
    """Sequences of the given numbers of active tokens: log-probs, advantages and mask."""
    rng = random.Random(seed)
    slots = max(lengths) if slots is None else slots

    def table(spread: float, mean: float) -> Tensor:
        return torch.tensor([[rng.gauss(mean, spread) for _ in range(slots)] for _ in lengths])

    logps = table(0.5, -1.5)
    return {
        "logps": logps,
        "old": logps + table(0.1, 0.0),
        "ref": logps + table(0.3, 0.0),
        "advantages": torch.tensor([rng.gauss(0, 1) for _ in lengths]),
        "mask": torch.tensor([[t < n for t in range(slots)] for n in lengths]),
    }


def evaluate(
    batch: dict[str, Tensor],
    reduction: LossReductionSpec = TOKENS,
    objective: ObjectiveSpec = ObjectiveSpec(),  # noqa: B008
) -> tuple[rl_engine.GRPOLossResult, Tensor]:
    """(result, gradient in logps) on this process alone."""
    logps = batch["logps"].clone().requires_grad_()
    result = rl_engine.policy_loss(
        logps,
        batch["old"],
        batch["advantages"],
        mask=batch["mask"],
        ref_logps=batch.get("ref"),
        objective=objective,
        reduction=reduction,
    )
    result.loss.backward()
    assert logps.grad is not None
    return result, logps.grad


def run_ranks(
    pool: RankPool,
    batch: dict[str, Tensor],
    bounds: list[int],
    reduction: LossReductionSpec = TOKENS,
    objective: ObjectiveSpec = ObjectiveSpec(),  # noqa: B008
    padded: list[int] | None = None,
) -> list[dict[str, Any]]:
    return pool.run(
        on_rank.policy_loss,
        world_size=len(bounds) - 1,
        args=(batch, bounds, objective, reduction, padded),
    )


def rows_of(batch: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: value[start:stop] for name, value in batch.items()}


def assert_same_loss(
    ranks: list[dict[str, Any]],
    batch: dict[str, Tensor],
    reduction: LossReductionSpec,
    objective: ObjectiveSpec,
) -> None:
    """Every rank reports the single process's numbers; the gradients put together are its gradient."""
    result, grad = evaluate(batch, reduction, objective)
    for i, rank in enumerate(ranks):
        for name in ("loss", "policy_loss", "kl", "per_sequence_policy", "per_sequence_kl"):
            assert_bits_equal(rank[name], getattr(result, name), f"rank {i}: {name}")
        assert rank["num_active_tokens"].item() == int(batch["mask"].sum())
    width = grad.shape[1]
    together = torch.cat([on_rank.fit(rank["grad"], width) for rank in ranks])
    assert_bits_equal(together, grad, "gradient")


def nonzero(grad: Tensor) -> bool:
    return bool((grad != 0).any())


# ------------------------------------------------------------- normalisers, micro-batches, data parallel


def test_row_1_and_2_micro_batches(pool: RankPool) -> None:
    """1 + 9 and 10 + 6 tokens in two micro-batches or one: the same gradient and totals, bit by bit."""
    for lengths in ([1, 9], [10, 6]):
        batch = batch_of(lengths)
        whole, grad = evaluate(batch)
        # accumulated over two calls that divide by the whole batch's tokens …
        parts = [evaluate(rows_of(batch, s, s + 1), constant(sum(lengths))) for s in (0, 1)]
        assert nonzero(grad)
        assert_bits_equal(torch.cat([g for _, g in parts]), grad, "gradient")
        totals = torch.cat([result.per_sequence_policy for result, _ in parts])
        assert_bits_equal(totals, whole.per_sequence_policy, "totals")
        # each report is rounded once, so their sum is off by half a unit of each at most
        rounding = sum(2.0**-25 * abs(r.loss.item()) for r in (whole, *(r for r, _ in parts)))
        assert abs(sum(r.loss.item() for r, _ in parts) - whole.loss.item()) <= 2 * rounding
        # … or over two ranks of one call, where the reported loss has the same bits too
        assert_same_loss(run_ranks(pool, batch, [0, 1, 2]), batch, TOKENS, ObjectiveSpec())


def test_row_3_every_token_weighs_the_same_on_every_rank(pool: RankPool) -> None:
    """5 tokens on rank 0, 1 on rank 1: each weighs 1/6; a mean of means would give the last one 5×."""
    batch = batch_of([5, 1])
    batch["old"], batch["advantages"] = batch["logps"].clone(), torch.ones(2)
    ranks = run_ranks(pool, batch, [0, 1, 2])
    weights = [rank["grad"][rank["grad"] != 0] for rank in ranks]
    assert [len(w) for w in weights] == [5, 1]
    for w in weights:
        assert_bits_equal(w, torch.full_like(w, -1 / 6), "weight")
    assert ranks[0]["loss"].item() == -1.0


@pytest.mark.parametrize("lengths", [[100, 1], [100, 0], [0, 3], [5, 0, 0, 7]])
@pytest.mark.parametrize(
    "reduction", [TOKENS, PER_SEQUENCE, constant(64.0)], ids=["tokens", "sequences", "constant"]
)
def test_row_4_very_unequal_ranks(pool: RankPool, lengths: list[int], reduction: LossReductionSpec) -> None:
    """Ranks with few tokens or none: the same collectives on every rank, the right loss on all."""
    batch = batch_of(lengths)
    objective = ObjectiveSpec(beta=0.04)
    ranks = run_ranks(pool, batch, list(range(len(lengths) + 1)), reduction, objective)
    assert_same_loss(ranks, batch, reduction, objective)
    assert all(rank["collectives"] == ranks[0]["collectives"] for rank in ranks)
    assert sum(ranks[0]["collectives"].values()) > 0


def test_row_4_a_rank_without_sequences(pool: RankPool) -> None:
    batch = batch_of([4, 7])
    ranks = run_ranks(pool, batch, [0, 0, 2, 2])
    assert_same_loss(ranks, batch, TOKENS, ObjectiveSpec())


def test_row_5_on_policy_with_lengths_that_differ() -> None:
    """ΣA over the group is 0: the per-sequence mean gives loss 0, the token mean does not. Both are right."""
    batch = batch_of([2, 6])
    batch["old"], batch["advantages"] = batch["logps"].clone(), torch.tensor([1.0, -1.0])
    by_sequence, grad = evaluate(batch, PER_SEQUENCE)
    by_token, _ = evaluate(batch, TOKENS)
    assert by_sequence.loss.item() == 0.0
    assert nonzero(grad)
    assert by_token.loss.item() == (6 - 2) / 8


def test_row_6_token_mean_is_over_the_batch() -> None:
    """Groups of 10 and 100 tokens: every token weighs 1/110, whatever its group."""
    lengths = [4, 6, 30, 70]
    batch = batch_of(lengths)
    batch["old"], batch["advantages"] = batch["logps"].clone(), torch.ones(4)
    _, grad = evaluate(batch)
    active = grad[batch["mask"]]
    assert_bits_equal(active, torch.full_like(active, -1 / 110), "weight")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("normalizer", ["tokens", "sequences", "constant"])
def test_row_7_trainers_that_average_gradients(pool: RankPool, normalizer: str, ranks: int) -> None:
    """data_parallel_reduction="mean": the averaged gradient is the single-rank one, the report unscaled."""
    chosen = {"tokens": TOKENS, "sequences": PER_SEQUENCE, "constant": constant(20.0)}[normalizer]
    averaged = LossReductionSpec(
        token_normalizer=chosen.token_normalizer,
        fixed_normalizer_constant=chosen.fixed_normalizer_constant,
        data_parallel_reduction="mean",
    )
    batch = batch_of([3, 8, 5, 2, 7, 1])
    single, grad = evaluate(batch, chosen)
    bounds = [6 * r // ranks for r in range(ranks + 1)]
    out = run_ranks(pool, batch, bounds, averaged)
    for rank in out:
        assert_bits_equal(rank["loss"], single.loss.detach(), "reported loss")
    together = torch.cat([rank["grad"] for rank in out]) / ranks
    if ranks == 2:  # halving is exact
        assert_bits_equal(together, grad, "averaged gradient")
    assert together.flatten().tolist() == pytest.approx(grad.flatten().tolist(), rel=3e-7)


# ------------------------------------------------------------- masks, truncation, empty


@pytest.mark.parametrize(
    "reduction", [TOKENS, PER_SEQUENCE, constant(3.0)], ids=["tokens", "sequences", "constant"]
)
def test_row_11_everything_masked(reduction: LossReductionSpec) -> None:
    batch = batch_of([0, 0, 0], slots=4)
    batch["logps"][0, 1] = math.nan
    result, grad = evaluate(batch, reduction, ObjectiveSpec(beta=0.1))
    for value in (result.loss, result.policy_loss, result.kl):
        assert_bits_equal(value.detach(), torch.tensor(0.0), "loss")
    assert_bits_equal(grad, torch.zeros(3, 4), "gradient")
    assert result.num_active_tokens.item() == 0
    strict = LossReductionSpec(on_empty="error")
    with pytest.raises(InputError, match="no token of the whole batch is active"):
        evaluate(batch, strict)


def test_row_12_one_empty_sequence() -> None:
    """Empties counted and empties left out are two normalisers with two names; nothing is ever NaN."""
    lengths = [5, 3, 1, 0]
    batch = batch_of(lengths)
    out, grads = {}, {}
    for kind in ("per_sequence_then_mean", "per_sequence_then_mean_all"):
        result, grads[kind] = evaluate(batch, LossReductionSpec(token_normalizer=kind))
        out[kind] = result.loss.item()
        assert bool(result.per_sequence_policy.isfinite().all())
    assert out["per_sequence_then_mean"] * 3 == pytest.approx(out["per_sequence_then_mean_all"] * 4, rel=1e-6)
    assert all(bool(grad.isfinite().all()) and nonzero(grad) for grad in grads.values())


def test_row_13_a_truncated_sequence_leaves_both_sums() -> None:
    """Masking the second of two sequences: the loss of the first alone, numerator and denominator."""
    batch = batch_of([6, 9])
    batch["mask"][1] = False
    with_it, grad = evaluate(batch)
    alone, alone_grad = evaluate(rows_of(batch, 0, 1))
    assert_bits_equal(with_it.loss.detach(), alone.loss.detach(), "loss")
    assert_bits_equal(grad[:1], alone_grad, "gradient")
    assert_bits_equal(grad[1], torch.zeros(9), "gradient of the truncated one")
    assert with_it.num_active_tokens.item() == 6


def test_row_14_mask_is_aligned_to_labels() -> None:
    """Tokens [10, 11, 12, 13] with a prompt of two: the label positions 1 and 2 count."""
    ids = torch.tensor([[10, 11, 12, 13]])
    targets, mask = rl_engine.next_token_targets(ids, torch.tensor([[0, 0, 1, 1]]))
    assert targets.tolist() == [[11, 12, 13, -100]]
    assert mask.tolist() == [[False, True, True, False]]


def test_row_16_a_rejected_sequence_still_belongs_to_its_group() -> None:
    """Rewards [1, 0], the second masked: advantages are [1, −1]. A caller may leave it out instead: [0]."""
    logits = torch.zeros(2, 3, 5, requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    result = rl_engine.grpo_loss(
        logits,
        torch.ones(2, 3, dtype=torch.long),
        torch.full((2, 3), -math.log(5)),
        torch.tensor([1.0, 0.0]),
        mask=mask,
        group_ids=["a", "a"],
    )
    assert result.advantages is not None
    assert result.advantages.tolist() == [1.0, -1.0]
    assert result.num_active_tokens.item() == 3
    assert result.loss.item() == pytest.approx(-1.0, rel=1e-6)
    with pytest.raises(InputError, match="group 'a' has 1 sequence"):
        rl_engine.grpo_loss(
            logits[:1],
            torch.ones(1, 3, dtype=torch.long),
            torch.zeros(1, 3),
            torch.tensor([1.0]),
            mask=mask[:1],
            group_ids=["a"],
        )
    only = ObjectiveSpec(advantage=AdvantageSpec(normalizer=AdvantageNormalizer.MEAN_ONLY))
    left_out = rl_engine.grpo_loss(
        logits[:1],
        torch.ones(1, 3, dtype=torch.long),
        torch.full((1, 3), -math.log(5)),
        torch.tensor([1.0]),
        mask=mask[:1],
        group_ids=["a"],
        objective=only,
    )
    assert left_out.advantages is not None
    assert left_out.advantages.tolist() == [0.0]


# ------------------------------------------------------------- groups


@pytest.mark.parametrize("normalizer", list(AdvantageNormalizer))
@pytest.mark.parametrize("reward", [0.1, 0.2, 0.35, 0.7])
def test_row_17_equal_rewards(reward: float, normalizer: AdvantageNormalizer) -> None:
    got = group_advantages(torch.full((8,), reward), (0, 8), AdvantageSpec(normalizer=normalizer))
    assert_bits_equal(got, torch.zeros(8), "advantages")


def test_row_19_rewards_that_differ_in_the_sixth_digit() -> None:
    """[1, 1.00001] and [2, 2.00001] as fp32: sample std 7.08e-6, with eps 1e-6 added ±.6196."""
    spec = AdvantageSpec(normalizer=AdvantageNormalizer.MEAN_STD_SAMPLE, std_eps=1e-6)
    rewards = torch.tensor([1.0, 1.00001, 2.0, 2.00001])
    got = group_advantages(rewards, (0, 2, 4), spec)
    assert got.tolist() == pytest.approx([-0.6196, 0.6196, -0.6196, 0.6196], abs=5e-5)


def test_row_21_groups_straddle_ranks_in_any_order(pool: RankPool) -> None:
    """Ids in any order, groups of 3 and 4 over uneven ranks: the advantages of the groups put in order."""
    ids = ["b", "a", "b", "b", "a", "b", "a"]
    rewards = torch.tensor([0.5, 1.0, 0.0, 0.25, 0.0, 1.0, 0.0])
    expected = torch.empty(7)
    for name in ("a", "b"):
        members = [i for i, own in enumerate(ids) if own == name]
        expected[members] = group_advantages(rewards[members], (0, len(members)), AdvantageSpec())
    for bounds in ([0, 7], [0, 2, 7], [0, 1, 4, 7]):
        for got in pool.run(on_rank.grpo_by_ids, world_size=len(bounds) - 1, args=(rewards, ids, bounds)):
            assert_bits_equal(got, expected, f"advantages over {bounds}")


# ------------------------------------------------------------- vocabulary, tensor parallel


def test_row_22_padded_vocabulary() -> None:
    """Zero logits in the padding change nothing (a common path gives −1.7555996)."""
    for padding in ([], [0.0, 0.0], [math.nan, math.inf]):
        contract = LogprobContract(
            role="train", dtype="fp32", sharding=ShardingSpec.even(6, padded_vocab_size=6 + len(padding))
        )
        logits = torch.tensor([TOY + padding], requires_grad=True)
        logp, lse = VocabParallelLogprobOp()(logits, torch.tensor([1]), contract=contract)
        assert logp.item() == pytest.approx(TOY_LOGP, abs=2e-7)
        assert lse.item() == pytest.approx(TOY_LSE, abs=3e-7)
        logp.sum().backward()
        assert logits.grad is not None
        assert_bits_equal(logits.grad[0, 6:], torch.zeros(len(padding)), "gradient of the padding")
    short = rl_engine.selected_logprobs(torch.tensor([[*TOY, 0.0, 0.0]]), torch.tensor([1]), vocab_size=6)
    assert short.item() == pytest.approx(TOY_LOGP, abs=2e-7)


def test_row_23_ignored_target() -> None:
    """Target −100: logp 0 and gradient 0 (a well-known loss returns −.6196174 and a softmax gradient)."""
    logits = torch.tensor([TOY, TOY], requires_grad=True)
    logp = rl_engine.selected_logprobs(logits, torch.tensor([-100, 1]))
    logp.sum().backward()
    assert_bits_equal(logp[:1].detach(), torch.zeros(1), "logp")
    assert logp[1].item() == pytest.approx(TOY_LOGP, abs=2e-7)
    assert logits.grad is not None
    assert_bits_equal(logits.grad[0], torch.zeros(6), "gradient")
    assert nonzero(logits.grad[1])


def test_row_24_temperature_divides_logits() -> None:
    """T = 0.6: −1.9510004 is the log-softmax of logits/T; logp/T would be −2.6993623."""
    logits = torch.tensor([TOY], requires_grad=True)
    logp = rl_engine.selected_logprobs(logits, torch.tensor([1]), temperature=0.6)
    assert logp.item() == pytest.approx(-1.9510004, abs=3e-7)
    logp.sum().backward()
    assert logits.grad is not None
    want = float64.gradient(TOY, 1, a=1.0, temperature=0.6)
    assert logits.grad[0].tolist() == pytest.approx(want, rel=2e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("size", "cuts"),
    [(6, [0, 2, 4, 6, 6]), (7, [0, 4, 7]), (6, [0, 0, 6]), (6, [0, 1, 1, 1, 6]), (6, [0, 5, 6])],
    ids=["2-2-2-0", "4-3", "0-6", "1-0-0-5", "5-1"],
)
def test_row_25_and_26_uneven_and_empty_shards(pool: RankPool, size: int, cuts: list[int]) -> None:
    """Forward and backward on shards of any width; every shard gets c·(onehot − softmax), owner or not."""
    rng = random.Random(25)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([[rng.gauss(0, 2) for _ in range(size)] for _ in range(size)]).to(dtype)
        targets = torch.arange(size)
        grads = (torch.linspace(-1, 2, size), torch.linspace(1, 0, size))
        single = pool.run(on_rank.logprobs, world_size=1, args=(logits, targets, [(0, size)], size, grads))[0]
        ranks = pool.run(
            on_rank.logprobs,
            world_size=len(cuts) - 1,
            args=(logits, targets, list(pairwise(cuts)), size, grads),
        )
        for rank in ranks:
            for name in ("logp", "lse", "entropy"):
                assert_bits_equal(rank[name], single[name], name)
        together = torch.cat([rank["grad"] for rank in ranks], 1)
        assert_bits_equal(together, single["grad"], "gradient")
        if dtype is torch.float32:
            for i in range(size):
                want = float64.gradient(
                    [float(v) for v in logits[i]], i, a=grads[0][i].item(), b=grads[1][i].item()
                )
                assert together[i].tolist() == pytest.approx(want, rel=3e-6, abs=3e-7)


def test_row_27_calling_twice() -> None:
    """The inputs are left alone, so a second call gives the same answer."""
    logits = torch.tensor([TOY] * 3, requires_grad=True)
    targets = torch.tensor([1, -100, 5])
    old, mask = torch.full((3,), -1.5), torch.tensor([1, 0, 1])
    kept = [value.detach().clone() for value in (logits, targets, old, mask)]
    seen: list[list[Tensor]] = []
    for _ in range(2):
        logits.grad = None
        logp = rl_engine.selected_logprobs(logits, targets)
        result = rl_engine.grpo_loss(
            logits, targets.clamp(min=0), old, mask=mask, advantages=torch.tensor([0.5])
        )
        (logp.sum() + result.loss).backward()
        assert logits.grad is not None
        seen.append([logp.detach(), result.loss.detach(), logits.grad.clone()])
    for first, second in zip(*seen, strict=True):
        assert_bits_equal(first, second, "second call")
    for value, before in zip((logits, targets, old, mask), kept, strict=True):
        assert_bits_equal(value, before, "input")


def test_row_28_target_of_minus_zero(pool: RankPool) -> None:
    """The exchanged target bits are 0x80000000 on every rank: copied as integers, not added as floats."""
    logits = torch.tensor([[0.5, 1.0, -0.0, 0.25, -1.0, 0.0]])
    for target, bits in ((2, 0x80000000), (5, 0)):
        for got in pool.run(
            on_rank.exchanged_target_bits, world_size=3, args=(logits, torch.tensor([target]), 2)
        ):
            assert got.tolist() == [bits]


# ------------------------------------------------------------- inf, NaN, overflow


@pytest.mark.parametrize("garbage", [200.0, -1e30, math.nan, math.inf, -math.inf])
def test_row_29_garbage_under_the_mask(garbage: float) -> None:
    batch = batch_of([3, 4], slots=5)
    objective = ObjectiveSpec(beta=0.04)
    clean, clean_grad = evaluate(batch, TOKENS, objective)
    for name in ("logps", "old", "ref"):
        dirty = {key: value.clone() for key, value in batch.items()}
        dirty[name][~batch["mask"]] = garbage
        result, grad = evaluate(dirty, TOKENS, objective)
        assert_bits_equal(result.loss.detach(), clean.loss.detach(), f"loss, {name}")
        assert_bits_equal(grad, clean_grad, f"gradient, {name}")
    assert nonzero(clean_grad)


def test_row_30_masked_log_ratio_of_1000() -> None:
    """Log-ratio [1000, 0], A = 1, the first masked, divided by 2: loss −.5, gradient [0, −.5]."""
    logps = torch.tensor([[1000.0, -1.0]], requires_grad=True)
    result = rl_engine.policy_loss(
        logps,
        torch.tensor([[0.0, -1.0]]),
        torch.tensor([1.0]),
        mask=torch.tensor([[0, 1]]),
        reduction=constant(2.0),
    )
    result.loss.backward()
    assert logps.grad is not None
    assert (result.loss.item(), logps.grad.tolist()) == (-0.5, [[0.0, -0.5]])


@pytest.mark.parametrize("distance", [90.0, 100.0, 1e4])
def test_row_31_reference_far_away(distance: float) -> None:
    """ref − lp beyond the guard under k3: finite, counted, and a gradient that is not NaN."""
    logps = torch.tensor([[-distance, -1.0]], requires_grad=True)
    result = rl_engine.policy_loss(
        logps,
        logps.detach().clone(),
        torch.tensor([1.0]),
        mask=torch.ones(1, 2),
        ref_logps=torch.tensor([[0.0, -1.5]]),
        objective=ObjectiveSpec(beta=0.04),
    )
    result.loss.backward()
    assert logps.grad is not None
    assert bool(result.loss.isfinite())
    assert bool(logps.grad.isfinite().all())
    assert result.num_guarded_tokens.item() == 1


def test_row_32_minus_inf_logit() -> None:
    """[1, −inf, 0]: entropy .5822, logp of the −inf target −inf, gradients finite."""
    logits = torch.tensor([[1.0, -math.inf, 0.0]] * 2, requires_grad=True)
    logp, entropy = rl_engine.selected_logprobs(logits, torch.tensor([0, 1]), with_entropy=True)
    assert entropy.tolist() == pytest.approx([0.5822031] * 2, abs=2e-7)
    assert logp[0].item() == pytest.approx(-0.3132617, abs=2e-7)
    assert logp[1].item() == -math.inf
    (logp.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    p = 1 / (1 + math.exp(-1))
    slope = -p * (math.log(p) + 0.5822031)
    assert logits.grad[0].tolist() == pytest.approx([1 - p + slope, 0.0, -(1 - p) - slope], abs=1e-6)
    assert logits.grad[1].tolist() == pytest.approx([-p + slope, 1.0, -(1 - p) - slope], abs=1e-6)


def test_row_33_a_row_of_minus_inf() -> None:
    rows = torch.tensor([TOY, [-math.inf] * 6, TOY])
    targets = torch.tensor([1, 2, 1])
    with pytest.raises(InputError, match=r"row 1.*nothing but −inf"):
        rl_engine.selected_logprobs(rows, targets)
    logits = rows.clone().requires_grad_()
    logp = rl_engine.selected_logprobs(logits, targets, validate=False)
    logp[[0, 2]].sum().backward()
    assert logp.isnan().tolist() == [False, True, False]
    assert logp[0].item() == pytest.approx(TOY_LOGP, abs=2e-7)
    assert logits.grad is not None
    clean = torch.tensor([TOY], requires_grad=True)
    rl_engine.selected_logprobs(clean, torch.tensor([1])).sum().backward()
    assert clean.grad is not None
    for row in (0, 2):
        assert_bits_equal(logits.grad[row], clean.grad[0], f"gradient of row {row}")
    masked = rl_engine.selected_logprobs(rows, targets, mask=torch.tensor([1, 0, 1]))
    assert_bits_equal(masked[1], torch.tensor(0.0), "an inactive row may hold anything")


def test_row_34_a_reward_of_nan() -> None:
    logits = torch.zeros(4, 2, 3)
    ids, old, mask = torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2), torch.ones(4, 2)
    rewards = torch.tensor([1.0, 0.0, math.nan, 0.5])
    groups: list[dict[str, Any]] = [{"group_ids": [1, 1, 2, 2]}, {"group_boundaries": (0, 2, 4)}]
    for group in groups:
        with pytest.raises(InputError, match="reward of sequence 2 is nan"):
            rl_engine.grpo_loss(logits, ids, old, rewards, mask=mask, **group)


def test_row_35_bf16_logps_are_never_positive() -> None:
    rng = random.Random(35)
    rows = [
        [rng.gauss(0, 3) + (40 * rng.random() if j == i % 9 else 0) for j in range(9)] for i in range(4000)
    ]
    logits = torch.tensor(rows).to(torch.bfloat16)
    logp = rl_engine.selected_logprobs(logits, torch.arange(4000) % 9)
    assert bool((logp <= 0).all())
    assert int((logp == 0).sum()) > 0
    assert not bool(torch.signbit(logp[logp == 0]).any())


# ------------------------------------------------------------- from measuring another scheme


@pytest.mark.parametrize("normalizer", list(AdvantageNormalizer))
def test_row_40_constant_groups(normalizer: AdvantageNormalizer) -> None:
    rng = random.Random(40)
    groups = [(7, 100.1), (16, 0.1)] + [(rng.randint(2, 16), rng.uniform(-1e6, 1e6)) for _ in range(200)]
    rewards = torch.tensor([reward for size, reward in groups for _ in range(size)])
    boundaries = (0, *itertools.accumulate(size for size, _ in groups))
    got = group_advantages(rewards, boundaries, AdvantageSpec(normalizer=normalizer))
    assert_bits_equal(got, torch.zeros(len(rewards)), "advantages")


def test_row_41_large_rewards() -> None:
    got = group_advantages(torch.tensor([1e8, 1e8 + 8]), (0, 2), AdvantageSpec())
    assert got.tolist() == [-1.0, 1.0]


def test_row_42_padding_does_not_show(pool: RankPool) -> None:
    """The same 1000 tokens in 1000, 1024, 2048 and 4096 slots, on one rank or padded differently on two."""
    batch = batch_of([1000, 731, 1, 999], seed=42)
    expected, grad = evaluate(batch)
    assert expected.num_active_tokens.item() == 2731
    for slots in (1024, 2048, 4096):
        padded = {k: on_rank.fit(v, slots) if v.dim() == 2 else v for k, v in batch.items()}
        result, padded_grad = evaluate(padded)
        for name in ("per_sequence_policy", "per_sequence_kl"):
            assert_bits_equal(getattr(result, name), getattr(expected, name), f"{name} in {slots} slots")
        assert_bits_equal(result.loss.detach(), expected.loss.detach(), "loss")
        assert_bits_equal(padded_grad[:, :1000], grad, "gradient")
    assert_same_loss(run_ranks(pool, batch, [0, 2, 4], padded=[1024, 4096]), batch, TOKENS, ObjectiveSpec())


def test_row_43_overflow_times_zero() -> None:
    """Δ = 100 with advantage 0, and β = 0 with a reference 200 nats away: as if they were not there."""
    logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-101.0, -2.0]])
    result = rl_engine.policy_loss(logps, old, torch.tensor([0.0]), mask=torch.ones(1, 2))
    result.loss.backward()
    assert logps.grad is not None
    assert result.loss.item() == 0.0
    assert logps.grad.tolist() == [[0.0, 0.0]]

    batch = batch_of([3, 4])
    near, near_grad = evaluate(batch)
    for distance in (200.0, 1e6):
        batch["ref"] = batch["logps"] + distance
        far, far_grad = evaluate(batch)
        assert_bits_equal(far.loss.detach(), near.loss.detach(), "loss")
        assert_bits_equal(far_grad, near_grad, "gradient")
        assert bool(far.kl.isfinite())
    logps = batch["logps"].clone().requires_grad_()
    impossible = rl_engine.policy_loss(
        logps,
        batch["old"],
        batch["advantages"],
        mask=batch["mask"],
        ref_logps=torch.full_like(batch["ref"], -math.inf),
        validate=False,
    )
    impossible.loss.backward()
    assert logps.grad is not None
    assert impossible.kl.item() == math.inf
    assert_bits_equal(impossible.loss.detach(), near.loss.detach(), "loss beside a KL of inf")
    assert_bits_equal(logps.grad, near_grad, "gradient beside a KL of inf")


@pytest.mark.parametrize("target", [6, 7, 8, 1000, -1, -7])
def test_row_44_active_target_outside_the_vocabulary(target: int) -> None:
    """In the padding, beyond it, or negative: an error under validate, else NaN, never a plausible number."""
    rows = torch.tensor([[*TOY, 0.0, 0.0]] * 2)
    targets = torch.tensor([1, target])
    with pytest.raises(
        InputError, match=rf"row 1: target {target} lies outside the real vocabulary \[0, 6\)"
    ):
        rl_engine.selected_logprobs(rows, targets, vocab_size=6)
    contract = LogprobContract(role="train", dtype="fp32", sharding=ShardingSpec.even(6, padded_vocab_size=8))
    logits = rows.clone().requires_grad_()
    logp, lse = VocabParallelLogprobOp()(logits, targets, contract=contract, validate=False)
    assert logp.isnan().tolist() == [False, True]
    assert lse.tolist() == pytest.approx([TOY_LSE] * 2, abs=3e-7)
    logp.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad[1, :6].isnan().all())
    assert bool(logits.grad[0].isfinite().all())
    assert_bits_equal(logits.grad[:, 6:], torch.zeros(2, 2), "gradient of the padding")


@pytest.mark.parametrize("lengths", [1024, 4096])
def test_row_45_long_sequences_over_many_ranks(pool: RankPool, lengths: int) -> None:
    """8 sequences over DP 1, 2, 4, 8: the same totals, where grouped sums differ in most."""
    batch = batch_of([lengths - 3 * s for s in range(8)], seed=45, slots=lengths)
    objective = ObjectiveSpec(beta=0.04)
    for ranks in (1, 2, 4, 8):
        out = run_ranks(pool, batch, [8 * r // ranks for r in range(ranks + 1)], TOKENS, objective)
        assert_same_loss(out, batch, TOKENS, objective)


def test_row_46_ranks_that_resolve_different_backends(pool: RankPool) -> None:
    outcomes = pool.run(
        on_rank.loss_with_backend, world_size=2, args=(["exact_torch", "exact_numba"],), expect_errors=True
    )
    for outcome in outcomes:
        assert outcome.raised(AgreementError), str(outcome)
        assert "exact_torch" in outcome.error_message
        assert "exact_numba" in outcome.error_message
        assert outcome.seconds < 10


def test_row_47_live_logps_as_old_logps() -> None:
    """Passed for both, the old ones are constants: the gradient is that of ratio 1, not 0."""
    logps = torch.tensor([[-0.5, -1.0, -2.0]], requires_grad=True)
    result = rl_engine.policy_loss(
        logps, logps, torch.tensor([2.0]), mask=torch.ones(1, 3), reduction=constant(1.0)
    )
    result.loss.backward()
    assert logps.grad is not None
    assert logps.grad.tolist() == [[-2.0, -2.0, -2.0]]
    logits = torch.zeros(1, 2, 4, requires_grad=True)
    old = rl_engine.selected_logprobs(logits, torch.zeros(1, 2, dtype=torch.long))
    rewards = rl_engine.grpo_loss(
        logits,
        torch.zeros(1, 2, dtype=torch.long),
        old,
        mask=torch.ones(1, 2),
        advantages=torch.tensor([1.0]),
    )
    rewards.loss.backward()
    assert logits.grad is not None
    assert logits.grad[0, 0].tolist() == pytest.approx([-0.375, 0.125, 0.125, 0.125], rel=1e-6)
