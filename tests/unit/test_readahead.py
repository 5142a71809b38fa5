"""How far ahead of a reader is fetched."""

from __future__ import annotations

import pytest

from ckptfs.encoding.manifest import Chunk, Content, TensorSpan
from ckptfs.ids import ChunkId
from ckptfs.replica.readahead import CAUTIOUS_SHARE, window_end
from ckptfs.spans import JUMP_BYTES, RUNS, Runs

CHUNK = 1000
MOST = 64 * CHUNK


def content(chunks: int, tensors: int = 0) -> Content:
    """A file of equal chunks, cut evenly into *tensors* behind a header of one chunk."""
    size = chunks * CHUNK
    each = (size - CHUNK) // max(tensors, 1)
    spans = [(CHUNK + at * each, CHUNK + (at + 1) * each) for at in range(tensors)]
    return Content(
        size,
        (),
        tuple(Chunk(ChunkId(at.to_bytes(32, "big")), CHUNK, None) for at in range(chunks)),
        tuple(TensorSpan(str(start), "uint8", (end - start,), start, end) for start, end in spans),
    )


@pytest.mark.parametrize("tensors", [0, 1, 3, 10])
def test_what_is_fetched_in_vain_is_a_share_of_what_was_read(tensors: int) -> None:
    """A reader who begins anywhere but at the start: whole chunks, at most a sixteenth of what it read."""
    file = content(1000, tensors)
    for position in range(3 * CHUNK, file.size, 777):
        end = window_end(file, 2 * CHUNK + 1, position, MOST)
        assert end == position or (end % CHUNK == 0 and end - position <= (position - 2 * CHUNK) // CAUTIOUS_SHARE)


def test_a_long_read_is_fetched_ahead_up_to_the_setting() -> None:
    """The window grows with what was read, to the setting, and ends with the file."""
    file = content(3000, 1)
    start = 500 * CHUNK
    widths = [window_end(file, start, position, MOST) - position for position in range(start, file.size, CHUNK)]
    assert widths[0] == 0 and max(widths) == MOST and widths[-1] == CHUNK
    assert widths[: 64 * CAUTIOUS_SHARE] == sorted(widths[: 64 * CAUTIOUS_SHARE])


def test_who_reads_several_tensors_from_the_start_wants_all() -> None:
    """After four tensors and an eighth of the file as much is fetched ahead as was read; after two, a sixth of it, also
    of the next tensor; not before, and not in one."""
    file = content(1001, 20)
    assert window_end(file, 0, 90 * CHUNK, MOST) - 90 * CHUNK <= 6 * CHUNK
    assert window_end(file, 0, 150 * CHUNK, MOST) == 175 * CHUNK
    assert window_end(file, 0, 201 * CHUNK, MOST) == 265 * CHUNK
    assert window_end(file, 60 * CHUNK, 261 * CHUNK, MOST) - 261 * CHUNK <= 13 * CHUNK
    assert window_end(content(1001, 1), 0, 900 * CHUNK, MOST) - 900 * CHUNK <= 57 * CHUNK
    assert window_end(content(1001), 0, 10 * CHUNK, MOST) == 20 * CHUNK


def test_a_careful_reader_is_not_led_into_the_next_tensor() -> None:
    """Until a reader is known to want all, fetching ends with the tensor that it is in."""
    file = content(1001, 10)
    assert window_end(file, 150 * CHUNK, 297 * CHUNK, MOST) == 301 * CHUNK
    assert window_end(file, 150 * CHUNK, 303 * CHUNK, MOST) == 312 * CHUNK


def test_no_chunks_nothing_ahead() -> None:
    """At the end, and before a hole that takes the window, nothing is to be fetched."""
    file = content(10)
    assert window_end(file, 0, file.size, MOST) == file.size
    sparse = Content(100 * CHUNK, ((CHUNK, 100 * CHUNK),), file.chunks[:1])
    assert window_end(sparse, 0, CHUNK, MOST) == CHUNK


def test_threads_that_read_in_turn_are_runs_of_their_own() -> None:
    """Reads at several places in turn, and a little out of order, go on with the right one; more than that are new."""
    runs, step = Runs(), JUMP_BYTES // 2
    begins = [at * 100 * JUMP_BYTES for at in range(1, RUNS + 1)]
    for number in range(10):
        for begin in begins:
            at = begin + (number ^ 1) * step  # pairs swapped
            start, end = runs.read(at, at + step)
            assert number == 0 or begin <= start <= begin + step
            assert number % 2 == 0 or end == begin + (number + 1) * step
    elsewhere = 55 * 100 * JUMP_BYTES
    assert runs.read(elsewhere, elsewhere + 1) == (elsewhere, elsewhere + 1)
