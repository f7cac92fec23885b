"""The Triton tier gives the bits of the reference, and the whole loss on a GPU those of a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import rl_engine
from rl_engine.contracts import LossReductionSpec, ObjectiveSpec, TokenNormalizer
from rl_engine.numerics import reference, words
from tests.bits import assert_bits_equal

gpu = pytest.importorskip("rl_engine.numerics.gpu", reason="triton is not installed", exc_type=ImportError)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

INF = float("inf")
NUM_ROWS = 26
LAUNCHES = [
    # (block, warps, packed maximum, splits of a row)
    (512, 2, True, None),
    (512, 4, False, 3),
    (1024, 4, True, 1),
    (1024, 8, False, 2),
    (2048, 4, True, 2),
    (2048, 8, True, 1),
]


def set_special_rows(x: Tensor) -> None:
    """Overwrite rows of gaussian x [n, V] with what breaks sums of exponentials."""
    v = x.shape[1]
    ramp = torch.linspace(-100, 100, v, device=x.device)
    edits: list[Callable[[Tensor], object]] = [
        lambda r: (r.fill_(-1e9), r[v // 2].fill_(2.0)),
        lambda r: (r.fill_(-INF), r[-1].fill_(1.0)),
        lambda r: r[0].fill_(40.0),
        lambda r: r.add_(5000.0),
        lambda r: r[v // 3].fill_(float("nan")),
        lambda r: r[v // 2].fill_(INF),
        lambda r: r.fill_(-INF),
        lambda r: r.fill_(3e38),
        lambda r: r[v // 2 :].add_(60.0),
        lambda r: r.mul_(200.0),
        lambda r: r.mul_(1e-8),
        lambda r: r.fill_(-16.2889595),
        lambda r: r.sub_(69400.0),
        lambda r: r.copy_(ramp),
        lambda r: r.copy_(-ramp),
        lambda r: r[::2].fill_(-1e9),
        lambda r: r.fill_(0.0),
        lambda r: r.copy_(ramp * 14500.0),
        lambda r: (r.fill_(-1453000.0), r[0].fill_(-1453050.0)),
        lambda r: r.add_(9000.0),
        lambda r: r.sub_(9000.0),
    ]
    for row, edit in enumerate(edits):
        edit(x[row])


def make_case(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Logits [26, vocab], local targets (some not owned, some in the padding), real columns."""
    generator = torch.Generator().manual_seed(vocab)
    x = 3 * torch.randn(NUM_ROWS, vocab, generator=generator)
    set_special_rows(x)
    target = torch.randint(vocab, (NUM_ROWS,), generator=generator)
    target[22] = -1
    real = vocab - 3 if vocab > 5 else vocab
    target = torch.where(target < real, target, -1)
    return x.to(dtype).cuda(), target.cuda(), real


def coefficients() -> tuple[Tensor, Tensor, Tensor]:
    """Upstream gradients [26] of logp, lse and entropy, with zeros and values that are not finite."""
    generator = torch.Generator().manual_seed(1)
    a, b, h = (torch.randn(NUM_ROWS, generator=generator) for _ in range(3))
    a[3] = a[8] = a[9] = b[4] = b[8] = b[9] = h[5] = h[8] = 0.0
    a[10], b[11] = float("nan"), INF
    return a.cuda(), b.cuda(), h.cuda()


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 10.0, 0.1, 0.01, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 1000, 4097, 20011, 50257])
def test_words_closing_and_gradient_have_the_bits_of_the_reference(
    vocab: int, dtype: torch.dtype, temperature: float, with_entropy: bool
) -> None:
    x, target, real = make_case(vocab, dtype)
    scale_l = words.temperature_scale(temperature)
    expected = reference.partial(x, target, scale_l=scale_l, real_cols=real, with_entropy=with_entropy)
    closed = words.close_rows(expected, scale_l)
    good = closed.good
    assert bool(good.any())
    for block, warps, packed, splits in LAUNCHES:
        pieces = gpu.partials(
            x,
            target,
            scale_l=scale_l,
            real_cols=real,
            with_entropy=with_entropy,
            block=block,
            warps=warps,
            packed=packed,
            splits=splits,
        )
        assert_bits_equal(words.merge(pieces)[good], expected[good], "words")
        found = gpu.close(pieces, scale_l)
        for name in ("lse2", "lse", "good"):
            assert_bits_equal(getattr(found, name), getattr(closed, name), name)
        assert_bits_equal(found.owned[good], closed.owned[good], "owned")
        assert_bits_equal(found.logp[good], closed.logp[good], "logp")
        if with_entropy:
            assert found.entropy is not None and closed.entropy is not None
            assert_bits_equal(found.entropy, closed.entropy, "entropy")

    a, b, h = coefficients()
    plain = {"grad_logp": a, "grad_lse": None, "grad_entropy": None, "entropy": None}
    for grads in [
        plain,
        plain | {"grad_lse": b},
        *([plain | {"grad_lse": b, "grad_entropy": h, "entropy": closed.entropy}] if with_entropy else []),
    ]:
        call = grads | {"scale_l": scale_l, "real_cols": real}
        slope = reference.gradient(x, target, closed.lse2, **call)
        for block, tiles in [(2048, 4), (1024, 1)]:
            found = gpu.gradient(x, target, closed.lse2, block=block, tiles=tiles, **call)
            assert_bits_equal(found, slope, "gradient")
        in_place = x.clone()
        gpu.gradient(in_place, target, closed.lse2, out=in_place, **call)
        assert_bits_equal(in_place, slope, "gradient in place")


