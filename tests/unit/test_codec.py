"""The codec: choices, exact format, and refusals."""

from __future__ import annotations

import re
import struct
import threading

import numpy as np
import pytest
import zstandard

from ckptfs.encoding import codec
from ckptfs.errors import FormatError


def floats(count: int, seed: int = 1) -> bytes:
    return (np.random.default_rng(seed).standard_normal(count) * 0.02).astype("<f4").tobytes()


def bfloats(count: int) -> bytes:
    return (np.frombuffer(floats(count), "<u4") >> 16).astype("<u2").tobytes()


def share(raw: bytes, dtype: str | None) -> float:
    number, data = codec.encode(raw, dtype)
    assert codec.decode(number, data, len(raw)) == raw
    return len(data) / len(raw)


def test_floats_shrink_as_measured() -> None:
    """Weights of every float type must come near the shares that were measured, also where the type is not told."""
    raw = floats(1 << 16)
    for dtype in ("float32", None):
        assert codec.encode(raw, dtype)[0] == codec.PLANES4
        assert share(raw, dtype) < 0.845
    for dtype in ("bfloat16", "void16", None):
        assert codec.encode(bfloats(1 << 16), dtype)[0] == codec.PLANES2
        assert share(bfloats(1 << 16), dtype) < 0.68
    doubles = np.random.default_rng(2).standard_normal(1 << 14).astype("<f8").tobytes()
    assert codec.encode(doubles, "float64")[0] == codec.PLANES8
    assert share(doubles, "float64") < 0.89
    assert share(doubles, None) < 0.89
    halves = np.frombuffer(raw, "<f4").astype("<f2").tobytes()
    assert share(halves, "float16") < 0.86


def test_guess_does_not_need_alignment() -> None:
    """Floats that start anywhere in a chunk of unknown type must be found, since content-defined cuts fall anywhere."""
    for shift in range(4):
        assert share(floats(1 << 14)[shift : 60001 + shift], None) < 0.85


def test_text_integers_and_rows_use_plain_zstd() -> None:
    """Repetition must go to plain zstd, also inside a float tensor."""
    text = b"".join(b"step %d loss %d\n" % (step, step * step) for step in range(5000))
    assert codec.encode(text, None)[0] == codec.ZSTD
    assert codec.encode(np.arange(5000, dtype="<i8").tobytes(), "int64")[0] == codec.ZSTD
    rows = floats(64) * 512
    assert codec.encode(rows, "float32")[0] == codec.ZSTD
    assert share(rows, "float32") < 0.02


def test_noise_stays_raw() -> None:
    """What does not shrink must be kept as it is, whatever its type is said to be."""
    noise = np.random.default_rng(3).bytes(100_003)
    for dtype in (None, "float32", "bfloat16", "float64", "float8_e5m2", "int32", "bool", "no such type"):
        assert codec.encode(noise, dtype) == (codec.RAW, noise)


@pytest.mark.parametrize("dtype", [None, "float8", "float16", "float32", "float64", "uint8"])
def test_every_small_length(dtype: str | None) -> None:
    """Every length, also 0 and those that are no multiple of the element, must come back."""
    raw = floats(40)
    for length in range(130):
        for data in (raw[:length], bytes(length)):
            number, encoded = codec.encode(data, dtype)
            assert codec.decode(number, encoded, length) == data
            assert len(encoded) <= length


def test_not_a_number_survives() -> None:
    """NaNs with payloads, infinities, subnormals and negative zeros must keep their bits."""
    bits = np.array([0x7FC00001, 0xFFFFFFFF, 0x7F800000, 0x00000001, 0x80000000, 0x7F800001], "<u4")
    raw = np.tile(bits, 3000).tobytes()
    assert share(raw, "float32") < 0.1
    assert share(floats(8192) + raw[:5000], "float32") < 1


def test_any_buffer() -> None:
    """bytes, bytearray and memoryview slices at odd offsets must encode alike, and must not be changed."""
    raw = floats(10_000)
    held = bytearray(b"x" + raw)
    expected = codec.encode(raw, "float32")
    assert codec.encode(bytearray(raw), "float32") == expected
    assert codec.encode(memoryview(held)[1:], "float32") == expected
    assert held == b"x" + raw
    number, data = expected
    assert codec.decode(number, memoryview(b"y" + data)[1:], len(raw)) == raw


