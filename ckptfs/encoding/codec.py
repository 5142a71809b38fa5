"""A chunk's bytes <-> its encoded bytes. Pure; knows nothing of packs or digests.

The registry of codecs (numbers are stored in packs and manifests, and never reused):

| id | name | the encoded bytes |
|---|---|---|
| 0 | raw | the chunk itself |
| 1 | zstd | one zstd frame (RFC 8878) that tells its content size, which is the chunk's length |
| 2 | planes2 | byte planes of elements of k = 2 bytes |
| 3 | planes4 | the same, k = 4 |
| 4 | planes8 | the same, k = 8 |
| 5 | delta1 | folded differences to a base, elements of k = 1 byte, as byte planes |
| 6 | delta2 | the same, k = 2 |
| 7 | delta4 | the same, k = 4 |
| 8 | delta8 | the same, k = 8 |
| 9 | xor | exclusive or with a base, as one zstd frame like 1 |

**Byte planes.** A chunk of L bytes is n = L // k elements of k bytes, then L % k bytes *rest*. Plane i is the n bytes
that stand at i, k + i, 2k + i ... Encoded: k little-endian uint32, the stored length of each plane, plane 0 first; then
the planes in that order; then the rest. A plane whose stored length is n is stored as it is, any other is one zstd
frame that tells n as its content size. To decode, with numpy and zstandard:

    n = L // k
    out = numpy.empty((n, k), numpy.uint8)
    at = 4 * k
    for i, length in enumerate(numpy.frombuffer(data, "<u4", k)):
        part = data[at:at + length]
        at += int(length)
        out[:, i] = numpy.frombuffer(part if length == n else zstandard.decompress(part), numpy.uint8)
    chunk = out.tobytes() + data[at:]

**Deltas.** The base is another chunk's raw bytes, of the same length. `ckptfs.encoding.delta` says what is folded how;
the L % k bytes that make no whole element are stored as they are.

Why planes: the high byte of a float holds most of its exponent, and few exponents occur; the low bytes are noise. They
were worth 9 points on fp32 and 11 on bf16 over plain zstd, at a higher speed. A chunk of unknown type that zstd hardly
shrinks is tested for such a pattern, because HDF5 and old torch files hold floats too.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable

import numpy as np
import zstandard

from ckptfs.encoding import delta, planes
from ckptfs.errors import FormatError
from ckptfs.scratch import Scratch

Buffer = bytes | bytearray | memoryview

RAW = 0
ZSTD = 1
PLANES2 = 2
PLANES4 = 3
PLANES8 = 4

DELTA1 = 5
DELTA2 = 6
DELTA4 = 7
DELTA8 = 8
XOR = 9

CODECS = {
    RAW: "raw", ZSTD: "zstd", PLANES2: "planes2", PLANES4: "planes4", PLANES8: "planes8",
    DELTA1: "delta1", DELTA2: "delta2", DELTA4: "delta4", DELTA8: "delta8", XOR: "xor",
}  # fmt: skip
"""Every codec that this version reads, by id."""

DELTAS = frozenset({DELTA1, DELTA2, DELTA4, DELTA8, XOR})
"""Those that need a base to decode."""

KEEP = 0.98
"""Encoded bytes are kept only below this share of the raw ones; else decoding would cost more than it saved."""

MAX_RAW_BYTES = 256 << 20
"""No chunk is longer; a manifest that says so is damaged, and must not make us allocate it."""

_ENCODE_MIN_BYTES = 32
"""A zstd frame has at least 9 bytes of its own."""

_ELEMENT_BYTES = {PLANES2: 2, PLANES4: 4, PLANES8: 8}
_PLANES = {width: codec for codec, width in _ELEMENT_BYTES.items()}
_DELTA_BYTES = {DELTA1: 1, DELTA2: 2, DELTA4: 4, DELTA8: 8}
_DELTAS = {width: codec for codec, width in _DELTA_BYTES.items()}
_WIDTHS = {
    "bfloat16": 2, "float16": 2, "void16": 2, "complex32": 2,
    "float32": 4, "complex64": 4,
    "float64": 8, "complex128": 8,
}  # fmt: skip
"""Bytes of the floats whose planes are worth parting. Integers and booleans did better with plain zstd."""

_MAX_WINDOW_BYTES = 8 << 20
"""What a zstd decoder must be able to hold (RFC 8878 section 3.1.1.1.2); no frame of ours needs more."""

_TRY_PLAIN_BELOW = 0.3
"""Below this share planes may hold repeated rows, where plain zstd finds more (Adagrad sums: 0.14, not 0.20)."""
_TRY_XOR_BELOW = 0.1
"""Below this share of a delta so few elements changed that plain zstd over their bits may find more (single elements
of 3.5 %: 0.049, not 0.062), at a low price."""
_GUESS_ABOVE = 0.7
_GUESS_MIN_BYTES = 4096
_GUESS_GAIN = 0.03
"""When to look for floats in bytes of unknown type (0.05 ms): plain zstd left more than the first, and there are enough
bytes to judge; and what the planes must promise, since the estimate is off by 0.01."""

_DELTA_SAMPLE_SHARE, _DELTA_SAMPLE_BYTES, _DELTA_SAMPLES = 16, 64 << 10, 8
"""How much of a chunk tells whether a delta pays, and in how many places: within 0.002 of trying it all."""

_SAMPLE_BYTES = 8192
_GUESSED = (1, 2, 4, 8)
_X_LOG2_X = np.arange(_SAMPLE_BYTES + 1) * np.log2(np.maximum(np.arange(_SAMPLE_BYTES + 1), 1))
"""x log2 x for every count that a histogram of the sample can hold: logarithms were most of the guess's time."""


