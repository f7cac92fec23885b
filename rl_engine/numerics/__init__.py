"""How numbers are rounded: docs/numerics.md in code, once."""

from rl_engine.numerics.constants import NUMERICS_ID as NUMERICS_ID

__all__ = ["NUMERICS_ID"]
