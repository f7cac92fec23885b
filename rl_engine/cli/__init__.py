"""The command line: `rl-engine info | explain | verify | demo`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line on `sys.argv` and exit: 0 for success, 1 for a negative answer, 2 for an error."""
    try:
        from rl_engine.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f"error: the command line needs {error.name}; type: pip install 'rl-engine[cli]'\n")
        raise SystemExit(2) from None
    app()
