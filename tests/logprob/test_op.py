"""The logprob op on one shard: the oracle's bits, masks, gradients, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rl_engine.contracts import LogprobContract, LogprobOutputSpec, LogprobRole, MaskSpec, ShardingSpec
from rl_engine.errors import InputError
from rl_engine.logprob import VocabParallelLogprobOp
from rl_engine.mesh import count_collectives
from rl_engine.registry import kernel_registry
from tests.bits import assert_bits_equal
from tests.logprob.op_cases import (
    BACKENDS,
    INF,
    NAN,
    Answer,
    Case,
    MaskBy,
    answer_of,
    assert_same,
    backward_of,
    contract_of,
    oracle,
    outputs_of,
    standard_case,
)
from tests.oracle import float64

MASKS: list[MaskBy] = ["call", "contract", "both", "ignore_index"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_one_shard_against_the_oracle(dtype: str, entropy: bool, temperature: float, backend: str) -> None:
    case = standard_case(dtype, temperature, entropy)
    with count_collectives() as counts:
        answer = answer_of(case, backend=backend)
    assert_same(answer, oracle(case), f"{backend} {dtype}")
    assert not counts
    assert bool((answer.logp <= 0).all()), "a log-probability is never positive"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask_by", MASKS)
def test_every_way_to_hand_over_the_mask(mask_by: MaskBy, backend: str) -> None:
    case = standard_case("fp32", mask_by=mask_by)
    assert_same(answer_of(case, backend=backend), oracle(case), mask_by)


@pytest.mark.parametrize("backend", BACKENDS)
def test_int32_and_strided_targets(backend: str) -> None:
    case = standard_case("bf16", entropy=True)
    expected = oracle(case)
    narrow = replace(case, targets=case.targets.int())
    assert_same(answer_of(narrow, backend=backend), expected, "int32 targets")
    wide = torch.stack([case.targets, torch.full_like(case.targets, 3)], 1)
    mask = torch.stack([case.active, ~case.active], 1)
    grads = tuple(torch.stack([g, g + 1], 1)[:, 0] for g in case.grads)
    strided = replace(case, targets=wide[:, 0], active=mask[:, 0], grads=grads)
    assert_same(answer_of(strided, backend=backend), expected, "strided targets, mask and gradients")


def views(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same logits in other memory layouts."""
    n, v = logits.shape
    wide = torch.full((n, v + 7), 99.0, dtype=logits.dtype)
    wide[:, 3 : 3 + v] = logits
    tall = torch.full((2 * n, v), 99.0, dtype=logits.dtype)
    tall[::2] = logits
    pairs = torch.full((n, 2 * v), 99.0, dtype=logits.dtype)
    pairs[:, ::2] = logits
    return {
        "columns cut out": wide[:, 3 : 3 + v],
        "every other row": tall[::2],
        "every other column": pairs[:, ::2],
        "column major": logits.t().contiguous().t(),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "layout", ["columns cut out", "every other row", "every other column", "column major"]
)
def test_strides(layout: str, backend: str) -> None:
    case = standard_case("bf16")
    view = views(case.logits)[layout]
    base = view if view._base is None else view._base
    kept = base.clone()
    leaf = view.detach().requires_grad_()
    outputs = outputs_of(case, leaf, backend=backend)
    answer = Answer(outputs[0].detach(), outputs[1].detach(), None, backward_of(case, outputs, leaf))
    assert_same(answer, oracle(case), layout)
    assert_bits_equal(base, kept, "the storage after the call", nan_payload=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_for_all_by_expand(backend: str) -> None:
    row = torch.randn(1, 17, generator=torch.Generator().manual_seed(3))
    case = Case(
        logits=row.expand(4, 17),
        targets=torch.tensor([0, 5, 16, 5]),
        active=torch.ones(4, dtype=torch.bool),
        real=17,
        grads=(torch.ones(4), torch.zeros(4), torch.zeros(4)),
    )
    leaf = row.clone().requires_grad_()
    outputs = outputs_of(case, leaf.expand(4, 17), backend=backend)
    backward_of(case, outputs, leaf)
    dense = answer_of(replace(case, logits=case.logits.contiguous()), backend=backend)
    assert_bits_equal(outputs[0], dense.logp, "logp")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("entropy", [False, True])
def test_no_rows(backend: str, entropy: bool) -> None:
    case = standard_case("fp32", entropy=entropy)
    empty = replace(
        case,
        logits=case.logits[:0],
        targets=case.targets[:0],
        active=case.active[:0],
        grads=tuple(g[:0] for g in case.grads),
    )
    answer = answer_of(empty, backend=backend)
    assert answer.logp.shape == answer.lse.shape == (0,)
    assert answer.grad.shape == (0, 29)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calling_twice_changes_nothing(backend: str) -> None:
    case = standard_case("bf16", entropy=True)
    leaf = case.logits.clone().requires_grad_()
    before = [case.targets.clone(), case.active.clone(), leaf.detach().clone()]
    versions = [t._version for t in (case.targets, case.active, leaf)]
    answers = []
    for _ in range(2):
        outputs = outputs_of(case, leaf, backend=backend)
        answers.append(Answer(*(o.detach() for o in outputs), grad=backward_of(case, outputs, leaf)))
    assert_same(answers[1], answers[0], "second call")
    assert [t._version for t in (case.targets, case.active, leaf)] == versions
    for tensor, kept in zip((case.targets, case.active, leaf), before, strict=True):
        assert_bits_equal(tensor, kept, "input", nan_payload=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_twice_through_one_graph(backend: str) -> None:
    case = standard_case("fp32")
    leaf = case.logits.clone().requires_grad_()
    outputs = outputs_of(case, leaf, backend=backend)
    first, second = (
        torch.autograd.grad(outputs, leaf, case.grads[:2], retain_graph=True)[0] for _ in range(2)
    )
    assert_bits_equal(first, second, "gradient")


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_single_outputs(backend: str) -> None:
    """A missing upstream gradient is the same as one of zeros; lse alone reaches inactive rows."""
    case = standard_case("fp32", 0.8, entropy=True)
    leaf = case.logits.clone().requires_grad_()
    outputs = outputs_of(case, leaf, backend=backend)
    for which in range(3):
        (grad,) = torch.autograd.grad(outputs[which], leaf, case.grads[which], retain_graph=True)
        only = [g if i == which else torch.zeros_like(g) for i, g in enumerate(case.grads)]
        expected = oracle(replace(case, grads=(only[0], only[1], only[2])))
        assert_bits_equal(grad, expected.grad, f"gradient of output {which} alone")
        inactive_touched = bool((grad[~case.active] != 0).any())
        assert inactive_touched == (which == 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_near_float64(backend: str) -> None:
    case = standard_case("fp32", 0.7, entropy=True)
    answer = answer_of(case, backend=backend)
    for i in case.active.nonzero()[:, 0].tolist():
        row = case.logits[i, : case.real].double().tolist()
        target, finite = int(case.targets[i]), all(x > -INF for x in row)
        if not finite:
            continue
        a, b, h = (g[i].item() for g in case.grads)
        near = float64.gradient(row, target, a=a, b=b, h=h, temperature=case.temperature)
        # the temperature is one fp32 number: relative error 2^-24 in the exponent
        slack = 2e-6 + 2.0**-23 * max(abs(x) for x in row)
        assert torch.allclose(
            answer.grad[i, : case.real].double(), torch.tensor(near).double(), rtol=1e-5, atol=slack
        )
        assert answer.logp[i].item() == pytest.approx(
            float64.logp(row, target, case.temperature), abs=slack, rel=1e-6
        )


# -------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("mask_by", MASKS)
def test_saved_are_the_logits_as_given_and_numbers_per_row(backend: str, dtype: str, mask_by: MaskBy) -> None:
    case = standard_case(dtype, 0.9, entropy=True, mask_by=mask_by)
    wide = torch.cat([case.logits, case.logits], 1)
    leaf = wide.requires_grad_()
    logits = leaf[:, : case.logits.shape[1]]  # a view, with rows at a stride
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = outputs_of(case, logits, backend=backend)
    n = len(logits)
    large = [t for t in saved if t.numel() > n]
    assert [(t.data_ptr(), t.dtype, t.stride()) for t in large] == [
        (logits.data_ptr(), logits.dtype, logits.stride())
    ]
    assert all(t.shape == (n,) for t in saved if t.numel() <= n)
    assert sum(t.numel() * t.element_size() for t in saved if t.numel() <= n) <= n * (8 + 8 + 1 + 1 + 4)
    assert outputs[0].dtype == outputs[1].dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_saved_without_gradients(backend: str) -> None:
    case = standard_case("fp32")
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.no_grad():
            first = outputs_of(case, case.logits.clone().requires_grad_(), backend=backend)
        second = outputs_of(case, case.logits.clone(), backend=backend)
        with torch.inference_mode():
            third = outputs_of(case, case.logits.clone(), backend=backend)
    assert not saved
    for outputs in (first, second, third):
        assert not outputs[0].requires_grad
        assert_bits_equal(outputs[0], first[0], "logp")
        assert_bits_equal(outputs[1], first[1], "lse")


@pytest.mark.parametrize("backend", BACKENDS)
def test_role_infer(backend: str) -> None:
    case = standard_case("bf16", 0.6)
    contract = contract_of(case, role=LogprobRole.INFER)
    op = kernel_registry.get_logprob_op(contract, backend).op
    with torch.no_grad():
        logp, lse = op(case.logits, case.targets, contract=contract, mask=case.active)
    expected = oracle(case)
    assert_bits_equal(logp, expected.logp, "logp")
    assert_bits_equal(lse, expected.lse, "lse")


@pytest.mark.parametrize("mask_by", ["call", "contract"])
def test_mask_made_under_inference_mode(mask_by: MaskBy) -> None:
    """Mask and ids come out of inference_mode with the rollouts; the contract's may be first used there."""
    case = standard_case("fp32", mask_by=mask_by, seed=1)
    op, contract = VocabParallelLogprobOp(), contract_of(case)
    with torch.inference_mode():
        targets = case.targets.clone()
        mask = case.active.clone() if mask_by == "call" else None
        op(case.logits.clone(), targets, contract=contract, mask=mask)
    leaf = case.logits.clone().requires_grad_()
    outputs = op(leaf, targets, contract=contract, mask=mask)
    assert_bits_equal(backward_of(case, outputs, leaf), oracle(case).grad, "gradient")


def test_changing_the_logits_before_backward_is_noticed() -> None:
    case = standard_case("fp32")
    leaf = case.logits.clone().requires_grad_()
    logits = leaf * 1.0
    outputs = outputs_of(case, logits)
    with torch.no_grad():
        logits.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_of(case, outputs, leaf)


def test_the_contract_mask_becomes_a_tensor_once() -> None:
    case = standard_case("fp32", mask_by="contract")
    contract = contract_of(case)
    op = VocabParallelLogprobOp()
    op(case.logits, case.targets, contract=contract)
    first = op._masks._tensor
    op(case.logits, case.targets, contract=contract)
    assert op._masks._tensor is first
    other = contract_of(replace(case, active=~case.active, targets=torch.zeros_like(case.targets)))
    with pytest.raises(InputError, match="row"):  # the garbage rows are active now: the mask was not kept
        op(case.logits, torch.zeros_like(case.targets), contract=other)


# ---------------------------------------------------------------------------------- rows without an answer

BAD_ROWS = {
    "a NaN": ([0.0, NAN, 1.0, 2.0], 0),
    "+inf": ([0.0, 1.0, INF, 2.0], 0),
    "nothing but -inf": ([-INF] * 4, 2),
    "beyond the domain": ([2e6, 0.0, 1.0, 2.0], 0),
    "below the domain": ([-2e6] * 4, 1),
    "target in the padding": ([0.0, 1.0, 2.0, 3.0], 4),
    "target beyond the padding": ([0.0, 1.0, 2.0, 3.0], 6),
    "target -1": ([0.0, 1.0, 2.0, 3.0], -1),
    "target -100 where the mask says active": ([0.0, 1.0, 2.0, 3.0], -100),
    "target 2^40": ([0.0, 1.0, 2.0, 3.0], 2**40),
}


def bad_case(kind: str) -> Case:
    values, target = BAD_ROWS[kind]
    good = [0.5, -1.0, 2.0, 0.25]
    return Case(
        logits=torch.tensor([[*row, 7.0, 7.0] for row in (good, values, good)]),
        targets=torch.tensor([1, target, 3]),
        active=torch.ones(3, dtype=torch.bool),
        real=4,
        grads=(torch.tensor([0.5, 0.25, -1.0]), torch.zeros(3), torch.zeros(3)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", list(BAD_ROWS))
def test_bad_rows_without_validation_are_nan_and_alone(kind: str, backend: str) -> None:
    case = bad_case(kind)
    answer = answer_of(case, backend=backend, validate=False)
    expected = oracle(case)
    assert_same(answer, expected, kind)
    assert answer.logp.isnan().tolist() == [False, True, False]
    assert answer.grad[1, :4].isnan().all()
    assert_bits_equal(answer.grad[:, 4:], torch.zeros(3, 2), "gradient of the padding")
    assert answer.lse[1].isnan().item() == (not kind.startswith("target"))
    # with no gradient flowing into it the row is harmless
    calm = replace(case, grads=(torch.tensor([0.5, 0.0, -1.0]), torch.zeros(3), torch.zeros(3)))
    grad = answer_of(calm, backend=backend, validate=False).grad
    assert_bits_equal(grad[1], torch.zeros(6), "gradient of the bad row")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", list(BAD_ROWS))
def test_bad_rows_under_validation_are_named(kind: str, backend: str) -> None:
    case = bad_case(kind)
    if kind.startswith("target"):
        match = (
            rf"row 1: target {BAD_ROWS[kind][1]} lies outside the real vocabulary \[0, 4\); mask the row out"
        )
    else:
        match = r"row 1: the logits hold a NaN or \+inf, nothing but −inf, or values beyond ±1.4e6·T"
    with pytest.raises(InputError, match=match):
        answer_of(case, backend=backend)


def test_several_bad_rows_are_counted() -> None:
    case = bad_case("a NaN")
    case = replace(case, logits=case.logits.clone().index_fill_(0, torch.tensor([2]), NAN))
    with pytest.raises(InputError, match=r"row 1 \(2 such rows\): the logits hold a NaN"):
        answer_of(case)


@pytest.mark.parametrize("kind", ["a NaN", "nothing but -inf", "target -1"])
def test_bad_rows_that_are_masked_out_are_fine(kind: str) -> None:
    case = replace(bad_case(kind), active=torch.tensor([True, False, True]))
    answer = answer_of(case)
    assert_same(answer, oracle(case), kind)
    assert_bits_equal(answer.logp[1], torch.tensor(0.0), "logp")


# ---------------------------------------------------------------------------------------- small known rows


def small(
    targets: list[int], *, temperature: float = 1.0, pad: int = 0, entropy: bool = False
) -> tuple[torch.Tensor, ...]:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, -0.5] + [0.0] * pad] * len(targets))
    contract = LogprobContract(
        role="train",
        dtype="fp32",
        sharding=ShardingSpec.even(6, padded_vocab_size=6 + pad),
        temperature=temperature,
        output=LogprobOutputSpec(entropy=entropy),
    )
    return VocabParallelLogprobOp()(logits, torch.tensor(targets), contract=contract)


def test_the_toy_row() -> None:
    logp, lse = small([1])
    assert (lse.item(), logp.item()) == (
        pytest.approx(2.6196174, abs=3e-7),
        pytest.approx(-1.6196174, abs=3e-7),
    )
    assert_bits_equal(small([1], pad=2)[0], logp, "logp beside two columns of padding")
    assert small([1], temperature=0.6)[0].item() == pytest.approx(-1.9510004, abs=3e-7)
    assert_bits_equal(small([-100])[0], torch.tensor([0.0]), "logp of the ignore index")


def test_entropy_beside_minus_infinity() -> None:
    contract = LogprobContract(
        role="train", dtype="fp32", sharding=ShardingSpec.even(3), output=LogprobOutputSpec(entropy=True)
    )
    leaf = torch.tensor([[1.0, -INF, 0.0]] * 2, requires_grad=True)
    logp, _, entropy = VocabParallelLogprobOp()(leaf, torch.tensor([1, 0]), contract=contract)
    assert logp[0].item() == -INF
    assert entropy.tolist() == [pytest.approx(0.5822, abs=1e-4)] * 2
    entropy.sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all())
    assert leaf.grad[:, 1].tolist() == [0.0, 0.0]


def test_a_mask_in_two_places() -> None:
    case = standard_case("fp32", mask_by="both")
    contract = contract_of(case)
    other = case.active.clone()
    other[5] = ~other[5]
    match = rf"differs from the contract's at token 5: {bool(other[5])} against {not other[5]}; give it in"
    with pytest.raises(InputError, match=match):
        VocabParallelLogprobOp()(case.logits, case.targets, contract=contract, mask=other)
    # without validation the mask of the call holds
    logp = VocabParallelLogprobOp()(case.logits, case.targets, contract=contract, mask=other, validate=False)[
        0
    ]
    assert (logp[5].item() == 0.0) == (not other[5])


def test_the_contract_ignore_index_holds_without_a_mask() -> None:
    contract = LogprobContract(role="train", dtype="fp32", sharding=ShardingSpec.even(4), ignore_index=-1)
    logp, lse = VocabParallelLogprobOp()(torch.zeros(2, 4), torch.tensor([-1, 2]), contract=contract)
    assert logp.tolist() == [0.0, pytest.approx(-1.3862944)]
    assert lse.tolist() == [pytest.approx(1.3862944)] * 2
    with pytest.raises(InputError, match=r"target -100 lies outside .* or give it the ignore index -1 where"):
        VocabParallelLogprobOp()(torch.zeros(2, 4), torch.tensor([-100, 2]), contract=contract)
    all_active = LogprobContract(
        role="train", dtype="fp32", sharding=ShardingSpec.even(4), mask=MaskSpec.all_active(2, -1)
    )
    with pytest.raises(InputError, match="row 0: target -1 lies outside the real vocabulary"):
        VocabParallelLogprobOp()(torch.zeros(2, 4), torch.tensor([-1, 2]), contract=all_active)
