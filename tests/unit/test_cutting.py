"""Where files are cut."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from pyfastcdc import FastCDC

from ckptfs.config import Tuning
from ckptfs.errors import FormatError
from ckptfs.formats.base import BytesSource, Piece, Tensor
from ckptfs.formats.cutting import cut
from ckptfs.ids import digest
from ckptfs.spans import Span

PINNED = [16384, 32768, 49152, 52978, 56125, 62725, 69704, 74272, 75462, 82263, 88121, 92227]
TINY = Tuning(piece_bytes=100, edge_bytes=0, small_bytes=40, cdc_bytes=256)


def tensor(start: int, end: int, dtype: str = "float32") -> Tensor:
    return Tensor("t", dtype, (end - start,), start, end)


def unread(offset: int, length: int) -> bytes:
    raise AssertionError("nothing has to be read")


def ranges(
    size: int, tensors: list[Tensor], spans: list[Span] | None = None, start: int = 0
) -> list[tuple[int, int, str | None]]:
    pieces = cut(size, tensors, [(0, size)] if spans is None else spans, TINY, unread, start)
    return [(piece.start, piece.end, piece.dtype) for piece in pieces]


def noise(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def test_steps_are_counted_from_the_tensor() -> None:
    """A tensor starts a piece, is cut at fixed steps from its own start, and its last piece is its own."""
    assert ranges(300, [tensor(17, 267)]) == [
        (0, 17, None),
        (17, 117, "float32"),
        (117, 217, "float32"),
        (217, 267, "float32"),
        (267, 300, None),
    ]


def test_the_edges_of_a_long_tensor() -> None:
    """They are pieces of their own, as long as the settings say; nothing between is shorter, and the steps stay."""
    edged = replace(TINY, edge_bytes=20, rim_bytes=5)
    for length in range(200, 520):
        end = 10 + length
        pieces = cut(end, [tensor(10, end)], [(0, end)], edged, unread)[1:]
        assert pieces[:2] == [Piece(10, 15, "float32"), Piece(15, 30, "float32")]
        assert pieces[-2:] == [Piece(end - 20, end - 5, "float32"), Piece(end - 5, end, "float32")]
        assert all(20 <= piece.end - piece.start < 120 for piece in pieces[2:-2])
        assert all((piece.end - 10) % 100 == 0 for piece in pieces[2:-3])
        behind = cut(end, [tensor(10, end)], [(0, end)], edged, unread, 150)
        assert [piece.end for piece in behind] == [piece.end for piece in pieces if piece.end > 150]
    assert len(cut(199, [tensor(0, 199)], [(0, 199)], edged, unread)) == 2


def test_small_neighbours_share_a_piece() -> None:
    """Headers, padding and small tensors must be gathered, up to the longest piece, and cut between tensors."""
    small = [tensor(at, at + 30) for at in range(10, 210, 35)]
    assert ranges(220, small) == [(0, 80, None), (80, 180, None), (180, 220, None)]
    assert ranges(120, [tensor(10, 40), tensor(45, 90)]) == [(0, 45, None), (45, 90, "float32"), (90, 120, None)]


def test_unknown_elements_have_no_type() -> None:
    """A tensor of unknown type is cut like any other, without a hint for the codec."""
    assert ranges(150, [tensor(0, 150, "unknown")]) == [(0, 100, None), (100, 150, None)]


def test_holes_do_not_move_the_steps() -> None:
    """A hole inside a tensor must end a piece, and the steps behind it must stay where they were."""
    assert ranges(400, [tensor(50, 400)], [(0, 120), (230, 260), (300, 400)]) == [
        (0, 50, None),
        (50, 120, "float32"),
        (230, 250, "float32"),
        (250, 260, "float32"),
        (300, 350, "float32"),
        (350, 400, "float32"),
    ]
    assert ranges(400, [tensor(50, 400)], []) == []
    assert ranges(0, []) == []


def test_start_inside_a_tensor() -> None:
    """Cutting from an offset must meet the boundaries that the tensor has anyway."""
    assert ranges(300, [tensor(50, 300)], start=180) == [(180, 250, "float32"), (250, 300, "float32")]
    assert ranges(300, [tensor(50, 300)], start=300) == []


def test_tensors_that_make_no_sense() -> None:
    """Tensors that overlap an earlier one, leave the file or are empty must be passed over."""
    lies = [tensor(0, 90), tensor(50, 150), tensor(150, 300), tensor(120, 120), tensor(130, 110)]
    assert ranges(180, lies) == [(0, 90, "float32"), (90, 180, None)]


def test_long_gaps_are_cut_by_content() -> None:
    """Opaque bytes longer than a piece, such as a compressed member, must be cut by content; what is around, not."""
    data = noise(5000)
    pieces = cut(5000, [tensor(100, 200), tensor(4500, 4700)], [(0, 5000)], TINY, BytesSource(data).read)
    alone = cut(4300, [], [(0, 4300)], TINY, BytesSource(data[200:4500]).read)
    assert pieces[2 : 2 + len(alone)] == [Piece(piece.start + 200, piece.end + 200, None) for piece in alone]
    assert len(alone) > 5


def digests(data: bytes, pieces: list[Piece]) -> dict[bytes, int]:
    return {digest(data[piece.start : piece.end]): piece.end - piece.start for piece in pieces}


def test_content_cuts_survive_insertion() -> None:
    """Bytes inserted in an unknown file must change the chunks around them only."""
    data = noise(200_000)
    changed = data[:70_000] + b"inserted" + data[70_000:]
    first = digests(data, cut(len(data), [], [(0, len(data))], TINY, BytesSource(data).read))
    second = digests(changed, cut(len(changed), [], [(0, len(changed))], TINY, BytesSource(changed).read))
    assert sum(length for name, length in second.items() if name not in first) < 4 * 1024


def test_windows_do_not_show() -> None:
    """Boundaries must not depend on how much is read at once: many windows here, one there."""
    data = noise(300_000)
    small = cut(len(data), [], [(0, len(data))], TINY, BytesSource(data).read)
    cutter = FastCDC(256, min_size=64, max_size=1024, normalized_chunking=1)
    assert [(piece.start, piece.end) for piece in small] == [
        (chunk.offset, chunk.offset + chunk.length) for chunk in cutter.cut_buf(data)
    ]


def test_boundaries_are_pinned() -> None:
    """The boundaries of this release must not move: a new version of the library would lose all deduplication."""
    data = bytes(50_000) + b"".join(digest(bytes([at % 251, at // 251])) for at in range(3000))
    pieces = cut(len(data), [], [(0, len(data))], Tuning(cdc_bytes=4096), BytesSource(data).read)
    assert [piece.end for piece in pieces][:12] == PINNED


def test_chunks_of_a_huge_file_are_longer() -> None:
    """The average doubles so that a file has about `cdc_chunks` at most; a file within that is cut as ever."""
    data = random.Random(8).randbytes(1 << 18)
    for most, average in ((1024, 256), (1023, 512), (512, 512), (100, 4096)):
        tuning = Tuning(cdc_bytes=256, cdc_chunks=most)
        expected = cut(len(data), [], [(0, len(data))], Tuning(cdc_bytes=average), BytesSource(data).read)
        assert cut(len(data), [], [(0, len(data))], tuning, BytesSource(data).read) == expected


def test_memory_is_bounded() -> None:
    """An unknown file must be read in windows, each byte once, never the whole."""
    size, most, read_bytes = 20 << 20, 0, 0
    block = noise(1 << 20)

    def read(offset: int, length: int) -> bytes:
        nonlocal most, read_bytes
        most = max(most, length)
        read_bytes += length
        data = b"".join(block for _ in range(-(-(offset % len(block) + length) // len(block))))
        return data[offset % len(block) :][:length]

    pieces = cut(size, [], [(0, size)], Tuning(), read)
    assert pieces[-1].end == size
    assert most <= 4 << 20
    assert read_bytes == size


def test_a_growing_log_continues() -> None:
    """Each seal must start where the last one ended, and keep what was cut before."""
    data = noise(50_000)
    read = BytesSource(data).read
    first = cut(20_000, [], [(0, 20_000)], TINY, read)
    second = cut(50_000, [], [(0, 50_000)], TINY, read, start=first[-1].end)
    assert first[-1].end == second[0].start == 20_000
    assert second[-1].end == 50_000


def test_a_file_that_became_shorter() -> None:
    """A file that was truncated meanwhile must be an error, not a piece of nothing."""
    with pytest.raises(FormatError, match="became shorter"):
        cut(5000, [], [(0, 5000)], TINY, BytesSource(noise(4000)).read)
