"""The codec, for arbitrary bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.encoding import codec
from ckptfs.errors import FormatError

DTYPES = st.sampled_from([None, "float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int64", "bool", "x"])


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    """Bytes of the kinds that chunks have: short and odd, repeated, floats, floats with something foreign in them."""
    odd = draw(st.binary(max_size=200))
    kind = draw(st.sampled_from(["short", "repeated", "floats", "mixed"]))
    if kind == "short":
        return odd
    if kind == "repeated":
        return odd * draw(st.integers(1, 300))
    values = np.random.default_rng(draw(st.integers(0, 9))).standard_normal(draw(st.integers(1, 3000)))
    raw = (values * draw(st.sampled_from([1e-30, 0.02, 1e3]))).astype(draw(st.sampled_from(["f2", "f4", "f8"])))
    return raw.tobytes() + (odd if kind == "mixed" else b"")


@settings(max_examples=100, deadline=None)
@given(chunks(), DTYPES)
def test_round_trip(raw: bytes, dtype: str | None) -> None:
    """What is encoded must decode to the same bytes, never be longer, and be the same when encoded again."""
    number, data = codec.encode(raw, dtype)
    assert number in codec.CODECS
    assert len(data) <= len(raw)
    assert codec.decode(number, data, len(raw)) == raw
    assert codec.encode(raw, dtype) == (number, data)


@settings(max_examples=120, deadline=None)
@given(chunks(), DTYPES, st.data())
def test_corruption(raw: bytes, dtype: str | None, data: st.DataObject) -> None:
    """Damaged bytes must give FormatError or some bytes of the right length (which the digest then refuses)."""
    number, encoded = codec.encode(raw, dtype)
    broken = bytearray(encoded)
    for _ in range(data.draw(st.integers(1, 4))):
        if broken:
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    number = data.draw(st.sampled_from([number, number, *codec.CODECS]))
    length = data.draw(st.sampled_from([len(raw), len(raw), len(raw) + 1, 0]))
    try:
        result = codec.decode(number, broken, length)
    except FormatError:
        return
    assert len(result) == length


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(codec.CODECS)), st.binary(max_size=300), st.integers(-1, 2000))
def test_arbitrary_bytes(number: int, encoded: bytes, length: int) -> None:
    """Bytes that were never encoded must give FormatError or bytes of the length asked for."""
    try:
        result = codec.decode(number, encoded, length)
    except FormatError:
        return
    assert len(result) == length
