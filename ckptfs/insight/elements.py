"""Tensors' bytes as numbers, whatever their type: float64 is wide enough to compare any of them. Pure.

The 8-bit and 4-bit floats are those of the Open Compute Project's "OCP Microscaling Formats (MX) Specification" and
"OFP8"; the `fnuz` kinds are of https://arxiv.org/abs/2206.02915. bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from ckptfs.formats.base import BITS

Buffer = bytes | memoryview
Floats = NDArray[np.float64]

_BFLOAT16 = frozenset({"bfloat16", "void16"})
_EIGHT_BITS = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}
"""Bits of exponent and mantissa, bias, and which patterns are no finite numbers."""
_COMPLEX = {"complex32": np.float16, "complex64": np.float32, "complex128": np.float64}
_HALF_BYTES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def element_bytes(dtype: str) -> int:
    """Bytes that are equal or not as a whole; 1 for types without a name, and for those that share bytes."""
    return max(BITS.get(dtype, 8) // 8, 1)


def values(data: Buffer, dtype: str) -> Floats | None:
    """The numbers in *data*, complex ones as two each; None where nobody says what the bytes mean."""
    with np.errstate(invalid="ignore"):  # NaNs of the signalling kind
        return _values(data, dtype)


def _values(data: Buffer, dtype: str) -> Floats | None:
    if dtype in _BFLOAT16:
        wide = np.frombuffer(data, "<u2").astype(np.uint32)
        return (wide << 16).view(np.float32).astype(np.float64)
    if dtype in _EIGHT_BITS:
        return _table(dtype)[np.frombuffer(data, np.uint8)]
    if dtype == "float8_e8m0fnu":
        bits = np.frombuffer(data, np.uint8)
        return np.where(bits == 255, np.nan, np.exp2(bits.astype(np.float64) - 127))
    if dtype == "float4_e2m1fn_x2":
        pairs = np.frombuffer(data, np.uint8)
        return _HALF_BYTES[np.stack([pairs & 15, pairs >> 4], axis=1)].reshape(-1)
    if dtype in _COMPLEX:
        return np.frombuffer(data, _COMPLEX[dtype]).astype(np.float64)
    if dtype in BITS and not dtype.startswith(("void", "float6_")):
        return np.frombuffer(data, dtype).astype(np.float64)
    return None


@cache
def _table(dtype: str) -> Floats:
    """The value of each pattern of 8 bits."""
    exponent_bits, mantissa_bits, bias, kind = _EIGHT_BITS[dtype]
    bits = np.arange(256)
    mantissa = bits & (1 << mantissa_bits) - 1
    exponent = bits >> mantissa_bits & (1 << exponent_bits) - 1
    sign = np.where(bits >> 7, -1.0, 1.0)
    normal = np.ldexp(1 + mantissa / (1 << mantissa_bits), exponent - bias)
    subnormal = np.ldexp(mantissa / (1 << mantissa_bits), 1 - bias)
    found = sign * np.where(exponent, normal, subnormal)
    highest = exponent == (1 << exponent_bits) - 1
    if kind == "ieee":
        found[highest] = np.where(mantissa[highest], np.nan, sign[highest] * np.inf)
    elif kind == "fn":
        found[highest & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    else:
        found[bits == 128] = np.nan
    return found
