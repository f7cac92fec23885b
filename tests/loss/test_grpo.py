"""The GRPO loss on one rank: the oracle's bits from logits to gradients, float64, and what is reported."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rl_engine.contracts import (
    AdvantageNormalizer,
    AdvantageSpec,
    ClipSpec,
    DataParallelReduction,
    KLEstimator,
    LossReductionSpec,
    ObjectiveSpec,
    OnEmpty,
    TokenNormalizer,
)
from rl_engine.errors import InputError
from rl_engine.loss import DistributedGRPOLossOp
from rl_engine.mesh import Axis, count_collectives
from tests.bits import assert_bits_equal
from tests.logprob.op_cases import Case
from tests.logprob.op_cases import oracle as logprob_oracle
from tests.loss.grpo_cases import (
    INF,
    NAN,
    REPLICATED,
    AdvantageBy,
    Batch,
    Done,
    Job,
    RefBy,
    apply,
    assert_as_alone,
    call_of,
    layout_of,
    make_batch,
    run_job,
    with_garbage,
)
from tests.numerics.cases import expect
from tests.oracle import loss as loss_oracle

NORMALIZERS = list(TokenNormalizer)
SINGLE = Axis.single("tp"), Axis.single("dp")


def reduction_of(normalizer: TokenNormalizer, **changes: object) -> LossReductionSpec:
    constant = 12.5 if normalizer is TokenNormalizer.FIXED_CONSTANT else None
    return LossReductionSpec(token_normalizer=normalizer, fixed_normalizer_constant=constant, **changes)  # type: ignore[arg-type]


def alone(batch: Batch, **changes: object) -> Job:
    return Job(batch=batch, layout=layout_of(batch, 1, 1, 0), **changes).alone()  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- the oracle


def row_case(batch: Batch, logits: Tensor, coefficient: Tensor) -> Case:
    n = batch.targets.numel()
    return Case(
        logits=logits.reshape(n, -1),
        targets=batch.targets.reshape(n),
        active=batch.active.reshape(n),
        real=batch.real,
        temperature=batch.temperature,
        grads=(coefficient.reshape(n), torch.zeros(n), torch.zeros(n)),
    )


def assert_oracle(job: Job, done: Done) -> None:
    """Logits to loss and back by integers: log-probs, token terms, exact sums, gradients."""
    batch, objective, reduction = job.batch, job.objective, job.reduction
    s, length = batch.targets.shape
    logp = logprob_oracle(row_case(batch, batch.logits, torch.zeros(s, length))).logp
    ref = None
    if job.ref_by == "logits":
        ref = logprob_oracle(row_case(batch, batch.ref_logits, torch.zeros(s, length))).logp.view(s, length)
    if job.ref_by == "logps":
        ref = batch.ref
    advantages = batch.rewards.tolist()
    if job.advantage_by == "rewards":
        spec = objective.advantage
        advantages = loss_oracle.advantages(
            advantages, list(batch.boundaries), normalizer=str(spec.normalizer), eps=spec.std_eps
        )
    expected = loss_oracle.grpo(
        logp.view(s, length).tolist(),
        batch.old.tolist(),
        advantages,
        batch.active.tolist(),
        ref=None if ref is None else ref.tolist(),
        beta=objective.beta,
        kl_estimator=str(objective.kl_estimator),
        normalizer=str(reduction.token_normalizer),
        constant=reduction.fixed_normalizer_constant,
        eps_low=objective.clip.clip_eps_low,
        eps_high=objective.clip.clip_eps_high,
        guard=objective.log_ratio_guard,
    )
    coefficient = torch.stack([expect(row, "fp32") for row in expected.grad])
    grad = logprob_oracle(row_case(batch, batch.logits, coefficient)).grad
    assert_bits_equal(done.loss, expect([expected.loss], "fp32")[0], "loss")
    assert_bits_equal(done.policy_loss, expect([expected.policy_loss], "fp32")[0], "policy_loss")
    if expected.kl is not None:
        assert_bits_equal(done.kl, expect([expected.kl], "fp32")[0], "kl")
    if job.advantage_by == "rewards":
        assert_bits_equal(done.advantages, expect(advantages, "fp32"), "advantages")
    else:
        assert done.advantages is None
    assert_bits_equal(done.per_sequence_policy, expect(expected.per_sequence_policy, "fp32"), "per sequence")
    assert_bits_equal(done.grad.reshape(grad.shape), grad, "gradient of the logits")
    assert done.num_guarded_tokens.item() == expected.guarded
    assert done.per_sequence_active_tokens.tolist() == batch.active.sum(1).tolist()


COMBINATIONS = list(
    itertools.product(NORMALIZERS, [("none", 0.0), ("logits", 0.04), ("logps", 0.0), ("logps", 0.1)])
)


@pytest.mark.parametrize(("normalizer", "reference"), COMBINATIONS)
def test_from_logits_to_gradients_by_the_oracle(
    normalizer: TokenNormalizer, reference: tuple[RefBy, float]
) -> None:
    index = COMBINATIONS.index((normalizer, reference))
    ref_by, beta = reference
    job = alone(
        make_batch(index, dtype=("fp32", "bf16", "fp16")[index % 3], temperature=(1.0, 0.7)[index % 2]),
        objective=ObjectiveSpec(
            clip=ClipSpec(0.2, (0.2, 0.28)[index % 2]),
            advantage=AdvantageSpec(
                normalizer=list(AdvantageNormalizer)[index % 3], std_eps=(1e-6, 0.5)[index // 2 % 2]
            ),
            kl_estimator=list(KLEstimator)[index // 4 % 2],
            beta=beta,
        ),
        reduction=reduction_of(normalizer),
        ref_by=ref_by,
        advantage_by=("rewards", "rewards", "sequence")[index % 3],
        backend=("exact_numba", "exact_torch")[index % 2],
    )
    assert_oracle(job, run_job(job))


# ------------------------------------------------------------------------------------------------- float64


def float64_loss(job: Job) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the logits by autograd in float64, written as the formula reads."""
    batch, objective, reduction = job.batch, job.objective, job.reduction
    s, length = batch.targets.shape
    active, zero = batch.active, torch.zeros((), dtype=torch.float64)
    leaf = torch.where(active[..., None], batch.logits[..., : batch.real].double(), 0.0).requires_grad_()
    ids = torch.where(active, batch.targets, 0)[..., None]

    def logp_of(logits: Tensor) -> Tensor:
        return torch.log_softmax(logits / batch.temperature, -1).gather(-1, ids)[..., 0]

    logp = logp_of(leaf)
    old = torch.where(active, batch.old.double(), zero)
    if job.advantage_by == "token":
        advantage = torch.where(active, batch.token_advantages.double(), zero)
    else:
        values = batch.rewards.double()
        if job.advantage_by == "rewards":
            groups = [values[a:b] for a, b in itertools.pairwise(batch.boundaries)]
            spec = objective.advantage
            scale = {
                AdvantageNormalizer.MEAN_ONLY: lambda g: 1.0,
                AdvantageNormalizer.MEAN_STD_POPULATION: lambda g: g.std(correction=0).clamp(
                    min=spec.std_eps
                ),
                AdvantageNormalizer.MEAN_STD_SAMPLE: lambda g: g.std() + spec.std_eps,
            }[spec.normalizer]
            values = torch.cat([(g - g.mean()) / scale(g) for g in groups])
        advantage = values[:, None].expand(s, length)
    delta = (logp - old).clamp(max=objective.log_ratio_guard)
    ratio = delta.exp()
    low, high = 1 - objective.clip.clip_eps_low, 1 + objective.clip.clip_eps_high
    surrogate = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    kl = torch.zeros_like(surrogate)
    if job.ref_by != "none":
        ref = torch.where(active, batch.ref.double(), zero)
        if job.ref_by == "logits":
            ref = logp_of(torch.where(active[..., None], batch.ref_logits[..., : batch.real].double(), 0.0))
        d = ref - logp
        kl = d.exp() - 1 - d if objective.kl_estimator is KLEstimator.K3_UNBIASED else -d

    counts = active.sum(1)

    def normalise(values: Tensor) -> Tensor:
        values = torch.where(active, values, zero)
        kind = reduction.token_normalizer
        if kind is TokenNormalizer.GLOBAL_ACTIVE_TOKENS:
            return values.sum() / counts.sum()
        if kind is TokenNormalizer.FIXED_CONSTANT:
            assert reduction.fixed_normalizer_constant is not None
            return values.sum() / reduction.fixed_normalizer_constant
        means = values.sum(1) / counts.clamp(min=1)
        return means.sum() / (s if kind is TokenNormalizer.PER_SEQUENCE_THEN_MEAN_ALL else (counts > 0).sum())

    loss = normalise(surrogate) + objective.beta * normalise(kl)
    (loss * job.scale).backward()
    assert leaf.grad is not None
    return loss.detach(), torch.where(active[..., None], leaf.grad, zero)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("advantage_by", ["rewards", "sequence", "token"])
