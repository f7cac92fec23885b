"""The tiled tier: bits against numbers worked one by one, and over every aligned sharding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_engine.contracts import (
    LogprobContract,
    LogprobOutputSpec,
    LossReductionSpec,
    ObjectiveSpec,
    ReductionSpec,
    ShardingSpec,
)
from rl_engine.errors import InputError, LogprobContractError, UnsupportedError
from rl_engine.logprob.op import VocabParallelLogprobOp
from rl_engine.logprob.tiled import TiledBackend, halving_sum, load, merge_tiles, tile_sums
from rl_engine.mesh.pool import RankPool
from rl_engine.registry import kernel_registry
from tests.bits import assert_bits_equal
from tests.logprob import tiers_on_ranks as on_rank
from tests.numerics.cases import expect
from tests.oracle import tiles as oracle

INF, NAN = float("inf"), float("nan")
PADDED, REAL, TILES = 96, 90, 12


def batch(rows: int = 11, dtype: torch.dtype = torch.float32, spread: float = 6.0) -> tuple[Tensor, Tensor]:
    """Logits with garbage in the padding, −inf among the rest, and a whole tile of −inf; and targets."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, PADDED, generator=generator) * spread
    logits[:, 3::17] = -INF
    logits[::2, 8:16] = -INF
    targets = torch.randint(0, REAL, (rows,), generator=generator)
    logits[torch.arange(rows), targets] = torch.randn(rows, generator=generator)
    logits[:, REAL:] = torch.tensor([NAN, INF, 1e30, -0.0, 5.0, NAN])
    return logits.to(dtype), targets


def run(logits: Tensor, targets: Tensor, **changes: Any) -> dict[str, Any]:
    """On one rank."""
    n = len(logits)
    fields: dict[str, Any] = {
        "bounds": [(0, logits.shape[1])],
        "real": REAL,
        "reduction": ReductionSpec.tiled(TILES),
        "grads": (torch.linspace(-1, 1.5, n), torch.linspace(2, -1, n)),
    }
    return on_rank.logprobs(None, logits, targets, **fields | changes)


# --- the tree of additions


@pytest.mark.parametrize("width", [*range(1, 18), 31, 32, 33, 100])
def test_halving_sum_is_the_padded_tree(width: int) -> None:
    values = torch.rand(5, width, generator=torch.Generator().manual_seed(width)) * 10
    expected = [oracle.tree(row) for row in values.tolist()]
    assert_bits_equal(halving_sum(values.clone()), expect(expected, "fp32"), "sum")
    assert_bits_equal(halving_sum(values.clone()[2:3]), expect(expected[2:3], "fp32"), "one row")
    strided = torch.empty(width, 5).t()
    strided.copy_(values)
    assert_bits_equal(halving_sum(strided), expect(expected, "fp32"), "strided")


# --- tiles


def test_identity_partials() -> None:
    """Tiles of −inf or of padding alone are (−inf, +0), and merge as if they were not there."""
    logits = torch.full((3, 32), -INF)
    logits[:, :8] = torch.randn(3, 8)
    logits[1, :8] = -INF
    logits[:, 24:] = NAN
    top, total = tile_sums(logits, width=8, real_cols=24, temperature=1.0)
    identity_top, identity_total = torch.full((3, 3), -INF), torch.zeros(3, 3)
    assert_bits_equal(top[:, 1:], identity_top, "max")
    assert_bits_equal(total[:, 1:], identity_total, "sum")
    assert_bits_equal(top[1], torch.full((4,), -INF), "max of a row of −inf")

    alone = merge_tiles(top[:, :1], total[:, :1])
    for name, merged in zip(("max", "sum"), merge_tiles(top, total), strict=True):
        assert_bits_equal(merged, alone[("max", "sum").index(name)], name)
    assert merge_tiles(top, total)[0][1] == -INF


def test_tiles_and_their_merge_bit_by_bit() -> None:
    """Before the logarithm, which hides most differences of a last bit."""
    logits, _ = batch(40, spread=4.0)
    top, total = tile_sums(logits, width=8, real_cols=REAL, temperature=1.0)
    m, s = merge_tiles(top, total)
    for i, row in enumerate(logits.double().tolist()):
        row[REAL:] = [-INF] * (PADDED - REAL)
        tiles = [oracle.tile(row[start : start + 8]) for start in range(0, PADDED, 8)]
        assert_bits_equal(top[i], expect([t for t, _ in tiles], "fp32"), "tile max")
        assert_bits_equal(total[i], expect([t for _, t in tiles], "fp32"), "tile sum")
        assert_bits_equal(m[i : i + 1], expect([oracle.merge(tiles)[0]], "fp32"), "row max")
        assert_bits_equal(s[i : i + 1], expect([oracle.merge(tiles)[1]], "fp32"), "row sum")