class _Tools(threading.local):
    """What each thread reuses: zstd contexts (not safe to share) and the buffer for planes."""

    def __init__(self) -> None:
        self.plain = _compressor(zstandard.ZstdCompressionParameters.from_level(1, write_dict_id=False))
        # A hash table of 64 entries makes zstd nearly a pure Huffman coder: 0.337 of MiniLM's top plane against 0.389
        # at level 1, three times as fast. The decoder sees ordinary zstd.
        self.entropy = _compressor(
            zstandard.ZstdCompressionParameters.from_level(
                1,
                strategy=zstandard.STRATEGY_FAST,
                hash_log=6,
                min_match=7,
                window_log=17,
                target_length=0,
                write_dict_id=False,
            )
        )
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self.scratch = Scratch()
        self.folded = Scratch()


def _compressor(parameters: zstandard.ZstdCompressionParameters) -> Callable[[bytes | memoryview], bytes]:
    return zstandard.ZstdCompressor(compression_params=parameters).compress


_tools = _Tools()


def encode(raw: Buffer, dtype: str | None) -> tuple[int, bytes]:
    """The codec chosen for *raw*, and the encoded bytes, never more than *raw*.

    *dtype* is a hint (a numpy or torch name; None when unknown) and decides nothing but size and speed. Equal arguments
    give equal bytes as long as the zstd library is the same. Safe in several threads; *raw* must not change meanwhile.
    """
    view = memoryview(raw).cast("B")
    length = len(view)
    if length > MAX_RAW_BYTES:
        raise ValueError(f"a chunk of {length} bytes; {MAX_RAW_BYTES} are the most")
    if length < _ENCODE_MIN_BYTES:
        return RAW, bytes(view)
    width = _WIDTHS.get(dtype or "")
    if width is not None:
        codec, data = _PLANES[width], _encode_planes(view, width)
        if len(data) < _TRY_PLAIN_BELOW * length:
            codec, data = _smaller(codec, data, ZSTD, _tools.plain(view))
    elif dtype is not None and dtype.startswith(("float", "void8")):
        codec, data = ZSTD, _tools.entropy(view)  # one byte or less: the exponent is in it
        if len(data) < _TRY_PLAIN_BELOW * length:
            codec, data = _smaller(codec, data, ZSTD, _tools.plain(view))
    else:
        codec, data = ZSTD, _tools.plain(view)
        if dtype is None and length >= _GUESS_MIN_BYTES and len(data) > _GUESS_ABOVE * length:
            width = _guess_width(view, len(data) / length)
            if width == 1:
                codec, data = _smaller(codec, data, ZSTD, _tools.entropy(view))
            elif width:
                codec, data = _smaller(codec, data, _PLANES[width], _encode_planes(view, width))
    if len(data) > KEEP * length:
        return RAW, bytes(view)
    return codec, data


def encode_delta(raw: Buffer, base: Buffer, dtype: str | None) -> tuple[int, bytes]:
    """*raw* as a delta against *base*, which has as many bytes: a codec of `DELTAS`, and the encoded bytes.

    Whether that is less than what `encode` makes is the caller's to compare; see `delta_shares`. Raises ValueError when
    the lengths differ.
    """
    view, other = memoryview(raw).cast("B"), memoryview(base).cast("B")
    if len(view) != len(other):
        raise ValueError(f"a delta of {len(view)} bytes against {len(other)}")
    width = _width_of_delta(dtype)
    if width is None:
        return XOR, _encode_xor(view, other)
    codec, data = _DELTAS[width], _encode_difference(view, other, width)
    if len(data) < _TRY_XOR_BELOW * len(view):
        return _smaller(codec, data, XOR, _encode_xor(view, other))
    return codec, data