@pytest.mark.parametrize("ref_by", ["none", "logits", "logps"])
def test_near_float64_autograd(normalizer: TokenNormalizer, advantage_by: AdvantageBy, ref_by: RefBy) -> None:
    batch = make_batch(len(advantage_by) * 7 + len(ref_by), temperature=0.8)
    # beyond the guard the two differ by design: no such token here
    old = torch.where(batch.old < -60, batch.old + 100, batch.old)
    batch = replace(batch, old=old, ref=torch.where(batch.ref > 60, batch.ref - 90, batch.ref))
    job = alone(
        batch,
        objective=ObjectiveSpec(clip=ClipSpec(0.1, 0.3), beta=0.0 if ref_by == "none" else 0.07),
        reduction=reduction_of(normalizer),
        advantage_by=advantage_by,
        ref_by=ref_by,
        scale=-2.5,
    )
    done = run_job(job)
    loss, grad = float64_loss(job)
    assert done.loss.item() == pytest.approx(loss.item(), rel=2e-6, abs=2e-6)
    assert torch.allclose(done.grad[..., : batch.real].double(), grad, rtol=2e-5, atol=1e-6)
    assert float(grad.norm()) > 1e-3
    assert_bits_equal(done.grad[..., batch.real :], torch.zeros_like(done.grad[..., batch.real :]), "padding")


