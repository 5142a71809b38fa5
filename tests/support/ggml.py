"""GGUF files, written as https://github.com/ggml-org/ggml/blob/master/docs/gguf.md says."""

from __future__ import annotations

import struct
from collections.abc import Mapping

STRING, ARRAY, UINT32 = 8, 9, 4


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_file(
    tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]], version: int = 3, alignment: int | None = None
) -> bytes:
    """A file of *tensors*: shape, number of the type, bytes. With *alignment*, it is said; 32 is what is taken else."""
    pairs = [
        text("general.architecture") + struct.pack("<I", STRING) + text("llama"),
        text("llama.block_count") + struct.pack("<II", UINT32, 2),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, 3) + text("a") + text("bc") + text(""),
        text("tokenizer.ggml.scores") + struct.pack("<IIQ3f", ARRAY, 6, 3, 0.0, 1.0, 2.0),
    ]
    if alignment is not None:
        pairs.append(text("general.alignment") + struct.pack("<II", UINT32, alignment))
    step = alignment or 32
    infos, data = b"", b""
    for name, (shape, kind, payload) in tensors.items():
        infos += text(name) + struct.pack("<I", len(shape))
        infos += b"".join(struct.pack("<Q", size) for size in reversed(shape)) + struct.pack("<IQ", kind, len(data))
        data += payload + bytes(-len(payload) % step)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + infos
    return head + bytes(-len(head) % step) + data