def delta_shares(raw: Buffer, base: Buffer, dtype: str | None) -> tuple[float, float]:
    """What a sample of *raw* becomes without and with a delta against *base*, as shares of its bytes.

    A sixteenth of the bytes, 64 KiB at least, costs a quarter of what encoding twice would.
    """
    view, other = _sample(memoryview(raw).cast("B")), _sample(memoryview(base).cast("B"))
    length = max(len(view), 1)
    return len(encode(view, dtype)[1]) / length, len(encode_delta(view, other, dtype)[1]) / length


def encode_as(codec: int, raw: Buffer, length: int, base: Buffer | None = None) -> bytes | None:
    """*raw* as *codec*, in exactly *length* bytes; None when this version of zstd makes other lengths of it.

    For a chunk whose place in a pack is given: `encode` chose a codec that is remembered, and one of two ways to
    compress, which is not. *base* is needed for `DELTAS`.
    """
    view = memoryview(raw).cast("B")
    width = _ELEMENT_BYTES.get(codec)
    if codec in DELTAS:
        if base is None or len(base) != len(view):
            return None
        other = memoryview(base).cast("B")
        candidates = [
            _encode_xor(view, other) if codec == XOR else _encode_difference(view, other, _DELTA_BYTES[codec])
        ]
    elif codec == RAW:
        candidates = [bytes(view)]
    elif codec == ZSTD:
        candidates = [_tools.plain(view), _tools.entropy(view)]
    else:
        candidates = [] if width is None else [_encode_planes(view, width)]
    return next((each for each in candidates if len(each) == length), None)


def decode(
    codec: int,
    data: Buffer,
    raw_length: int,
    buffer: Callable[[int], bytearray | memoryview] = bytearray,
    base: Buffer | None = None,
) -> memoryview:
    """The raw bytes; FormatError for anything that `encode` does not make, among them any length but *raw_length*.

    *base* is the raw bytes of the chunk that a delta is against. *buffer* gives the memory for the raw bytes, and is
    asked once. Apart from that, two planes at most are allocated, whatever the data say. Bytes that decode to something
    else of the right length are not noticed here: the caller compares the digest.
    """
    view = memoryview(data).cast("B")
    if not 0 <= raw_length <= MAX_RAW_BYTES:
        raise FormatError(f"a chunk of {raw_length} bytes")
    if codec not in CODECS:
        raise FormatError(f"unknown codec {codec}; a newer version of ckptfs is needed to read this")
    if codec in DELTAS and (base is None or len(base) != raw_length):
        raise FormatError(f"a delta of {raw_length} bytes without a base of that length")
    raw = memoryview(buffer(raw_length))
    if codec == ZSTD:
        raw[:] = _decompress(view, raw_length)
    elif codec in _ELEMENT_BYTES:
        _decode_planes(view, _ELEMENT_BYTES[codec], raw)
    elif codec in DELTAS and base is not None:
        _decode_delta(codec, view, memoryview(base).cast("B"), raw)
    elif len(view) == raw_length:
        raw[:] = view
    else:
        raise FormatError(f"{len(view)} raw bytes where {raw_length} were expected")
    return raw


def _smaller(codec: int, data: bytes, other: int, other_data: bytes) -> tuple[int, bytes]:
    return (other, other_data) if len(other_data) < len(data) else (codec, data)


