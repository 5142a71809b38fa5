"""The MessagePack files of flax.serialization: which arrays they hold and where.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md, and flax/serialization.py of
https://github.com/google/flax (`_msgpack_ext_pack`, `_ndarray_to_bytes`, `_chunk`). An array is an extension of type 1
that is itself MessagePack: (shape, name of the dtype, bytes). One of more than 1 GiB is a map with
`__msgpack_chunked_array__` of flat arrays of 1 GiB, which are found as arrays of their own.
"""

from __future__ import annotations

from ckptfs.errors import FormatError
from ckptfs.formats.base import BITS, MAX_NAME, MAX_TENSORS, UNKNOWN, Cursor, Source, Tensor, described, joined, tidy

MAX_VALUES = 1_000_000
"""Values in one file, two seconds' worth; an array needs four."""

MAX_DEPTH = 100
"""Of maps and arrays in each other; trees of parameters have ten."""

_ARRAY = 1
_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
"""How wide the length is that follows."""
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
_FIXED = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
"""Bytes that follow nil, booleans, floats and integers."""
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def begins(byte: int) -> bool:
    """Whether a file whose first byte this is may be a map, list or array that is not empty."""
    return 0x81 <= byte <= 0x8F or 0x91 <= byte <= 0x9F or byte in {*_EXTENSIONS, *_LISTS, *_MAPS}


def read_tensors(source: Source) -> list[Tensor]:
    """The arrays in file order; FormatError when this is not one value of MessagePack and nothing else."""
    reader = _Reader(source)
    reader.value("", 0)
    if reader.cursor.left:
        raise FormatError("more than one value of MessagePack")
    return tidy(reader.tensors, source.size)


class _Reader:
    def __init__(self, source: Source) -> None:
        self.cursor = Cursor(source)
        self.tensors: list[Tensor] = []
        self._values = 0

    def value(self, name: str, depth: int) -> str:
        """Go past a value, keeping the arrays in it. Returns what it is called as a key."""
        self._values += 1
        if self._values > MAX_VALUES or depth > MAX_DEPTH or len(self.tensors) > MAX_TENSORS:
            raise FormatError("too many values of MessagePack, or too deep")
        cursor = self.cursor
        kind = cursor.integer(1)
        if kind <= 0x7F or kind >= 0xE0:
            return str(kind if kind <= 0x7F else kind - 0x100)
        if kind in _FIXED:
            return str(_big(cursor, _FIXED[kind]))
        if kind <= 0x8F or kind in _MAPS:
            for _ in range(kind & 15 if kind <= 0x8F else _big(cursor, _MAPS[kind])):
                self.value(joined(name, self.value("", depth + 1)), depth + 1)
        elif kind <= 0x9F or kind in _LISTS:
            for at in range(kind & 15 if kind <= 0x9F else _big(cursor, _LISTS[kind])):
                self.value(joined(name, str(at)), depth + 1)
        elif kind <= 0xBF or kind in _STRINGS:
            length = kind & 31 if kind <= 0xBF else _big(cursor, _STRINGS[kind])
            text = cursor.take(min(length, MAX_NAME))
            cursor.skip(length - len(text))
            return text.decode("utf-8", "replace")
        elif kind in _BYTES:
            cursor.skip(_big(cursor, _BYTES[kind]))
        elif kind in _EXTENSIONS or kind in _FIXED_EXTENSIONS:
            length = _FIXED_EXTENSIONS[kind] if kind in _FIXED_EXTENSIONS else _big(cursor, _EXTENSIONS[kind])
            code = cursor.integer(1)
            end = cursor.at + length
            if code == _ARRAY:
                self._array(name, end)
            cursor.at = min(cursor.at, end)
            cursor.skip(end - cursor.at)
        else:
            raise FormatError("a byte that begins no value of MessagePack")
        return "?"

    def _array(self, name: str, end: int) -> None:
        """The array whose extension ends at *end*; nothing where it is another extension of the same type."""
        cursor = self.cursor
        if cursor.take(1) != b"\x93":
            return
        rank = cursor.integer(1)
        if not 0x90 <= rank <= 0x9F:  # numpy had at most 32 dimensions, flax's shapes have at most 15
            return
        shape = []
        for _ in range(rank & 15):
            kind = cursor.integer(1)
            if kind > 0x7F and kind not in (0xCC, 0xCD, 0xCE, 0xCF):
                return
            shape.append(kind if kind <= 0x7F else _big(cursor, _FIXED[kind]))
        kind = cursor.integer(1)
        if not 0xA0 <= kind <= 0xBF:
            return
        dtype = cursor.take(kind & 31).decode("ascii", "replace")
        kind = cursor.integer(1)
        length = _big(cursor, _BYTES[kind]) if kind in _BYTES else -1
        if length >= 0 and cursor.at + length == end and length <= cursor.left:
            dtype = dtype if dtype in BITS else UNKNOWN
            self.tensors.append(described(name, dtype, tuple(shape), cursor.at, end))


def _big(cursor: Cursor, width: int) -> int:
    """The next *width* bytes as an unsigned big-endian number."""
    return int.from_bytes(cursor.take(width), "big")