def loss_on(
    device: str, dtype: torch.dtype, objective: ObjectiveSpec, reduction: LossReductionSpec
) -> dict[str, Tensor]:
    """A GRPO loss of 6 sequences × 9 tokens × 3001 logits, everything it returns and its gradient."""
    generator = torch.Generator().manual_seed(5)
    logits = (4 * torch.randn(6, 9, 3001, generator=generator)).to(dtype)
    targets = torch.randint(2990, (6, 9), generator=generator)
    old = torch.log_softmax(logits.float(), -1).gather(-1, targets[..., None])[..., 0]
    old += 0.3 * torch.randn(6, 9, generator=generator)
    reference_logits = (logits.float() + torch.randn(logits.shape, generator=generator)).to(dtype)
    mask = torch.rand(6, 9, generator=generator) > 0.3
    mask[4] = False
    leaf = logits.to(device).requires_grad_()
    result = rl_engine.grpo_loss(
        leaf,
        targets.to(device),
        old.to(device),
        torch.tensor([1.0, 0.0, 0.25, 0.1, 0.1, 0.9], device=device),
        mask=mask.to(device),
        group_boundaries=(0, 2, 6),
        ref_logits=reference_logits.to(device),
        objective=objective,
        reduction=reduction,
        temperature=0.7,
        vocab_size=2990,
    )
    result.loss.backward()
    assert leaf.grad is not None and result.advantages is not None
    assert result.provenance.logprob_backend == ("exact_triton" if device == "cuda" else "exact_numba")
    return {
        "loss": result.loss.detach(),
        "policy_loss": result.policy_loss,
        "kl": result.kl,
        "advantages": result.advantages,
        "per_sequence_policy": result.per_sequence_policy,
        "per_sequence_kl": result.per_sequence_kl,
        "gradient": leaf.grad,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("normalizer", ["global_active_tokens", "per_sequence_then_mean"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_the_loss_on_a_gpu_has_the_bits_of_the_loss_on_a_cpu(
    dtype: torch.dtype, normalizer: str, beta: float
) -> None:
    pytest.importorskip("numba")
    objective = ObjectiveSpec(beta=beta)
    reduction = LossReductionSpec(token_normalizer=TokenNormalizer(normalizer))
    on_cpu = loss_on("cpu", dtype, objective, reduction)
    on_gpu = loss_on("cuda", dtype, objective, reduction)
    assert float(on_cpu["gradient"].float().abs().sum()) > 0
    for name, expected in on_cpu.items():
        assert_bits_equal(on_gpu[name].cpu(), expected, name)


def test_a_captured_graph_replays_the_forward_and_the_backward() -> None:
    x, target, real = make_case(20011, torch.bfloat16)
    scale_l = words.temperature_scale(1.0)
    upstream = torch.ones(NUM_ROWS, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        closed = gpu.close(gpu.partials(x, target, scale_l=scale_l, real_cols=real), scale_l)
        slope = gpu.gradient(
            x,
            target,
            closed.lse2,
            grad_logp=upstream,
            grad_lse=None,
            grad_entropy=None,
            entropy=None,
            scale_l=scale_l,
            real_cols=real,
        )
        return closed.logp, slope

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    for found, wanted in zip(captured, expected, strict=True):
        assert_bits_equal(found, wanted, "replayed")


def test_rows_beyond_two_billion_elements() -> None:
    """Row offsets are 64-bit: the last row of [16 384, 151 936] starts beyond 2^31 elements."""
    free, _ = torch.cuda.mem_get_info()
    if free < 12 * 2**30:
        pytest.skip("needs 12 GiB of device memory")
    x = torch.zeros(16384, 151936, dtype=torch.bfloat16, device="cuda")
    x[-1, 7] = 3.0
    target = torch.full((16384,), 7, device="cuda")
    scale_l = words.temperature_scale(1.0)
    closed = gpu.close(gpu.partials(x, target, scale_l=scale_l, real_cols=151936), scale_l)
    alone = reference.partial(x[-1:], target[-1:], scale_l=scale_l, real_cols=151936)
    assert_bits_equal(closed.logp[-1:], words.close_rows(alone, scale_l).logp, "last row")
