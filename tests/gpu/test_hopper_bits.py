"""The CUDA C++ kernels against the Triton ones, bit by bit: odd values, temperatures, the whole loss."""

# pyright: basic
from __future__ import annotations

import pytest
import torch

nvrtc = pytest.importorskip("rl_engine.numerics.nvrtc")
_CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
_REASON = nvrtc.missing_reason(_CAPABILITY)
pytestmark = pytest.mark.skipif(_REASON is not None, reason=f"{_REASON}")

SPECIAL = (
    "plain",
    "constant",
    "all −inf",
    "one NaN",
    "one negative NaN",
    "+inf",
    "many −inf",
    "−1e9",
    "3000",
    "−5000",
    "tiny",
    "zero",
    "rising",
    "normalised",
)


def logits_of(kind: str, rows: int, columns: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(len(kind) * 1000 + columns)
    x = torch.randn(rows, columns, device="cuda", generator=generator) * scale
    if kind == "constant":
        x.fill_(0.75)
    elif kind == "all −inf":
        x[0] = -torch.inf
    elif kind == "one NaN":
        x[0, columns // 2] = torch.nan
    elif kind == "one negative NaN":
        x[0, 3] = -torch.tensor(torch.nan)
    elif kind == "+inf":
        x[0, columns - 9] = torch.inf
    elif kind == "many −inf":
        x[:, ::3] = -torch.inf
    elif kind == "−1e9":
        x[:, 100:] = -1e9
    elif kind == "3000":
        x[:, 7] = 3000.0
    elif kind == "−5000":
        x -= 5000.0
    elif kind == "tiny":
        x *= 2.0**-24
    elif kind == "zero":
        x.zero_()
    elif kind == "rising":
        x += torch.linspace(-200, 60, columns, device="cuda")
    elif kind == "normalised":
        x = torch.log_softmax(x, -1)
    return x.bfloat16()


def good_rows(partial: torch.Tensor) -> torch.Tensor:
    from rl_engine.numerics.words import close_rows

    return close_rows(partial, 1.4426950216293335).good


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0, 0.01, 100.0])
@pytest.mark.parametrize("kind", SPECIAL)
def test_partials(kind: str, temperature: float) -> None:
    from rl_engine.numerics import gpu, hopper
    from rl_engine.numerics.words import merge, temperature_scale

    scale_l = temperature_scale(temperature)
    for columns, real in ((16384, 16384), (18992, 18989), (32768, 32001), (151936, 151669)):
        for rows in (1, 5, 1100):
            if rows * columns > 2**26:
                continue
            x = logits_of(kind, rows, columns)
            target = torch.randint(0, real, (rows,), device="cuda")
            ours = merge(hopper.partials(x, target, scale_l=scale_l, real_cols=real, min_columns=8192))
            theirs = merge(gpu.partials(x, target, scale_l=scale_l, real_cols=real))
            good = good_rows(theirs)
            assert torch.equal(good, good_rows(ours)), (columns, rows)
            assert torch.equal(ours[good], theirs[good]), (columns, rows)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(((a.view(integer) == b.view(integer)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("kind", SPECIAL)
def test_loss_and_gradient(kind: str, beta: float, temperature: float) -> None:
    import rl_engine
    from rl_engine.contracts import ObjectiveSpec
    from rl_engine.numerics import gpu, hopper

    for columns in (32768, 75968, 128256, 151936, 202048):
        rows, length = 24, 4
        x = logits_of(kind, rows, columns).view(rows // length, length, columns)
        generator = torch.Generator("cuda").manual_seed(columns)
        target = torch.randint(0, columns, (rows // length, length), device="cuda", generator=generator)
        mask = torch.rand(rows // length, length, device="cuda", generator=generator) > 0.2
        old = torch.randn(rows // length, length, device="cuda", generator=generator) * 0.3 - 12
        rewards = torch.rand(rows // length, device="cuda", generator=generator)
        assert hopper.fits_loss_rows(x.view(rows, columns), columns)
        results = []
        for fused in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if not fused:
                    patch.setattr(hopper, "fits_loss_rows", lambda *_: False)
                    patch.setattr(hopper, "partials", gpu.partials)
                for upstream in (1.0, 3.0):
                    leaf = x.clone().requires_grad_()
                    result = rl_engine.grpo_loss(
                        leaf,
                        target,
                        old,
                        rewards=rewards,
                        mask=mask,
                        group_boundaries=(0, 2, 4, 6),
                        objective=ObjectiveSpec(beta=beta),
                        ref_logps=old + 0.1 if beta else None,
                        temperature=temperature,
                        validate=False,
                    )
                    (result.loss * upstream).backward()
                    assert leaf.grad is not None
                    results.append((result.loss.detach(), result.per_sequence_policy, leaf.grad))
        for ours, theirs in zip(results[:2], results[2:], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert same_bits(a, b), columns
