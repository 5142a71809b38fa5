"""Cutting and recognising, for arbitrary files, tensors and holes."""

from __future__ import annotations

import io
import json
import zipfile
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.config import Tuning
from ckptfs.formats.base import BytesSource, Piece, Tensor, tidy
from ckptfs.formats.cutting import cut
from ckptfs.formats.recognise import recognise
from ckptfs.spans import Span, SpanSet

TINY = Tuning(piece_bytes=100, edge_bytes=15, small_bytes=40, cdc_bytes=256)
SIZES = st.integers(0, 3000)


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, list[Tensor], list[Span]]:
    """A file's bytes, tensors that may lie anywhere, and where it has data."""
    size = draw(st.sampled_from([0, 1, 99, 700, 2500, 30_000]))
    data = np.random.default_rng(draw(st.integers(0, 5))).bytes(size)
    tensors = []
    for start, length in draw(st.lists(st.tuples(SIZES, st.integers(0, 700)), max_size=12)):
        tensors.append(Tensor("t", draw(st.sampled_from(["float32", "unknown"])), (), start, start + length))
    spans = SpanSet([(0, size)])
    for start, length in draw(st.lists(st.tuples(SIZES, SIZES), max_size=4)):
        spans.remove(start, start + length)
    return data, tensors, list(spans)


def check(pieces: list[Piece], spans: list[Span]) -> None:
    """The pieces are in order, not empty, and exactly the spans."""
    assert all(piece.start < piece.end for piece in pieces)
    assert all(one.end <= other.start for one, other in pairwise(pieces))
    assert list(SpanSet((piece.start, piece.end) for piece in pieces)) == spans
    for start, _ in spans:  # a hole ends a piece
        assert any(piece.start == start for piece in pieces)


@settings(max_examples=120, deadline=None)
@given(files())
def test_pieces_are_the_data(file: tuple[bytes, list[Tensor], list[Span]]) -> None:
    """Whatever tensors are claimed, pieces must cover the data exactly, bounded in length, and the same every time."""
    data, tensors, spans = file
    pieces = cut(len(data), tensors, spans, TINY, BytesSource(data).read)
    check(pieces, spans)
    assert all(piece.end - piece.start <= 1024 for piece in pieces)
    assert all(piece.end - piece.start < 115 for piece in pieces if piece.dtype is not None)
    assert cut(len(data), tensors, spans, TINY, BytesSource(data).read) == pieces


@settings(max_examples=70, deadline=None)
@given(files(), SIZES)
def test_start(file: tuple[bytes, list[Tensor], list[Span]], start: int) -> None:
    """Cutting from an offset must cover what is behind it, and know the steps of the tensors all the same."""
    data, tensors, spans = file
    pieces = cut(len(data), tensors, spans, TINY, BytesSource(data).read, start)
    check(pieces, [(max(a, start), b) for a, b in spans if b > start])
    ends = {piece.end for piece in cut(len(data), tensors, spans, TINY, BytesSource(data).read)}
    assert all(piece.end in ends for piece in pieces if piece.dtype is not None)


@settings(max_examples=70, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=6), st.integers(0, 500), st.integers(0, 500))
def test_tensors_give_the_same_pieces_anywhere(lengths: list[int], head: int, other_head: int) -> None:
    """A tensor that is not small must be cut alike wherever it lies and whatever is around it."""
    layouts = []
    for first, gap in ((head, 0), (other_head, 7)):
        at, tensors = first, []
        for length in lengths:
            tensors.append(Tensor("t", "float32", (length,), at, at + length))
            at += length + gap
        pieces = cut(at, tensors, [(0, at)] if at else [], TINY, BytesSource(bytes(at)).read)
        inside = [
            [(piece.start - t.start, piece.end - t.start) for piece in pieces if t.start <= piece.start < t.end]
            for t in tensors
            if t.end - t.start >= TINY.small_bytes
        ]
        layouts.append(inside)
    assert layouts[0] == layouts[1]


def examples() -> list[bytes]:
    """One small file of each format that needs no other library."""
    npz, npy, other = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez(npz, a=np.arange(9.0), b=np.arange(5))
    np.save(npy, np.arange(20.0))
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    program = (
        b"\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\nq\x01((X\x07\0\0\0storagectorch\nFloatStorage\n"
        b"X\x01\0\0\x000X\x03\0\0\0cpuK\x02tQK\0K\x02\x85K\x01\x85\x89NtRs."
    )
    with zipfile.ZipFile(other, "w") as out:
        out.writestr("x/data.pkl", program)
        out.writestr("x/data/0", bytes(8))
    return [
        npz.getvalue(),
        npy.getvalue(),
        len(header).to_bytes(8, "little") + header + bytes(24),
        other.getvalue(),
        other.getvalue() * 2,
    ]


EXAMPLES = examples()


def test_examples_are_recognised() -> None:
    """The files that are damaged below must be sound before."""
    assert all(recognise(BytesSource(data)) for data in EXAMPLES)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_damaged_files(example: bytes, data: st.DataObject) -> None:
    """Whatever happened to a file, recognising it must not raise, and what is found must be disjoint and inside it."""
    broken = bytearray(example)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(broken) - 1))
        kind = data.draw(st.sampled_from(["byte", "ones", "cut", "insert", "repeat"]))
        if kind == "byte":
            broken[at] = data.draw(st.integers(0, 255))
        elif kind == "ones":
            broken[at : at + 8] = b"\xff" * len(broken[at : at + 8])
        elif kind == "cut":
            del broken[at + 1 :]
        elif kind == "insert":
            broken[at:at] = data.draw(st.binary(min_size=1, max_size=20))
        else:
            broken[at:at] = broken[at:]
    tensors = recognise(BytesSource(bytes(broken)))
    assert tidy(tensors, len(broken)) == tensors


@settings(max_examples=120, deadline=None)
@given(st.sampled_from([b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"\x10" + bytes(7) + b"{"]), st.binary(max_size=200))
def test_arbitrary_files(magic: bytes, data: bytes) -> None:
    """Arbitrary bytes behind any magic must be recognised as nothing, or as tensors inside the file."""
    tensors = recognise(BytesSource(magic + data))
    assert tidy(tensors, len(magic + data)) == tensors
