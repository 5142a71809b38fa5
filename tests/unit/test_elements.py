"""Bytes as numbers: every type that a checkpoint may hold."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ckptfs.formats.base import BITS
from ckptfs.insight.elements import element_bytes, values

PATTERNS = bytes(range(256))


def decoded(data: bytes, dtype: str) -> list[float]:
    found = values(data, dtype)
    assert found is not None and found.dtype == np.float64
    return list(found)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float8_e4m3fn", {0x00: 0, 0x01: 2**-9, 0x08: 2**-6, 0x38: 1, 0xB8: -1, 0x7E: 448, 0x7F: None, 0xFF: None}),
        ("float8_e5m2", {0x01: 2**-16, 0x3C: 1, 0x7B: 57344, 0x7C: np.inf, 0xFC: -np.inf, 0x7D: None}),
        ("float8_e4m3fnuz", {0x01: 2**-10, 0x40: 1, 0x7F: 240, 0x80: None, 0xFF: -240}),
        ("float8_e5m2fnuz", {0x01: 2**-17, 0x40: 1, 0x7F: 57344, 0x80: None}),
        ("float8_e8m0fnu", {0: 2.0**-127, 127: 1, 254: 2.0**127, 255: None}),
    ],
)
def test_eight_bits(dtype: str, expected: dict[int, float | None]) -> None:
    """One, the smallest and the largest value, infinities and what is no number, as the standards have them."""
    found = decoded(PATTERNS, dtype)
    for pattern, value in expected.items():
        assert found[pattern] == value if value is not None else np.isnan(found[pattern]), hex(pattern)


def test_every_pattern_is_what_the_reference_says() -> None:
    """All values of all small floats, against ml_dtypes, where it is installed."""
    reference = pytest.importorskip("ml_dtypes")
    for dtype in (each for each in BITS if each.startswith("float8")):
        expected = np.frombuffer(PATTERNS, getattr(reference, dtype)).astype(np.float64)
        np.testing.assert_array_equal(values(PATTERNS, dtype), expected, dtype)
    halves = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        expected = halves.view(reference.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(values(halves.tobytes(), "bfloat16"), expected)


def test_wider_types() -> None:
    """What numpy knows is as numpy says; bfloat16 is half a float32, also where numpy saved it without a name."""
    for dtype in ("float16", "float32", "float64", "int8", "uint8", "int16", "uint32", "int64", "bool"):
        array = np.array([0, 1, 1, 100], dtype)
        assert decoded(array.tobytes(), dtype) == array.astype(np.float64).tolist()
    for dtype in ("bfloat16", "void16"):
        assert decoded(struct.pack("<f", 1.5)[2:] + struct.pack("<f", -2.0)[2:], dtype) == [1.5, -2.0]
    assert decoded(np.array([1 + 2j], np.complex64).tobytes(), "complex64") == [1, 2]
    assert decoded(np.array([1, 2], np.float16).tobytes(), "complex32") == [1, 2]
    assert decoded(b"\x21\xf4", "float4_e2m1fn_x2") == [0.5, 1, 2, -6]


def test_what_nobody_says_is_no_number() -> None:
    """Types without a name, and those whose elements share bytes in no agreed way."""
    for dtype in ("unknown", "void8", "float6_e2m3fn", "float6_e3m2fn"):
        assert values(b"", dtype) is None
        assert element_bytes(dtype) == 1
    assert all(values(b"", dtype) is not None for dtype in BITS if not dtype.startswith(("void8", "float6_")))
    assert [element_bytes(each) for each in ("bool", "bfloat16", "float32", "complex128")] == [1, 2, 4, 16]
