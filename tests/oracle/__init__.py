"""A second, slow implementation of docs/numerics.md in Python integers, `fractions` and IEEE Python floats.

Nothing in here imports torch, numpy or rl_engine. It was written from the page, not from the package, so that
the two can disagree. Functions take Python floats (already rounded to the dtype they stand for) or integers.
"""
