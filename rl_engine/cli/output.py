"""How commands speak: tables or JSON on stdout, one line on stderr for an error."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Annotated, ParamSpec

import typer
from rich.console import Console

from rl_engine.errors import RLEngineError

__all__ = ["Debug", "Json", "console", "emit_json", "guarded"]

P = ParamSpec("P")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_PIPED_WIDTH = 120  # without a terminal there is no width to ask for, and 80 cuts the tables


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console for stdout, or for progress and notes on stderr; a quiet one prints nothing."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPED_WIDTH
    return Console(stderr=stderr, quiet=quiet, width=width, highlight=False)


def emit_json(data: object) -> None:
    """Print data as one JSON object."""
    typer.echo(json.dumps(data, ensure_ascii=False, indent=2))


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn errors of a command into one line on stderr with exit code 2, unless called with `debug`."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (RLEngineError, OSError) as error:
            if kwargs.get("debug"):
                raise
            line = "; ".join(part.strip() for part in str(error).splitlines() if part.strip())
            typer.echo(f"error: {line}", err=True)
            raise typer.Exit(2) from None

    return run
