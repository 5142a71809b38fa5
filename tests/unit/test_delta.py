"""Deltas: what they save, that they are exact, and that nothing but their base decodes them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.encoding import codec, delta
from ckptfs.errors import FormatError

DTYPES = (None, "float32", "bfloat16", "float16", "float64", "complex64", "float8_e4m3fn", "int32", "uint8", "bool")


def weights(count: int = 1 << 16) -> tuple[np.ndarray, np.ndarray]:
    """fp32 weights before and after a step that moves each by some 0.1 %."""
    random = np.random.default_rng(1)
    before = (random.standard_normal(count) * 0.02).astype("<f4")
    return before, before * (1 + 1e-3 * random.standard_normal(count)).astype("<f4")


def as_bfloat16(values: np.ndarray) -> bytes:
    return (values.view("<u4") >> 16).astype("<u2").tobytes()


def both(raw: bytes, base: bytes, dtype: str | None) -> tuple[float, float]:
    """Shares without and with a delta, which must come back."""
    number, data = codec.encode_delta(raw, base, dtype)
    assert number in codec.DELTAS
    assert codec.decode(number, data, len(raw), base=base) == raw
    return len(codec.encode(raw, dtype)[1]) / len(raw), len(data) / len(raw)


def test_small_steps_take_few_bytes() -> None:
    """Weights that moved a little, and rows of which few were touched."""
    before, after = weights()
    plain, changed = both(after.tobytes(), before.tobytes(), "float32")
    assert changed < 0.52 < 0.8 < plain
    plain, changed = both(as_bfloat16(after), as_bfloat16(before), "bfloat16")
    assert changed < 0.1 < 0.6 < plain
    rows = before.copy().reshape(-1, 64)
    rows[::40] *= 1.5
    assert both(rows.tobytes(), before.tobytes(), "float32")[1] < 0.04


def test_the_sample_tells_what_the_whole_would() -> None:
    before, after = weights(1 << 18)
    other = np.random.default_rng(9).permutation(before)
    for raw, base in ((after, before), (after, other)):
        promised = codec.delta_shares(raw.tobytes(), base.tobytes(), "float32")
        assert promised == pytest.approx(both(raw.tobytes(), base.tobytes(), "float32"), abs=0.01)


@settings(deadline=None, max_examples=300)
@given(raw=st.binary(max_size=300), base=st.binary(max_size=300), dtype=st.sampled_from(DTYPES))
def test_any_bytes_come_back(raw: bytes, base: bytes, dtype: str | None) -> None:
    """Any length, any pattern (not a number, infinities, denormals), any dtype; and the same again for a repair."""
    base = base[: len(raw)].ljust(len(raw), b"\x7f")
    number, data = codec.encode_delta(raw, base, dtype)
    assert codec.decode(number, data, len(raw), base=base) == raw
    assert codec.encode_as(number, raw, len(data), base) == data
    assert codec.encode_as(number, raw, len(data)) is None


WAYS = [
    (delta.difference_with_numpy, delta.restore_with_numpy),
    (delta.difference, delta.restore),
]


def test_the_c_module_was_built() -> None:
    """Where there is a compiler, which pyfuse3 needs anyway, it is what runs: else all below tests numpy twice."""
    assert delta.difference is not delta.difference_with_numpy
    assert delta.restore is not delta.restore_with_numpy


@given(raw=st.binary(max_size=300), base=st.binary(max_size=300), width=st.sampled_from([1, 2, 4, 8]))
def test_differences_by_c_are_those_by_numpy(raw: bytes, base: bytes, width: int) -> None:
    """Folded: 0, -1, 1, -2 ... become 0, 1, 2, 3 ...; back they are the elements, and nothing else is touched."""
    raw = raw[: len(raw) // width * width]
    base = base[: len(raw)].ljust(len(raw), b"\x7f")
    bits = 8 * width
    elements = [
        int.from_bytes(raw[at : at + width], "little") - int.from_bytes(base[at : at + width], "little")
        for at in range(0, len(raw), width)
    ]
    signed = [(each + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) for each in elements]
    folded = b"".join((2 * each if each >= 0 else -2 * each - 1).to_bytes(width, "little") for each in signed)
    for difference, restore in WAYS:
        out = bytearray(b"\xaa" * (len(raw) + 3))
        difference(raw, base, memoryview(out)[: len(raw)], width)
        assert out == folded + b"\xaa" * 3
        restore(memoryview(out)[: len(raw)], base, width)
        assert out == raw + b"\xaa" * 3


def test_no_difference_is_written_beyond_a_buffer() -> None:
    out = bytearray(16)
    for call in (
        lambda: delta.difference(bytes(16), bytes(15), memoryview(out), 4),
        lambda: delta.difference(bytes(17), bytes(17), memoryview(out), 4),
        lambda: delta.difference(bytes(16), bytes(16), memoryview(out), 3),
        lambda: delta.restore(memoryview(out), bytes(15), 4),
        lambda: delta.restore(memoryview(out), bytes(16), 0),
    ):
        with pytest.raises(ValueError):
            call()
    assert out == bytes(16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["<u1", "<u2", "<u4", "<u8"])
def test_extremes_come_back(dtype: str | None, pattern: str) -> None:
    """The widest differences wrap."""
    most = np.iinfo(pattern).max
    ends = np.array([0, 1, most, most - 1, most // 2, most // 2 + 1], pattern)
    raw, base = np.repeat(ends, 6).tobytes(), np.tile(ends, 6).tobytes()
    both(raw, base, dtype)


def test_only_the_base_decodes_a_delta() -> None:
    """None, or one of another length, is refused; another base of that length gives other bytes."""
    raw, base = bytes(range(200)), bytes(200)
    for dtype in ("float32", None):
        number, data = codec.encode_delta(raw, base, dtype)
        for wrong in (None, base[:-1], base + b"x", b""):
            with pytest.raises(FormatError, match="base"):
                codec.decode(number, data, len(raw), base=wrong)
        assert codec.decode(number, data, len(raw), base=b"\1" * 200) != raw
    with pytest.raises(ValueError, match="against"):
        codec.encode_delta(raw, base[:-1], None)


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.integers(0, 10_000), dtype=st.sampled_from(DTYPES))
def test_damage_is_refused_or_decodes_to_the_length(at: int, bit: int, cut: int, dtype: str | None) -> None:
    """Nothing but FormatError, and never more memory than the chunk's."""
    before, after = weights(200)
    number, data = codec.encode_delta(after.tobytes(), before.tobytes(), dtype)
    damaged = bytearray(data)
    damaged[at % len(data)] ^= 1 << bit
    for each in (bytes(damaged), data[: cut % len(data)], data + b"\0"):
        try:
            found = codec.decode(number, each, 800, base=before.tobytes())
        except FormatError:
            continue
        assert len(found) == 800
