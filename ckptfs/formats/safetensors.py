"""The header of a safetensors file: which tensors it holds and where.

Source: https://github.com/huggingface/safetensors#format and its `safetensors/src/tensor.rs`. Eight bytes of
little-endian header length, that many bytes of JSON, then the tensors' bytes. `data_offsets` count from the end of the
header. The reference reader also refuses gaps between tensors; we need not, since we only look for boundaries.
"""

from __future__ import annotations

import json
from typing import Any

from ckptfs.errors import FormatError
from ckptfs.formats.base import UNKNOWN, Source, Tensor, byte_length, checked_shape, read_exactly, tidy

MAX_HEADER_BYTES = 32 << 20
"""The reference allows 100 MB; ours is what 100,000 tensors with long names need."""

MAX_VALUES = 1_500_000
"""Commas, colons and brackets in a header: each costs the JSON reader up to 100 bytes, so this bounds its memory."""

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn",
}  # fmt: skip


def read_tensors(source: Source) -> list[Tensor]:
    """The tensors in file order; FormatError when this is no sound safetensors file."""
    length = int.from_bytes(read_exactly(source, 0, 8), "little")
    if not 2 <= length <= MAX_HEADER_BYTES or 8 + length > source.size:
        raise FormatError("no safetensors header length")
    if read_exactly(source, 8, 1) != b"{":
        raise FormatError("a safetensors header starts with a brace")
    text = read_exactly(source, 8, length)
    if sum(text.count(mark) for mark in (b",", b":", b"[", b"{")) > MAX_VALUES:
        raise FormatError("the safetensors header has too many values")
    header = json.loads(text, parse_int=_small_int, object_pairs_hook=_no_duplicates)
    data = 8 + length
    return tidy((_tensor(name, entry, data) for name, entry in header.items() if name != "__metadata__"), source.size)


def _tensor(name: str, entry: Any, data: int) -> Tensor:
    if not isinstance(entry, dict):
        raise FormatError(f"tensor {name!r} is not described by an object")
    shape = checked_shape(entry.get("shape"))
    start, end = checked_shape(entry.get("data_offsets"))
    dtype = DTYPES.get(str(entry.get("dtype")), UNKNOWN)
    expected = byte_length(dtype, shape)
    if expected is not None and end - start != expected:
        raise FormatError(f"tensor {name!r} has {end - start} bytes, but its shape needs {expected}")
    return Tensor(name, dtype, shape, data + start, data + end)


def _small_int(text: str) -> int:
    """Python before 3.10.7 needs quadratic time for a number of a million digits."""
    if len(text) > 20:
        raise FormatError("a number too long for an offset")
    return int(text)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise FormatError("a key occurs twice in the safetensors header")
    return result