def _sample(view: memoryview) -> Buffer:
    """Parts of *view* from all over it; all of it where that is hardly more."""
    part = max(len(view) // _DELTA_SAMPLE_SHARE, _DELTA_SAMPLE_BYTES) // _DELTA_SAMPLES // 8 * 8
    step = len(view) // _DELTA_SAMPLES // 8 * 8
    if step < 2 * part:
        return view
    return b"".join(view[at * step : at * step + part] for at in range(_DELTA_SAMPLES))


def _width_of_delta(dtype: str | None) -> int | None:
    """Bytes of the elements whose difference tells more than their bits; None for all but floats."""
    if dtype is not None and dtype.startswith(("float8", "void8")):
        return 1
    return _WIDTHS.get(dtype or "")


def _encode_difference(view: memoryview, base: memoryview, width: int) -> bytes:
    whole = len(view) // width * width
    folded = _tools.folded.buffer(len(view))
    delta.difference(view[:whole], base[:whole], folded[:whole], width)
    folded[whole:] = view[whole:]
    return _encode_planes(folded, width)


def _encode_xor(view: memoryview, base: memoryview) -> bytes:
    folded = _tools.folded.buffer(len(view))
    delta.exclusive_or(view, base, folded)
    return _tools.plain(folded)


def _decode_delta(codec: int, view: memoryview, base: memoryview, raw: memoryview) -> None:
    if codec == XOR:
        raw[:] = _decompress(view, len(raw))
        delta.exclusive_or(raw, base, raw)
        return
    width = _DELTA_BYTES[codec]
    whole = len(raw) // width * width
    _decode_planes(view, width, raw)
    delta.restore(raw[:whole], base[:whole], width)


def _encode_planes(view: memoryview, width: int) -> bytes:
    count = len(view) // width
    buffer = _tools.scratch.buffer(count * width)
    if width == 1:
        buffer = view
    else:
        planes.part(view, buffer, width)
    stored: list[bytes | memoryview] = []
    for at in range(width):
        plane = buffer[at * count : (at + 1) * count]
        packed = _tools.entropy(plane)
        stored.append(packed if len(packed) <= KEEP * count else plane)
    lengths = struct.pack(f"<{width}I", *map(len, stored))
    return b"".join((lengths, *stored, view[count * width :]))


def _decode_planes(view: memoryview, width: int, raw: memoryview) -> None:
    count = len(raw) // width
    if len(view) < 4 * width:
        raise FormatError("byte planes without their lengths")
    lengths = struct.unpack_from(f"<{width}I", view)
    if max(lengths) > count or 4 * width + sum(lengths) + len(raw) % width != len(view):
        raise FormatError("byte planes that do not add up")
    starts = [4 * width + sum(lengths[:at]) for at in range(width + 1)]
    parts = [view[start:end] for start, end in itertools.pairwise(starts)]
    found = [part if len(part) == count else _decompress(part, count) for part in parts]
    if width == 1:
        raw[:count] = found[0]
    else:
        planes.join(found, raw)
    raw[count * width :] = view[starts[width] :]


def _decompress(frame: memoryview, length: int) -> bytes:
    """The content of one zstd frame of exactly *length* bytes. The frame's own claims are compared before anything is
    allocated: a few bytes can promise gigabytes."""
    try:
        told = zstandard.get_frame_parameters(frame)
        if told.content_size != length or told.window_size > max(_MAX_WINDOW_BYTES, length):
            raise FormatError(f"a zstd frame of {told.content_size} bytes where {length} were expected")
        content = _tools.decompressor.decompress(frame, max_output_size=length, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError) as error:
        raise FormatError(f"damaged zstd frame: {error}") from error
    if len(content) != length:
        raise FormatError(f"a zstd frame with {len(content)} bytes instead of {length}")
    return content


def _guess_width(view: memoryview, plain: float) -> int:
    """The element width (1, 2, 4, 8) whose byte planes a Huffman coder would shrink most, judged by the entropy of two
    samples; 0 when none promises clearly less than the share *plain* that was reached already."""
    half = min(_SAMPLE_BYTES, len(view)) // 16 * 8
    second = min(len(view) // 2 // 8 * 8, len(view) - half)
    sample = np.concatenate([np.frombuffer(view, np.uint8, half, offset) for offset in (0, second)])
    places = sample.reshape(-1, 8) + np.arange(0, 2048, 256)
    counts = np.bincount(places.ravel(), minlength=2048).reshape(8, 256)
    rows = np.concatenate([counts.reshape(-1, width, 256).sum(axis=0) for width in _GUESSED])
    totals = rows.sum(axis=1)
    # Shannon's entropy, with Miller and Madow's correction for how few samples it is made of.
    bits = np.log2(totals) - _X_LOG2_X[rows].sum(axis=1) / totals
    bits += (np.count_nonzero(rows, axis=1) - 1) / (2 * np.log(2) * totals)
    shares = bits / 8
    shares[shares > KEEP] = 1.0  # a plane that stays raw
    best, least, at = 0, plain - _GUESS_GAIN, 0
    for width in _GUESSED:
        expected = float(shares[at : at + width].mean())
        at += width
        if expected < least:
            best, least = width, expected - 0.01  # a wider element only for a real gain
    return best
