"""The headers of .npy files: which arrays they hold and where.

Source: numpy.lib.format, "NPY format" (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html).
A .npy is magic, version, header length, a Python dict literal, then the array's bytes; several may follow each other
in one file. A .npz is a ZIP archive of them, whose members are read one by one. Object arrays are pickles:
their bytes are left alone.
"""

from __future__ import annotations

import ast
import re

from ckptfs.errors import FormatError
from ckptfs.formats.base import (
    MAX_TENSORS,
    UNKNOWN,
    Source,
    Tensor,
    byte_length,
    checked_shape,
    read_exactly,
    tidy,
)

MAGIC = b"\x93NUMPY"

MAX_HEADER_BYTES = 10_000
"""numpy's own limit (`max_header_size`): longer literals can exhaust the stack of Python's parser."""

_KINDS = {"b": "bool", "u": "uint", "i": "int", "f": "float", "c": "complex", "V": "void"}
_DESCR = re.compile(r"([<>|=])([A-Za-z])(\d{1,9})(\[[^\]]*\])?")
_QUOTED = re.compile(r"'[^'\\]*'|\"[^\"\\]*\"")
_PLAIN = re.compile(r"(?:[ \n,:0-9()\[\]{}Q]|True|False)*")


def read_tensors(source: Source) -> list[Tensor]:
    """The arrays of a .npy file, in order; FormatError when it is none."""
    tensors: list[Tensor] = []
    at = 0
    while at < source.size:
        if tensors and source.read(at, len(MAGIC)) != MAGIC:
            break  # something else was appended: not ours to know
        tensors.append(_array(source, f"{len(tensors)}" if tensors else "", at, source.size))
        at = tensors[-1].end
        if len(tensors) > MAX_TENSORS:
            raise FormatError("too many arrays in one file")
    return tidy(tensors, source.size)


def _array(source: Source, name: str, at: int, limit: int) -> Tensor:
    """The array whose .npy starts at *at* and must end by *limit*."""
    head = read_exactly(source, at, 12)
    if head[:6] != MAGIC or head[6] not in (1, 2, 3):
        raise FormatError("no .npy header")
    width = 2 if head[6] == 1 else 4
    length = int.from_bytes(head[8 : 8 + width], "little")
    start = at + 8 + width + length
    if length > MAX_HEADER_BYTES or start > limit:
        raise FormatError("a .npy header too long")
    text = read_exactly(source, at + 8 + width, length).decode("utf-8" if head[6] == 3 else "latin-1")
    descr, shape = _header(text)
    dtype, item = _dtype(descr)
    if dtype != UNKNOWN:
        wanted = byte_length(dtype, shape)
    elif item is not None:
        wanted = byte_length("void8", (*shape, item))
    else:
        wanted = None
    end = limit if wanted is None else start + wanted
    if end > limit:
        raise FormatError("a .npy array longer than its file")
    return Tensor(name, dtype, shape, start, end)


def _header(text: str) -> tuple[object, tuple[int, ...]]:
    """Descr and shape. Only what numpy writes is let through to the parser: no operators, names or deep nesting."""
    bare = _QUOTED.sub("Q", text)
    depth = 0
    for mark in bare:
        depth += (mark in "([{") - (mark in ")]}")
        if not 0 <= depth <= 20:
            raise FormatError("a .npy header nested too deep")
    if not _PLAIN.fullmatch(bare):
        raise FormatError("a .npy header with more than literals")
    try:
        header = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise FormatError("a .npy header that is no literal") from error
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise FormatError("a .npy header with other keys")
    if not isinstance(header["fortran_order"], bool) or not isinstance(header["shape"], tuple):
        raise FormatError("a .npy header with other types")
    return header["descr"], checked_shape(header["shape"])


def _dtype(descr: object) -> tuple[str, int | None]:
    """The dtype's name and bytes per element (None for a structure). FormatError for pickled objects."""
    if not isinstance(descr, str):
        if "O" in str(descr):
            raise FormatError("an array that may hold pickled objects")
        return UNKNOWN, None
    match = _DESCR.fullmatch(descr)
    if match is None:
        raise FormatError(f"unknown .npy element type {descr[:40]!r}")
    order, kind, item = match[1], match[2], int(match[3])
    if kind == "U":
        return UNKNOWN, 4 * item
    if kind in "SmM" or order == ">":
        return UNKNOWN, item
    name = "bool" if kind == "b" and item == 1 else f"{_KINDS.get(kind, '?')}{8 * item}"
    return (name if byte_length(name, ()) == item else UNKNOWN), item
