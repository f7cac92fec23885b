"""One batch on many layouts of real ranks, compared bit for bit."""

from rl_engine.verify.batch import LossBatch as LossBatch
from rl_engine.verify.compare import TensorComparison as TensorComparison
from rl_engine.verify.layouts import Layout as Layout
from rl_engine.verify.layouts import layout_matrix as layout_matrix
from rl_engine.verify.layouts import parse_degrees as parse_degrees
from rl_engine.verify.ranks import Case as Case
from rl_engine.verify.report import LayoutReport as LayoutReport
from rl_engine.verify.report import VerifyReport as VerifyReport
from rl_engine.verify.runner import default_cases as default_cases
from rl_engine.verify.runner import verify as verify

__all__ = [
    "Case",
    "Layout",
    "LayoutReport",
    "LossBatch",
    "TensorComparison",
    "VerifyReport",
    "default_cases",
    "layout_matrix",
    "parse_degrees",
    "verify",
]
