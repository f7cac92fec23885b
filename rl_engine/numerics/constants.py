"""Constants of docs/numerics.md, each an exact hexadecimal float or an integer."""

from __future__ import annotations

from typing import Final

_hex = float.fromhex

NUMERICS_ID: Final = "exact-words/1"
"""Name of the definition; two ranks with different ids may not share a result."""

LOG2E: Final = _hex("0x1.71547652b82fep+0")
LN2_64: Final = _hex("0x1.62e42fefa39efp-1")
LN2_32: Final = _hex("0x1.62e430p-1")
MAGIC: Final = 12582912.0
"""1.5·2^23: adding it to an fp32 number leaves the nearest integer in the low mantissa bits."""

EXP2_POLY: Final = tuple(
    _hex(v)
    for v in (
        "0x1p+0",
        "0x1.62e43p-1",
        "0x1.ebfbdcp-3",
        "0x1.c6aee8p-5",
        "0x1.3b2d4cp-7",
        "0x1.5f3e54p-10",
        "0x1.41fbbcp-13",
    )
)
"""2^r on [−1/2, 1/2], constant term first."""

# --- words: the sum of exponentials on three grids of WORD_BITS bits below the reference exponent ---
WORD_BITS: Final = 22
NUM_WORDS: Final = 3
EMPTY_EXPONENT: Final = -8388608
"""Reference exponent of a partial that holds nothing; below every legal one."""
OVER_EXPONENT: Final = 4194322
"""Reference exponent of a partial whose maximum lies beyond 2^22; outside the domain."""
MAX_EXPONENT: Final = 2**21
"""A row is in the domain while |e| does not exceed this."""
SPARE_BITS: Final = 2
"""k_max ≤ e − 2: what makes every leading digit zero when e is raised."""
CLAMP_BITS: Final = 100
"""Logits are clamped to about 2^(e−100), where every digit is zero and the exponent arithmetic still
holds."""
DIGIT_MAGIC: Final = (3.0, 3.0 * 2.0**-22, 3.0 * 2.0**-44)
DIGIT_MAGIC_BITS: Final = (0x40400000, 0x35400000, 0x2A400000)
MAX_LANE_ADDS: Final = 1023
"""A digit reaches ±2^21, so an int32 lane holds this many."""

# --- columns of a partial ---
COL_EXPONENT: Final = 0
COL_WORD: Final = 1
COL_FLAGS: Final = 4
COL_TARGET: Final = 5
COL_ENTROPY: Final = 6
PARTIAL_COLUMNS: Final = 6
ENTROPY_COLUMNS: Final = 9
FLAG_NAN: Final = 1
FLAG_POSINF: Final = 1 << 21
FLAG_OWNED: Final = 1 << 42
FLAG_MASK: Final = (1 << 21) - 1

# --- closing ---
SQRT2: Final = _hex("0x1.6a09e667f3bcdp+0")
LOG2_POLY: Final = tuple(
    _hex(v)
    for v in (
        "0x1.71547652b82fep+1",
        "0x1.ec709dc3a03fdp-1",
        "0x1.2776c50ef9bfep-1",
        "0x1.a61762a7aded9p-2",
        "0x1.484b13d7c02a9p-2",
        "0x1.0c9a84994022dp-2",
        "0x1.c68f568d31760p-3",
        "0x1.89f3b1694cffep-3",
        "0x1.5b9ac9b743f0dp-3",
        "0x1.3703c1f4d0ffep-3",
        "0x1.1964ec6fc9491p-3",
    )
)
"""2 / ((2i+1)·ln 2): log2(m) = u·Σ c_i u^(2i), u = (m − 1)/(m + 1)."""
MIN_LOG2_PROB: Final = -126.0
"""Below this log2 probability the gradient takes p = +0: the end of fp32's normal range."""

# --- elementwise exp ---
EXP_L_HI: Final = _hex("0x1.715476p+0")
EXP_L_LO: Final = _hex("0x1.4ae0cp-26")
EXP_MAX: Final = _hex("0x1.62e42ep+6")
EXP_MIN: Final = -_hex("0x1.5d589ep+6")
PHI_POLY: Final = tuple(
    _hex(v)
    for v in (
        "0x1p-1",
        "0x1.555556p-3",
        "0x1.555558p-5",
        "0x1.1110dep-7",
        "0x1.6c14dcp-10",
        "0x1.a02432p-13",
        "0x1.a0de14p-16",
        "0x1.752cfp-19",
        "0x1.11e61ap-22",
    )
)
"""(exp(d) − 1 − d)/d² on [−1, 1], constant term first."""

# --- long accumulator ---
NUM_LIMBS: Final = 10
LIMB_BITS: Final = 32
ACC_NAN: Final = 10
ACC_POSINF: Final = 11
ACC_NEGINF: Final = 12
ACC_COUNT: Final = 13
ACC_COLUMNS: Final = 14