def test_a_tile_of_no_columns_is_no_tile() -> None:
    top, total = tile_sums(torch.empty(4, 0), width=8, real_cols=0, temperature=1.0)
    assert top.shape == total.shape == (4, 0)


def test_zeros_of_both_signs_are_one_maximum() -> None:
    for row in ([-0.0, 0.0], [0.0, -0.0], [-0.0, -0.0]):
        top, _ = tile_sums(torch.tensor([row]), width=2, real_cols=2, temperature=1.0)
        assert_bits_equal(top, torch.tensor([[0.0]]), "max")


# --- rows against the oracle

SPECIALS = [0.0, -0.0, -INF, 88.0, -88.0, 1e30, -1e30, 2.0**-140]


@st.composite
def rows_of_logits(draw: st.DrawFn) -> tuple[list[list[float]], list[int], int, int, float, str]:
    width, tiles = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    padded = width * tiles
    real = draw(st.integers(1, padded))
    number = st.one_of(
        st.floats(-30, 30, width=16), st.floats(-1e4, 1e4, width=16), st.sampled_from(SPECIALS)
    )
    rows = draw(st.lists(st.lists(number, min_size=padded, max_size=padded), min_size=1, max_size=3))
    targets = draw(st.lists(st.integers(0, real - 1), min_size=len(rows), max_size=len(rows)))
    return (
        rows,
        targets,
        real,
        tiles,
        draw(st.sampled_from([1.0, 0.7, 3.0])),
        draw(st.sampled_from(["fp32", "bf16"])),
    )


@settings(max_examples=120, deadline=None)
@given(case=rows_of_logits(), a=st.sampled_from([0.0, 1.0, -0.3]), b=st.sampled_from([0.0, 0.75]))
def test_bits_of_any_row(
    case: tuple[list[list[float]], list[int], int, int, float, str], a: float, b: float
) -> None:
    rows, targets, real, tiles, temperature, dtype = case
    a, b = torch.tensor([a, b]).tolist()
    logits = torch.tensor(rows).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    exact = logits.double().tolist()
    n = len(rows)
    got = run(
        logits,
        torch.tensor(targets),
        real=real,
        reduction=ReductionSpec.tiled(tiles),
        grads=(torch.full((n,), a), torch.full((n,), b)),
        temperature=temperature,
        validate=False,
    )
    for i, (row, target) in enumerate(zip(exact, targets, strict=True)):
        closed = oracle.close(row, target, num_tiles=tiles, real=real, temperature=temperature)
        assert_bits_equal(got["logp"][i : i + 1], expect([closed.logp], "fp32"), "logp")
        assert_bits_equal(got["lse"][i : i + 1], torch.tensor([closed.lse]), "lse")
        if closed.good:
            grad = oracle.gradient(
                row, target, lse=closed.lse, a=a, b=b, real=real, temperature=temperature, dtype=dtype
            )
            assert_bits_equal(got["grad"][i], expect(grad, dtype), "gradient")


