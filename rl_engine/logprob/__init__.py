"""The vocab-parallel selected-token logprob: the op with its autograd, and one file per tier."""

from rl_engine.logprob.op import VocabParallelLogprobOp as VocabParallelLogprobOp

__all__ = ["VocabParallelLogprobOp"]