# ------------------------------------------------------------------------------------------------- garbage


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("validate", [True, False])
def test_garbage_at_masked_tokens_changes_no_bit(normalizer: TokenNormalizer, validate: bool) -> None:
    """NaN, infinities and 1e30 in logits, reference, old log-probs, advantages and targets."""
    batch = make_batch(5, dtype="fp32")
    variants: list[tuple[RefBy, AdvantageBy]] = [
        ("logits", "rewards"),
        ("logps", "token"),
        ("none", "sequence"),
    ]
    for ref_by, advantage_by in variants:
        job = alone(
            batch,
            objective=ObjectiveSpec(beta=0.0 if ref_by == "none" else 0.04),
            reduction=reduction_of(normalizer),
            ref_by=ref_by,
            advantage_by=advantage_by,
            validate=validate,
        )
        first = run_job(job)
        assert first.loss.isfinite() and first.grad.isfinite().all()
        assert_bits_equal(first.grad[~batch.active], torch.zeros_like(first.grad[~batch.active]), "masked")
        for seed in range(3):
            again = replace(job, batch=with_garbage(batch, seed))
            assert_as_alone([run_job(again)], job, first)


def test_padding_changes_no_bit() -> None:
    batch = make_batch(6)
    job = alone(batch)
    first = run_job(job)
    for padding in (1, 7, 250):
        padded = replace(job, layout=replace(job.layout, padding=(padding,)))
        assert_as_alone([run_job(padded)], padded, first)


# ------------------------------------------------------------------------------------------- empty batches


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("validate", [True, False])
def test_nothing_active_is_zero(normalizer: TokenNormalizer, beta: float, validate: bool) -> None:
    batch = make_batch(7)
    batch = with_garbage(replace(batch, active=torch.zeros_like(batch.active)), 7)
    job = alone(
        batch,
        objective=ObjectiveSpec(beta=beta),
        reduction=reduction_of(normalizer),
        ref_by="logits",
        validate=validate,
    )
    done = run_job(job)
    for part in ("loss", "policy_loss", "kl", "per_sequence_policy", "per_sequence_kl", "grad"):
        value = getattr(done, part)
        assert_bits_equal(value, torch.zeros_like(value), part)
    assert done.num_active_tokens.item() == done.num_guarded_tokens.item() == 0
    refused = replace(job, reduction=reduction_of(normalizer, on_empty=OnEmpty.ERROR))
    with pytest.raises(
        InputError, match=r"no token of the whole batch is active; the contract says on_empty='error'"
    ):
        run_job(refused)


def test_on_empty_error_lets_other_batches_pass() -> None:
    job = alone(make_batch(8))
    strict = replace(job, reduction=LossReductionSpec(on_empty=OnEmpty.ERROR))
    assert_as_alone([run_job(strict)], strict, run_job(job))


def test_no_token_slots_at_all() -> None:
    batch = make_batch(9, length=2)
    batch = replace(
        batch,
        **{
            name: getattr(batch, name)[:, :0]
            for name in ("logits", "ref_logits", "targets", "old", "ref", "active", "token_advantages")
        },
    )
    done = run_job(alone(batch))
    assert done.loss.item() == 0.0
    assert done.per_sequence_active_tokens.tolist() == [0] * 9


