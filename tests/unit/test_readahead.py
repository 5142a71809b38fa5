"""How far ahead of a reader is fetched."""

from __future__ import annotations

from ckptfs.encoding.manifest import Chunk, Content, TensorSpan
from ckptfs.ids import ChunkId
from ckptfs.reading import SHARE, Reading
from ckptfs.replica.readahead import window_end

CHUNK = 1 << 20
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


def read(*spans: tuple[int, int]) -> Reading:
    """Who read *spans* of a file."""
    reading = Reading()
    for start, end in spans:
        reading.was_read(start, end, cold=True)
    return reading


def test_what_was_earned_is_fetched() -> None:
    """A reader who begins anywhere but at the start: whole chunks, no more than it earned, to the end of the tensor."""
    file = content(1000, 3)
    for position in range(3 * CHUNK, file.size, 777 << 10):
        reading = read((2 * CHUNK + 1, position))
        for more in (0, 40 * CHUNK, 4000 * CHUNK):
            reading.account.read_bytes += more
            end = window_end(file, reading, position, MOST)
            assert end == position or (end % CHUNK == 0 and end - position <= min(reading.earned(position), MOST))
            assert file.tensors_between(2 * CHUNK + 1, position) >= 2 or end <= file.tensor_end(position)


def test_a_file_without_tensors_is_read_whole_from_its_start() -> None:
    """As much is fetched ahead as was read. Of a file with tensors, however many were read, what was earned."""
    assert window_end(content(1001), read((0, 10 * CHUNK)), 10 * CHUNK, MOST) == 20 * CHUNK
    assert window_end(content(1001), read((0, 500 * CHUNK)), 500 * CHUNK, MOST) == 564 * CHUNK
    assert window_end(content(1001), read((CHUNK, 401 * CHUNK)), 401 * CHUNK, MOST) == 451 * CHUNK
    assert window_end(content(1001, 1), read((0, 88 * CHUNK)), 88 * CHUNK, MOST) == 99 * CHUNK
    assert window_end(content(1001, 20), read((0, 201 * CHUNK)), 201 * CHUNK, MOST) == 226 * CHUNK


def test_threads_that_share_the_work_are_one_reader() -> None:
    """Each copies a part of every tensor: when the last has come to its part's end, all were read, and lead on."""
    file = content(1001, 20)
    parts = [(1 + 50 * tensor + 10 * part) * CHUNK for tensor in range(5) for part in (3, 0, 4, 2, 1)]
    reading = read((0, CHUNK), *((at, at + 10 * CHUNK) for at in parts))
    assert window_end(file, reading, 251 * CHUNK, MOST) == 282 * CHUNK


def test_a_careful_reader_is_not_led_into_the_next_tensor() -> None:
    """Until a reader came over two tensors, fetching ends with the one that it is in."""
    file = content(1001, 10)
    for start, position, end in ((150, 297, 301), (150, 303, 333), (150, 397, 401), (101, 397, 427)):
        reading = read((start * CHUNK, position * CHUNK))
        reading.account.read_bytes = 30 * SHARE * CHUNK
        assert window_end(file, reading, position * CHUNK, MOST) == end * CHUNK


def test_behind_a_mapped_tensor() -> None:
    """The kernel reads on into the next, and nothing more is fetched of that; but of one that is read alone, for who
    began with the file, and where all of the set is wanted."""
    file = content(1001, 10)
    for begun, position, end in (
        (200, 301.5, 301.5),
        (290, 302, 302),
        (200, 303, 333),
        (300.75, 301.5, 331),
        (0, 101.5, 131),
    ):
        reading = read((int(begun * CHUNK), int(position * CHUNK)))
        reading.account.read_bytes = 30 * SHARE * CHUNK
        assert window_end(file, reading, int(position * CHUNK), MOST) == end * CHUNK
    reading = read((200 * CHUNK, 302 * CHUNK))
    reading.account.share = 1
    assert window_end(file, reading, 302 * CHUNK, 200 * CHUNK) == 404 * CHUNK


def test_what_is_fetched_in_vain_is_a_share_of_what_was_read() -> None:
    """Over all runs together: who jumps about, and leaves every run early, gets no more than who reads on."""
    reading = Reading()
    for at in range(0, 200_000, 1000):
        reading.was_read(at, at + 50, cold=True)
        reading.ask(at + 50, at + 50 + reading.earned(at + 50))
        account = reading.account
        assert account.unread_bytes <= account.read_bytes // SHARE < account.unread_bytes + 50


def test_what_was_read_may_be_spent_again() -> None:
    """Bytes that were fetched ahead and then read, by anybody, are no loss, and earn more."""
    one, other = read((0, 800)), Reading()
    other.account = one.account
    assert one.asked(800) == 800 and one.earned(800) == 100
    one.ask(800, 900)
    assert one.asked(800) == 900 and one.earned(800) == 100
    assert one.earned(300) == other.earned(0) == 0, "it is spent"
    one.was_read(850, 950, cold=True)
    assert (one.account.read_bytes, one.account.unread_bytes) == (900, 50)
    one.was_read(0, 950, cold=True)
    assert (one.account.read_bytes, one.account.unread_bytes) == (950, 0) and other.earned(0) == 118
    one.ask(0, 1000)
    assert one.account.unread_bytes == 50, "what was read is not ahead"
    one.was_read(0, 1 << 20, cold=False)
    assert one.account.read_bytes == 950, "what is here earns nothing"
    assert one.account.unread_bytes == 0


def test_no_chunks_nothing_ahead() -> None:
    """At the end, and before a hole that takes the window, nothing is to be fetched."""
    file = content(10)
    assert window_end(file, read((0, file.size)), file.size, MOST) == file.size
    sparse = Content(100 * CHUNK, ((CHUNK, 100 * CHUNK),), file.chunks[:1])
    assert window_end(sparse, read((0, CHUNK)), CHUNK, MOST) == CHUNK