def test_rows_without_a_distribution() -> None:
    """NaN, +inf, and nothing finite; a target that nobody owns. What is masked does not matter."""
    logits, targets = batch(6)
    logits[0, 40] = NAN
    logits[1, 40] = INF
    logits[2, :REAL] = -INF
    targets[3] = REAL
    targets[4] = -100
    mask = torch.tensor([True, True, True, True, False, True])
    got = run(logits, targets, mask=mask, validate=False)
    assert got["logp"].isnan().tolist() == [True, True, True, True, False, False]
    assert got["lse"].isnan().tolist() == [True, True, True, False, False, False]
    assert got["logp"][4] == 0.0 and got["grad"][4, :REAL].any()  # its lse is differentiated
    assert got["grad"][:4, :REAL].isnan().all()
    assert got["grad"][5, :REAL].isfinite().all()
    assert_bits_equal(got["grad"][:, REAL:], torch.zeros(6, PADDED - REAL), "padding")

    got = run(logits, targets, mask=mask, validate=False, grads=(torch.ones(6), None))
    assert_bits_equal(got["grad"][4], torch.zeros(PADDED), "inactive row")
    got = run(logits, targets, mask=mask, validate=False, grads=(None, torch.ones(6)))
    assert got["grad"][3, :REAL].isfinite().all()  # the target has no part in lse
    got = run(logits, targets, mask=mask, validate=False, grads=(torch.zeros(6), torch.zeros(6)))
    assert_bits_equal(got["grad"], torch.zeros(6, PADDED), "no coefficient")

    for row, text in ((0, "hold a NaN or"), (3, f"target {REAL} lies outside")):
        only = torch.arange(6) == row
        with pytest.raises(InputError, match=f"row {row}: .*{text}"):
            run(logits, targets, mask=only)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_near_float64(dtype: torch.dtype, temperature: float) -> None:
    logits, targets = batch(64, dtype, spread=3.0)
    grads = (torch.linspace(-1, 1.5, 64), torch.linspace(2, -1, 64))
    got = run(logits, targets, grads=grads, temperature=temperature)

    exact = logits[:, :REAL].double().requires_grad_()
    logp = torch.log_softmax(exact / temperature, -1).gather(1, targets[:, None])[:, 0]
    lse = torch.logsumexp(exact / temperature, -1)
    torch.autograd.backward([logp, lse], [g.double() for g in grads])
    assert exact.grad is not None
    near = logp > -20
    assert near.sum() > 32
    torch.testing.assert_close(got["logp"][near].double(), logp[near], rtol=0, atol=1e-5)
    torch.testing.assert_close(got["lse"].double(), lse, rtol=0, atol=1e-5)
    rtol, atol = (1e-5, 1e-6) if dtype is torch.float32 else (1e-2, 1e-5)
    torch.testing.assert_close(got["grad"][:, :REAL].double(), exact.grad, rtol=rtol, atol=atol)


def test_a_row_does_not_know_the_others() -> None:
    """Any number of rows gives a row the same bits."""
    logits, targets = batch(11)
    whole = run(logits, targets)
    grads = (torch.linspace(-1, 1.5, 11), torch.linspace(2, -1, 11))
    for rows in (slice(0, 1), slice(4, 7), slice(10, 11)):
        part = run(logits[rows], targets[rows], grads=(grads[0][rows], grads[1][rows]))
        for name in ("logp", "lse", "grad"):
            assert_bits_equal(part[name], whole[name][rows], name)
    none = run(logits[:0], targets[:0], grads=(torch.empty(0), torch.empty(0)))
    assert none["logp"].shape == (0,) and none["grad"].shape == (0, PADDED)


def test_real_widths() -> None:
    """Tiles of 500 columns, where torch's own row sums depend on the number of rows on some devices."""
    generator = torch.Generator().manual_seed(2)
    logits, targets = torch.randn(8, 4000, generator=generator), torch.arange(8) * 499
    rest: dict[str, Any] = {"real": 4000, "reduction": ReductionSpec.tiled(8), "grads": (torch.ones(8), None)}
    whole = run(logits, targets, **rest)
    for rows in (slice(0, 1), slice(3, 5)):
        part = run(logits[rows], targets[rows], **rest | {"grads": (torch.ones(8)[rows], None)})
        for name in ("logp", "lse", "grad"):
            assert_bits_equal(part[name], whole[name][rows], name)
    row = logits[3].double().tolist()
    closed = oracle.close(row, int(targets[3]), num_tiles=8, real=4000)
    assert_bits_equal(whole["logp"][3:4], expect([closed.logp], "fp32"), "logp")


@pytest.mark.parametrize("block", [1, 17, PADDED, 3 * PADDED])
def test_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """However much is worked at once: single tiles, parts of a row, several rows."""
    logits, targets = batch(11)
    whole = run(logits, targets)
    monkeypatch.setattr("rl_engine.logprob.tiled._CPU_BLOCK", block)
    cut = run(logits, targets)
    for name in ("logp", "lse", "grad"):
        assert_bits_equal(cut[name], whole[name], name)