# ------------------------------------------------------------------------------------------------- reports


def test_unpacking_and_what_is_in_the_graph() -> None:
    job = alone(make_batch(10), objective=ObjectiveSpec(beta=0.04), ref_by="logits")
    result, leaf = apply(job)
    loss, policy_loss, kl = result
    assert loss is result.loss and policy_loss is result.policy_loss and kl is result.kl
    assert loss.requires_grad and loss.grad_fn is not None
    assert result != apply(job)[0], "compared by identity: tensors are no bools"
    for name in REPLICATED:
        value = getattr(result, name)
        assert name == "loss" or not value.requires_grad, name
        assert value.dtype in (torch.float32, torch.int64)
    assert loss.shape == policy_loss.shape == kl.shape == result.num_active_tokens.shape == ()
    assert loss.item() == pytest.approx(policy_loss.item() + 0.04 * kl.item(), abs=1e-6)
    loss.backward()
    assert leaf.grad is not None


def test_constants_get_no_gradient() -> None:
    job = alone(make_batch(11), objective=ObjectiveSpec(beta=0.04), ref_by="logits")
    leaf, call = call_of(job, *SINGLE)
    tracked = {
        name: call[name].clone().requires_grad_() for name in ("old_logps", "rewards", "ref_local_logits")
    }
    DistributedGRPOLossOp().apply(leaf, **(call | tracked)).loss.backward()
    assert all(value.grad is None for value in tracked.values())
    assert_bits_equal(leaf.grad, run_job(job).grad.reshape(leaf.shape), "gradient")
    leaf, call = call_of(replace(job, ref_by="logps", advantage_by="token"), *SINGLE)
    tracked = {name: call[name].clone().requires_grad_() for name in ("old_logps", "advantages", "ref_logps")}
    DistributedGRPOLossOp().apply(leaf, **(call | tracked)).loss.backward()
    assert all(value.grad is None for value in tracked.values())


def test_nothing_is_written_to() -> None:
    for ref_by, advantage_by in (("logits", "rewards"), ("logps", "token")):
        job = alone(make_batch(12), ref_by=ref_by, advantage_by=advantage_by)  # type: ignore[arg-type]
        leaf, call = call_of(job, *SINGLE)
        tensors = {name: value for name, value in call.items() if isinstance(value, Tensor)} | {
            "logits": leaf
        }
        kept = {name: (value._version, value.detach().clone()) for name, value in tensors.items()}
        DistributedGRPOLossOp().apply(leaf, **call).loss.backward()
        for name, (version, value) in kept.items():
            assert tensors[name]._version == version, name
            assert_bits_equal(tensors[name], value, name, nan_payload=True)


@pytest.mark.parametrize("scale", [1.0, -3.0, 0.0, 1024.0, 1e-30])
def test_upstream_gradients_multiply_last(scale: float) -> None:
    job = alone(make_batch(13))
    batch = job.batch
    done = run_job(replace(job, scale=scale))
    plain = run_job(job)
    if scale in (1.0, 1024.0):  # exact in every later rounding
        assert_bits_equal(done.grad, plain.grad * scale, "gradient")
    assert torch.allclose(done.grad.double(), plain.grad.double() * scale, rtol=2e-6, atol=1e-40)
    assert_bits_equal(done.grad[~batch.active], torch.zeros_like(done.grad[~batch.active]), "masked")
    assert_bits_equal(done.loss, plain.loss, "loss")


def test_a_nan_upstream_reaches_active_tokens_only() -> None:
    job = alone(make_batch(14))
    grad = run_job(replace(job, scale=NAN)).grad
    masked = grad[~job.batch.active]
    assert_bits_equal(masked, torch.zeros_like(masked), "masked")
    assert grad[job.batch.active].isnan().any()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("ref_by", ["none", "logits", "logps"])
def test_saved_are_the_logits_and_numbers_per_token(dtype: str, ref_by: RefBy) -> None:
    job = alone(make_batch(15, dtype=dtype), ref_by=ref_by)
    leaf, call = call_of(job, *SINGLE)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        DistributedGRPOLossOp().apply(leaf, **call)
    n = len(leaf)
    assert [(t.data_ptr(), t.dtype) for t in saved if t.numel() > n] == [(leaf.data_ptr(), leaf.dtype)]
    assert sum(t.numel() * t.element_size() for t in saved if t.numel() <= n) <= n * (8 + 8 + 1 + 1 + 4 + 4)


