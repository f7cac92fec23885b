"""Tables of the demo: rollouts and training steps."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from torch import Tensor

from rl_engine.cli.demo.rollouts import Rollouts
from rl_engine.cli.demo.training import Step

__all__ = ["rollout_table", "step_line", "step_record"]

_SHOWN = 60  # characters of a completion that a row shows


def rollout_table(rollouts: Rollouts, advantages: Tensor) -> Table:
    """Return a table of every completion with its reward and advantage.

    Args:
        rollouts: B graded completions.
        advantages: [B] fp32.
    """
    table = Table(title="rollouts", title_justify="left")
    table.add_column("prompt", no_wrap=True)
    table.add_column("completion")
    for column in ("tokens", "reward", "advantage"):
        table.add_column(column, justify="right")
    last: object = None
    for record, advantage in zip(rollouts.records(), advantages, strict=True):
        if last is not None and record["group"] != last:
            table.add_section()
        prompt = "" if record["group"] == last else str(record["prompt"])
        last = record["group"]
        value = float(advantage)
        colour = "green" if value > 0 else "red" if value < 0 else "dim"
        table.add_row(
            prompt,
            _shortened(str(record["completion"])),
            str(record["tokens"]),
            f"{record['reward']:.3f}",
            f"[{colour}]{value:+.3f}[/{colour}]",
        )
    return table


def _shortened(text: str) -> str:
    line = " ".join(text.split()).replace("[", r"\[")
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"


def step_line(step: Step, out: Console) -> None:
    """Print one training step."""
    bar = "█" * round(20 * step.mean_reward)
    if math.isnan(step.loss):
        out.print(f"  after     mean reward {step.mean_reward:.3f} [green]{bar}[/green]")
    else:
        out.print(
            f"  step {step.index + 1}    mean reward {step.mean_reward:.3f} [green]{bar:<20}[/green] "
            f"loss {step.loss:+.4f}   |gradient| {step.grad_norm:.2f}   {step.num_tokens} tokens"
        )


def step_record(step: Step) -> dict[str, float | int | None]:
    """Return a step as JSON types; the line after the last update has no loss."""
    finished = math.isnan(step.loss)
    return {
        "index": step.index,
        "mean_reward": step.mean_reward,
        "loss": None if finished else step.loss,
        "grad_norm": None if finished else step.grad_norm,
        "num_tokens": step.num_tokens,
    }
