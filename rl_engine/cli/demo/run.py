"""`rl-engine demo`: rollouts of a real model, their loss on six layouts, then training.

Steps:

1. load the model, sample G·K completions at temperature 1 and grade them; the log-probs of sampling are kept.
2. the model's logits of these completions, with all else that a loss needs, are saved as a batch for verify.
3. the GRPO loss and its gradient on TP × DP real ranks, bit for bit, exact and naive.
4. GRPO steps with AdamW on fresh samples.

Letters: G questions, K samples of each, B = G·K, C completion tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from rl_engine.api import grpo_loss
from rl_engine.cli.demo.policy import Policy, load_policy
from rl_engine.cli.demo.rollouts import Rollouts, sample_rollouts
from rl_engine.cli.demo.show import rollout_table, step_line, step_record
from rl_engine.cli.demo.task import QUESTIONS
from rl_engine.cli.demo.training import Step, train
from rl_engine.cli.verify import progress_bar
from rl_engine.contracts import LossReductionSpec, ObjectiveSpec
from rl_engine.errors import DeterminismError
from rl_engine.verify import Case, LossBatch, VerifyReport, layout_matrix
from rl_engine.verify import verify as run_verify

__all__ = ["DemoOptions", "DemoReport", "run_demo"]

TP_DEGREES = (1, 2, 3)
DP_DEGREES = (1, 2)
_CASE = Case(name="token mean", objective=ObjectiveSpec(), reduction=LossReductionSpec())


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of `rl-engine demo`."""

    out: Path
    samples: int
    max_tokens: int
    steps: int
    seed: int


@dataclass(slots=True)
class DemoReport:
    """What the demo found.

    Attributes:
        rollouts: One record a completion.
        files: What was written, by purpose.
        exact: The matrix of the default backends.
        naive: The matrix of the usual fp32 way.
        steps: Training steps, and a last entry after them.
        seconds: Time by stage.
    """

    rollouts: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    files: dict[str, str] = field(default_factory=dict[str, str])
    exact: VerifyReport | None = None
    naive: VerifyReport | None = None
    steps: list[Step] = field(default_factory=list[Step])
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def ok(self) -> bool:
        """Whether every layout had the same bits."""
        return self.exact is not None and self.exact.ok

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {
            "ok": self.ok,
            "rollouts": self.rollouts,
            "files": self.files,
            "verify": None if self.exact is None else self.exact.to_dict(),
            "naive": None if self.naive is None else self.naive.to_dict(),
            "steps": [step_record(step) for step in self.steps],
            "seconds": {stage: round(seconds, 1) for stage, seconds in self.seconds.items()},
        }

    @contextmanager
    def timed(self, stage: str) -> Generator[None]:
        """Add the time of a block to a stage."""
        start = time.monotonic()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - start


def run_demo(options: DemoOptions, out: Console, notes: Console) -> DemoReport:
    """Run all stages and print them as they end.

    Args:
        options: What the user asked for.
        out: Where results go; quiet where JSON is wanted.
        notes: Where progress goes.

    Returns:
        The report; `report.ok` tells whether all layouts had the same bits.

    Raises:
        UnsupportedError: The model or a package is not installed.
        DeterminismError: Every advantage is 0, so that no gradient would show anything.
    """
    report = DemoReport()
    options.out.mkdir(parents=True, exist_ok=True)
    with report.timed("load the model"), notes.status("loading SmolLM2-135M-Instruct"):
        policy = load_policy()
    with report.timed("sample"), notes.status(f"sampling {options.samples} completions of each question"):
        rollouts = _sample(policy, options)
    batch = _recorded_batch(policy, rollouts, options, report)
    advantages = _mixed_advantages(batch)
    report.rollouts = rollouts.records()
    out.print(rollout_table(rollouts, advantages))
    for purpose, path in report.files.items():
        out.print(f"{purpose}: {path}", style="dim", markup=False)

    out.rule("the same loss on six layouts of real ranks")
    report.exact = _verified(batch, "auto", report, notes)
    report.exact.print(out)
    out.rule("the usual way: fp32, a log-sum-exp per shard, float all-reduces")
    report.naive = _verified(batch, "naive", report, notes)
    report.naive.print(out)
    if not report.naive.ok:
        out.print("These differences are what the exact sums above do away with.", style="dim")

    if options.steps:
        _train(policy, rollouts, options, report, out, notes)
    total = sum(report.seconds.values())
    stages = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in report.seconds.items())
    out.print(f"{total:.0f} s: {stages}", style="dim")
    return report


def _sample(policy: Policy, options: DemoOptions) -> Rollouts:
    return sample_rollouts(
        policy,
        QUESTIONS,
        samples_per_question=options.samples,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )


def _recorded_batch(
    policy: Policy, rollouts: Rollouts, options: DemoOptions, report: DemoReport
) -> LossBatch:
    """The rollouts with the model's logits, saved for `rl-engine verify`."""
    with report.timed("logits"), torch.no_grad():
        batch = rollouts.loss_batch(rollouts.logits(policy))
        texts, tensors, whole = (
            options.out / name for name in ("rollouts.jsonl", "rollouts.safetensors", "batch.safetensors")
        )
        rollouts.save_jsonl(texts)
        rollouts.save(tensors)
        batch.save(whole)
    report.files = {
        "texts and rewards": str(texts),
        "tokens, masks, log-probs": str(tensors),
        "with logits, for rl-engine verify": str(whole),
    }
    return batch


def _mixed_advantages(batch: LossBatch) -> Tensor:
    """[B] advantages.

    Raises:
        DeterminismError: All of them are 0.
    """
    with torch.no_grad():
        result = grpo_loss(
            batch.logits,
            batch.targets,
            batch.old_logps,
            batch.rewards,
            mask=batch.mask,
            group_boundaries=batch.group_boundaries,
        )
    assert result.advantages is not None
    if not bool((result.advantages != 0).any()):
        raise DeterminismError(
            "every advantage is 0: each question's completions earned one reward, expected a mixed group; "
            "type another --seed or more --samples"
        )
    return result.advantages


def _verified(batch: LossBatch, backend: str, report: DemoReport, notes: Console) -> VerifyReport:
    with report.timed(f"layouts, {backend}"), progress_bar(notes) as progress:
        return run_verify(
            batch,
            layout_matrix(TP_DEGREES, DP_DEGREES),
            backend=backend,
            cases=(_CASE,),
            progress=progress,
        )


def _train(
    policy: Policy,
    rollouts: Rollouts,
    options: DemoOptions,
    report: DemoReport,
    out: Console,
    notes: Console,
) -> None:
    out.rule(f"{options.steps} GRPO steps with AdamW, fresh samples each")
    with report.timed("train"):
        steps = train(
            policy,
            QUESTIONS,
            first=rollouts,
            num_steps=options.steps,
            samples_per_question=options.samples,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
        for _ in range(options.steps + 1):
            with notes.status("forward, backward, AdamW, sampling"):
                step = next(steps)
            report.steps.append(step)
            step_line(step, out)
    first, last = report.steps[0].mean_reward, report.steps[-1].mean_reward
    out.print(f"mean reward {first:.3f} → {last:.3f}", style="bold")
