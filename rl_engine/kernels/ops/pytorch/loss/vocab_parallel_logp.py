"""The vocab-parallel logprob op under its earlier import path."""

from rl_engine.logprob import VocabParallelLogprobOp as VocabParallelLogprobOp