def test_logits_are_not_modified_and_strides_do_not_matter() -> None:
    logits, targets = batch(5)
    wide = torch.zeros(5, 2 * PADDED)
    wide[:, :PADDED] = logits
    before = wide.clone()
    contract = on_rank.contract_of(logits, 0, [(0, PADDED)], REAL, ReductionSpec.tiled(TILES))
    for view in (wide[:, :PADDED], logits.t().contiguous().t()):
        logp, _ = load()(view, targets, contract=contract)
        assert_bits_equal(logp, run(logits, targets)["logp"], "logp")
    assert_bits_equal(wide, before, "logits", nan_payload=True)


# --- over shardings

ALIGNED = {
    "tp 2": [(0, 48), (48, 96)],
    "tp 2, uneven": [(0, 8), (8, 96)],
    "tp 3": [(0, 32), (32, 64), (64, 96)],
    "tp 4": [(0, 24), (24, 48), (48, 72), (72, 96)],
    "tp 4, empty shards": [(0, 0), (0, 88), (88, 88), (88, 96)],
}


@pytest.mark.parametrize("name", ALIGNED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_on_any_ranks(pool: RankPool, name: str, dtype: torch.dtype) -> None:
    logits, targets = batch(9, dtype)
    mask = torch.arange(9) != 4
    targets[4] = -100
    grads = (torch.linspace(-1, 1.5, 9), torch.linspace(2, -1, 9))
    alone = run(logits, targets, temperature=0.7, mask=mask)
    bounds = ALIGNED[name]
    args = (logits, targets, bounds, REAL, ReductionSpec.tiled(TILES), grads, 0.7, mask)
    results = pool.run(on_rank.logprobs, world_size=len(bounds), args=args)
    for result in results:
        assert_bits_equal(result["logp"], alone["logp"], "logp")
        assert_bits_equal(result["lse"], alone["lse"], "lse")
        assert result["forward"] == {("tp", "preflight"): 1, ("tp", "all_gather_rows"): 1}
        assert result["backward"] == {}
    assert_bits_equal(torch.cat([r["grad"] for r in results], 1), alone["grad"], "gradient")


def test_without_validation_and_without_rows(pool: RankPool) -> None:
    logits, targets = batch(9)
    targets[2], logits[3, 50] = REAL, NAN
    grads = (torch.ones(9), torch.ones(9))
    alone = run(logits, targets, grads=grads, validate=False)
    reduction = ReductionSpec.tiled(TILES)
    for rows in (slice(0, 9), slice(0, 0)):
        own = (grads[0][rows], grads[1][rows])
        args = (logits[rows], targets[rows], ALIGNED["tp 3"], REAL, reduction, own, 1.0, None, False)
        results = pool.run(on_rank.logprobs, world_size=3, args=args)
        for result in results:
            assert_bits_equal(result["logp"], alone["logp"][rows], "logp")
            assert result["forward"] == ({("tp", "all_gather_rows"): 1} if rows.stop else {})
        assert_bits_equal(torch.cat([r["grad"] for r in results], 1), alone["grad"][rows], "gradient")


def test_siblings_with_other_targets(pool: RankPool) -> None:
    logits, targets = batch(4)
    other = targets.clone()
    other[1] = (other[1] + 1) % REAL
    rest = (ALIGNED["tp 2"], REAL, ReductionSpec.tiled(TILES), (torch.ones(4), None))
    per_rank = [(logits, targets, *rest), (logits, other, *rest)]
    outcomes = pool.run(on_rank.logprobs, world_size=2, per_rank_args=per_rank, expect_errors=True)
    for outcome in outcomes:
        assert outcome.error_type == "AgreementError"
        assert "were given different tokens" in outcome.error_message


# --- what it refuses


def refused(**changes: Any) -> tuple[str, ...]:
    fields: dict[str, Any] = {
        "role": "train",
        "dtype": "fp32",
        "sharding": ShardingSpec(0, 2, ((0, 50), (50, 96)), REAL, PADDED),
        "reduction": ReductionSpec.tiled(TILES),
    }
    contract = LogprobContract(**fields | changes)
    reasons = kernel_registry.explain(contract).reasons["tiled_torch"]
    with pytest.raises(UnsupportedError, match="tiled_torch"):
        kernel_registry.get_logprob_op(contract, "tiled_torch")
    return tuple(reasons)


def test_reasons() -> None:
    assert refused() == (
        "vocab shards must consist of whole tiles of 8 columns: rank 0 holds [0, 50); "
        "ShardingSpec.even(..., multiple_of=8) builds such shards",
    )
    even = ShardingSpec.even(REAL, padded_vocab_size=PADDED)
    assert refused(sharding=even, reduction=ReductionSpec.tiled(64)) == (
        "num_vocab_tiles 64 does not divide padded_vocab_size 96",
    )
    assert refused(sharding=even, output=LogprobOutputSpec(entropy=True)) == ("does not export the entropy",)


def test_direct_calls_are_refused_too() -> None:
    logits, targets = batch(2)
    even = ShardingSpec.even(REAL, padded_vocab_size=PADDED)
    tiled = ReductionSpec.tiled(TILES)

    def call(num_vocab_tiles: int | None = None, width: int = PADDED, **changes: Any) -> None:
        fields: dict[str, Any] = {"role": "train", "dtype": "fp32", "sharding": even, "reduction": tiled}
        contract = LogprobContract(**fields | changes)
        VocabParallelLogprobOp(TiledBackend())(
            logits[:, :width], targets, contract=contract, num_vocab_tiles=num_vocab_tiles
        )

    call()
    call(num_vocab_tiles=4)
    with pytest.raises(InputError, match=r"num_vocab_tiles 7 does not divide padded_vocab_size 96; .* to 98"):
        call(num_vocab_tiles=7)
    with pytest.raises(InputError, match="merge is exact_words, tiled_torch computes max_sumexp_tiles"):
        call(reduction=ReductionSpec.exact())
    with pytest.raises(InputError, match="entropy, which tiled_torch does not compute"):
        call(output=LogprobOutputSpec(entropy=True))
    with pytest.raises(LogprobContractError, match="num_vocab_tiles"):
        call(num_vocab_tiles=4, reduction=ReductionSpec.exact())


def test_unaligned_direct_call_is_refused_on_every_rank(pool: RankPool) -> None:
    logits, targets = batch(2)
    bounds = [(0, 50), (50, 96)]
    outcomes = pool.run(
        on_rank.direct_call, world_size=2, args=(logits, targets, bounds, REAL, TILES), expect_errors=True
    )
    for outcome in outcomes:
        assert outcome.error_type == "InputError"
        assert "TP rank 0 holds [0, 50), expected whole tiles of 8 columns" in outcome.error_message


def test_num_vocab_tiles_of_the_call() -> None:
    """It takes the place of the contract's, also where the registry chooses the backend."""
    logits, targets = batch(7)
    contract = on_rank.contract_of(logits, 0, [(0, PADDED)], REAL, ReductionSpec.tiled(TILES))
    logp, lse = VocabParallelLogprobOp()(logits, targets, contract=contract, num_vocab_tiles=3)
    for i, row in enumerate(logits.double().tolist()):
        closed = oracle.close(row, int(targets[i]), num_tiles=3, real=REAL)
        assert_bits_equal(logp[i : i + 1], expect([closed.logp], "fp32"), "logp")
        assert_bits_equal(lse[i : i + 1], torch.tensor([closed.lse]), "lse")


# --- the loss on it


@pytest.mark.parametrize("backend", ["auto", "tiled_torch"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_loss_over_tiles(pool: RankPool, backend: str, beta: float) -> None:
    """TP 2 × DP 2 has the bits of one rank, with a group that straddles ranks."""
    data = on_rank.random_batch(3)
    if beta == 0.0:
        del data["ref_logits"]
    scope = LossReductionSpec(determinism_scope="cross_tp_bitwise")
    rest = (
        60,
        (backend, "auto"),
        ReductionSpec.tiled(8),
        ObjectiveSpec(beta=beta),
        scope,
        (3, 4),
    )
    alone = on_rank.grpo(None, data, 1, 1, *rest)
    assert alone["ids"] == ("tiled_torch", "exact", "tiled-fp32/1")
    assert alone["grad"].abs().sum() > 0
    assert not alone["grad"].isnan().any()
    results = pool.run(on_rank.grpo, world_size=4, args=(data, 2, 2, *rest))
    for result in results:
        for name, value in alone.items():
            if name not in ("grad", "ids"):
                assert_bits_equal(result[name], value, name)
        assert result["ids"] == alone["ids"]
    assert_bits_equal(on_rank.joined_grad(results, 2), alone["grad"], "gradient")


def test_oracle_tree_pads() -> None:
    rng = random.Random(1)
    values = [rng.random() for _ in range(8)]
    assert oracle.tree(values[:5]) == oracle.tree([*values[:5], 0.0, 0.0, 0.0])
