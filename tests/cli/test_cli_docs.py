"""The page of the command line names every command and option that there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main

from rl_engine.cli.app import app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
GROUP = typer.main.get_command(app)
COMMANDS = GROUP.commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_section_of_a_command_names_its_options(name: str) -> None:
    assert f"\n## {name}\n" in PAGE
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    common = PAGE.split("\n## ")[0]
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "argument":
            assert f"`{parameter.name.upper()}`" in section
            continue
        option = parameter.opts[0]
        assert f"`{option}`" in section + common, f"{name} {option} is not on the page"