def test_without_gradients() -> None:
    job = alone(make_batch(16))
    expected = run_job(job)
    leaf, call = call_of(job, *SINGLE)
    with torch.no_grad():
        result = DistributedGRPOLossOp().apply(leaf, **call)
    assert not result.loss.requires_grad
    assert_bits_equal(result.loss, expected.loss, "loss")
    with torch.inference_mode():
        again = DistributedGRPOLossOp().apply(leaf.detach().clone(), **call)
    assert_bits_equal(again.loss, expected.loss, "loss under inference_mode")


def test_everything_but_the_logits_from_inference_mode() -> None:
    for ref_by, advantage_by in (("logits", "rewards"), ("logps", "token")):
        job = alone(
            make_batch(17), objective=ObjectiveSpec(beta=0.04), ref_by=ref_by, advantage_by=advantage_by
        )
        leaf, call = call_of(job, *SINGLE)
        with torch.inference_mode():
            call = {n: v.clone() if isinstance(v, Tensor) else v for n, v in call.items()}
        DistributedGRPOLossOp().apply(leaf, **call).loss.backward()
        assert leaf.grad is not None
        assert_bits_equal(leaf.grad, run_job(job).grad.reshape(leaf.shape), "gradient")


def test_old_logps_that_are_the_live_ones() -> None:
    """Ratio 1: the gradient is −A·w·(onehot − p), and old_logps get none of it."""
    batch = make_batch(18)
    job = alone(batch, advantage_by="sequence")
    leaf, call = call_of(job, *SINGLE)
    from rl_engine.logprob import VocabParallelLogprobOp

    live = VocabParallelLogprobOp()(
        leaf, call["action_ids"], contract=call["contract"].logprob, mask=call["mask"]
    )[0]
    result = DistributedGRPOLossOp().apply(leaf, **(call | {"old_logps": live}))
    result.loss.backward()
    count = int(batch.active.sum())
    expected = -(batch.rewards[:, None] * batch.active).double().sum() / count
    assert result.loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert leaf.grad is not None
    p = torch.softmax(batch.logits[..., : batch.real].double(), -1)
    onehot = torch.nn.functional.one_hot(torch.where(batch.active, batch.targets, 0), batch.real).double()
    want = torch.where(batch.active[..., None], -(batch.rewards[:, None, None] / count) * (onehot - p), 0.0)
    assert torch.allclose(leaf.grad.view(batch.logits.shape)[..., : batch.real].double(), want, atol=1e-6)


def test_provenance() -> None:
    job = alone(make_batch(19))
    leaf, call = call_of(job, *SINGLE)
    result = DistributedGRPOLossOp().apply(leaf, **(call | {"logprob_backend": "exact_torch"}))
    provenance = result.provenance
    assert (provenance.loss_backend, provenance.logprob_backend) == ("exact", "exact_torch")
    assert provenance.numerics_id == "exact-words/1"
    assert (provenance.tp_world_size, provenance.dp_world_size) == (1, 1)
    assert provenance.contract is call["contract"]
    assert "active_mask_sha256" not in vars(provenance), "the digest waits until somebody reads it"
    digest = hashlib.sha256(bytes(call["mask"].to(torch.uint8).tolist())).hexdigest()
    assert provenance.active_mask_sha256 == digest
    assert "active_mask_sha256" in vars(provenance)
    assert provenance.to_dict()["active_mask_sha256"] == digest
    assert provenance.to_dict()["contract"] == call["contract"].to_dict()


def test_alone_nothing_is_exchanged() -> None:
    with count_collectives() as counts:
        run_job(alone(make_batch(20), ref_by="logits"))
    assert not counts


@pytest.mark.parametrize("kind", [DataParallelReduction.SUM, DataParallelReduction.MEAN])
def test_on_one_rank_both_data_parallel_reductions_are_one(kind: DataParallelReduction) -> None:
    job = alone(make_batch(21))
    other = replace(job, reduction=LossReductionSpec(data_parallel_reduction=kind))
    assert_as_alone([run_job(other)], other, run_job(job))


def test_far_reference_at_beta_zero_is_only_reported() -> None:
    batch = make_batch(22)
    job = alone(batch)
    far = replace(job, ref_by="logps", batch=replace(batch, ref=torch.where(batch.active, 200.0, INF)))
    plain, done = run_job(job), run_job(far)
    assert_bits_equal(done.loss, plain.loss, "loss")
    assert_bits_equal(done.grad, plain.grad, "gradient")
    assert done.kl.isfinite() and done.kl > 1e30
    active = int(batch.active.sum())
    assert done.num_guarded_tokens.item() == active