def test_deterministic_after_other_work_and_in_threads() -> None:
    """Equal arguments must give equal bytes, whatever the thread encoded before."""
    raw = floats(1 << 15)
    first = codec.encode(raw, "float32"), codec.encode(raw, None), codec.encode(raw, "int8")
    for size in (1, 100, 70_000, 3_000_000):
        codec.encode(np.random.default_rng(size).bytes(size), "float16")
        codec.encode(bytes(size), None)
    results: list[object] = []

    def work() -> None:
        for dtype in ("float32", None, "int8"):
            results.append(codec.encode(raw, dtype))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    again = codec.encode(raw, "float32"), codec.encode(raw, None), codec.encode(raw, "int8")
    assert again == first
    assert len(results) == 9
    assert set(results) == set(first)


def test_docstring_decodes() -> None:
    """The ten lines of the module's docstring must be all that a stranger needs."""
    assert codec.__doc__ is not None
    program = codec.__doc__.split("with numpy and zstandard:\n\n")[1].split("\n\n**Deltas.**")[0]
    program = re.sub(r"^    ", "", program, flags=re.MULTILINE)
    doubles = np.random.default_rng(2).standard_normal(5000).astype("<f8").tobytes()
    for raw, dtype, k in (
        (floats(5000) + b"abc", "float32", 4),
        (bfloats(5000) + b"!", "bfloat16", 2),
        (doubles + b"12345", "float64", 8),
    ):
        number, data = codec.encode(raw, dtype)
        assert number == {2: codec.PLANES2, 4: codec.PLANES4, 8: codec.PLANES8}[k]
        scope = {"numpy": np, "zstandard": zstandard, "L": len(raw), "k": k, "data": data}
        exec(program, scope)
        assert scope["chunk"] == raw


def test_wrong_lengths_are_refused() -> None:
    """A raw length that is not the chunk's must be an error, for every codec."""
    for raw, dtype in ((floats(5000), "float32"), (bytes(5000), None), (np.random.default_rng(1).bytes(99), None)):
        number, data = codec.encode(raw, dtype)
        for length in (0, 1, len(raw) - 1, len(raw) + 1, len(raw) * 2, -1, 1 << 40):
            with pytest.raises(FormatError):
                codec.decode(number, data, length)


def test_truncated_and_extended_are_refused() -> None:
    """Encoded bytes that were cut off or continued must be an error."""
    for raw, dtype in ((floats(3000), "float32"), (bytes(5000), None)):
        number, data = codec.encode(raw, dtype)
        for broken in (b"", data[:1], data[:-1], data[: len(data) // 2], data + b"\0", data + data):
            with pytest.raises(FormatError):
                codec.decode(number, broken, len(raw))


def test_unknown_codec_is_refused() -> None:
    """A codec of a later version must be named in the error."""
    with pytest.raises(FormatError, match="unknown codec 77"):
        codec.decode(77, b"abc", 3)
    assert sorted(codec.CODECS) == list(range(10))


def test_frames_that_promise_too_much_are_refused() -> None:
    """A frame must not make us allocate what it claims: bombs, unknown sizes, huge windows, skippable frames."""
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(200 << 20))
    untold = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    skippable = struct.pack("<II", 0x184D2A50, 1000) + bytes(1000)
    window = b"\x28\xb5\x2f\xfd" + bytes([0b01000000, 0xF8]) + struct.pack("<H", 1000 - 256) + b"\x01\x00\x00"
    for frame in (bomb, untold, skippable, window, b"not zstd at all"):
        with pytest.raises(FormatError):
            codec.decode(codec.ZSTD, frame, 1000)
        planes = struct.pack("<II", len(frame), 1000) + frame + bytes(1000)
        with pytest.raises(FormatError):
            codec.decode(codec.PLANES2, planes, 2000)


def test_planes_that_do_not_add_up_are_refused() -> None:
    """Lengths of planes beyond the data, or beyond a plane, must be an error."""
    for lengths in ((4, 5), (5, 4), (0, 0), (0xFFFFFFFF, 4), (4, 3)):
        with pytest.raises(FormatError):
            codec.decode(codec.PLANES2, struct.pack("<II", *lengths) + bytes(8), 8)
    assert codec.decode(codec.PLANES2, struct.pack("<II", 4, 4) + b"acegbdfh", 8) == b"abcdefgh"
    assert codec.decode(codec.PLANES2, struct.pack("<II", 1, 1) + b"abc", 3) == b"abc"


def test_too_long_a_chunk_is_refused() -> None:
    """A chunk past the limit is a mistake of the caller, found before any work."""
    with pytest.raises(ValueError, match="are the most"):
        codec.encode(memoryview(bytearray(codec.MAX_RAW_BYTES + 1)), None)
