"""LLVM operations that numba lacks: a fused multiply-add, narrow integers, conversions by bit pattern.

numba widens small integers and never fuses; these keep int16 and int32 narrow, give the one fused operation,
and convert between bit patterns of bf16 (int16), fp16 (uint16), fp32 (int32) and fp32 values.
"""
# pyright: basic, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = [
    "add",
    "bits_float",
    "exponent_shift",
    "float_bits",
    "fma",
    "load",
    "max_int",
    "min_int",
    "order_key",
    "round_to",
    "to_int",
]

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


@intrinsic
def fma(typingctx, a, b, c):
    """fl32(a·b + c), rounded once."""
    sig = types.float32(types.float32, types.float32, types.float32)
    return sig, lambda context, builder, signature, args: builder.fma(*args)


@intrinsic
def float_bits(typingctx, a):
    """The bit pattern of fp32, as int32."""
    sig = types.int32(types.float32)
    return sig, lambda context, builder, signature, args: builder.bitcast(args[0], _I32)


@intrinsic
def bits_float(typingctx, a):
    """The fp32 of a bit pattern."""
    sig = types.float32(types.int32)
    return sig, lambda context, builder, signature, args: builder.bitcast(args[0], _F32)


@intrinsic
def add(typingctx, a, b):
    """int32 addition that wraps and stays int32."""
    sig = types.int32(types.int32, types.int32)
    return sig, lambda context, builder, signature, args: builder.add(args[0], args[1])


@intrinsic
def exponent_shift(typingctx, a):
    """int32 shift into the exponent field."""
    sig = types.int32(types.int32)
    return sig, lambda context, builder, signature, args: builder.shl(args[0], ir.Constant(_I32, 23))


@intrinsic
def to_int(typingctx, a):
    """fp32 that holds a small integer, as int32."""
    sig = types.int32(types.float32)
    return sig, lambda context, builder, signature, args: builder.fptosi(args[0], _I32)


@intrinsic
def order_key(typingctx, u):
    """Bit pattern to an integer that orders like the float; NaN lies beyond the infinities on either side."""
    narrow = types.int32 if u.bitwidth == 32 else types.int16

    def codegen(context, builder, signature, args):
        width = args[0].type.width
        sign = builder.ashr(args[0], ir.Constant(args[0].type, width - 1))
        return builder.xor(args[0], builder.and_(sign, ir.Constant(args[0].type, (1 << (width - 1)) - 1)))

    return narrow(u), codegen


@intrinsic
def max_int(typingctx, a, b):
    """The larger of two integers of one type."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.icmp_signed(">", args[0], args[1]), args[0], args[1])

    return a(a, a), codegen


@intrinsic
def min_int(typingctx, a, b):
    """The smaller of two integers of one type."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.icmp_signed("<", args[0], args[1]), args[0], args[1])

    return a(a, a), codegen


def _half_to_float(builder: ir.IRBuilder, u: ir.Value) -> ir.Value:
    """fp16 bits to fp32: magnitude bits moved into place and scaled by 2^112; exponent 31 by selection."""
    wide = builder.zext(u, _I32)
    magnitude = builder.shl(builder.and_(wide, ir.Constant(_I32, 0x7FFF)), ir.Constant(_I32, 13))
    scaled = builder.fmul(builder.bitcast(magnitude, _F32), ir.Constant(_F32, 2.0**112))
    special = builder.or_(magnitude, ir.Constant(_I32, 0x7F800000))
    is_special = builder.icmp_unsigned(">=", magnitude, ir.Constant(_I32, 0x0F800000))
    bits = builder.select(is_special, special, builder.bitcast(scaled, _I32))
    sign = builder.shl(builder.and_(wide, ir.Constant(_I32, 0x8000)), ir.Constant(_I32, 16))
    return builder.bitcast(builder.or_(bits, sign), _F32)


@intrinsic
def load(typingctx, u):
    """Bit pattern of a logit to fp32: int16 = bf16, uint16 = fp16, int32 = fp32."""

    def codegen(context, builder, signature, args):
        if u == types.int32:
            return builder.bitcast(args[0], _F32)
        if u == types.int16:
            return builder.bitcast(builder.shl(builder.sext(args[0], _I32), ir.Constant(_I32, 16)), _F32)
        return _half_to_float(builder, args[0])

    return types.float32(u), codegen


def _float_to_bfloat(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Nearest bf16, ties to even; bits of no NaN."""
    odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
    rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
    return builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)


def _float_to_half(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Nearest fp16, ties to even; bits of no NaN."""
    magnitude = builder.and_(bits, ir.Constant(_I32, 0x7FFFFFFF))
    sign = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 0x8000))
    # Normal results: drop 13 bits, round to nearest even, and move the exponent bias from 127 to 15.
    odd = builder.and_(builder.lshr(magnitude, ir.Constant(_I32, 13)), ir.Constant(_I32, 1))
    biased = builder.add(magnitude, builder.add(odd, ir.Constant(_I32, 0xFFF - (112 << 23))))
    normal = builder.lshr(biased, ir.Constant(_I32, 13))
    # Subnormal results: adding 1/2 leaves multiples of 2^-24 in the low bits, rounded by the addition itself.
    shifted = builder.fadd(builder.bitcast(magnitude, _F32), ir.Constant(_F32, 0.5))
    subnormal = builder.sub(builder.bitcast(shifted, _I32), ir.Constant(_I32, 0x3F000000))
    small = builder.icmp_unsigned("<", magnitude, ir.Constant(_I32, 0x38800000))  # 2^-14
    large = builder.icmp_unsigned(">=", magnitude, ir.Constant(_I32, 0x477FF000))  # 65520 rounds to infinity
    value = builder.select(small, subnormal, normal)
    value = builder.select(large, ir.Constant(_I32, 0x7C00), value)
    return builder.trunc(builder.or_(value, sign), _I16)


@intrinsic
def round_to(typingctx, value, like):
    """fp32 (not NaN) rounded once to the dtype that `like`'s bit pattern stands for, as a bit pattern."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[0], _I32)
        if like == types.int32:
            return bits
        return _float_to_bfloat(builder, bits) if like == types.int16 else _float_to_half(builder, bits)

    return like(types.float32, like), codegen
