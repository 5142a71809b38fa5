"""The process that hashes and encodes: what it answers, and what becomes of work when it dies or nobody wants it."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import trio_test

from ckptfs.background.caller import Threads, Worker
from ckptfs.background.hashing import Hashed
from ckptfs.background.packing import Built
from ckptfs.config import MIB, Tuning
from ckptfs.encoding.codec import decode
from ckptfs.encoding.manifest import decode_content
from ckptfs.encoding.pack import read_index
from ckptfs.ids import ChunkId, digest

TUNING = dataclasses.astuple(Tuning())


@asynccontextmanager
async def working() -> AsyncIterator[Worker]:
    worker = Worker()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            try:
                yield worker
            finally:
                nursery.cancel_scope.cancel()


def images(tmp_path: Path, *sizes: int) -> list[tuple[int, str]]:
    made = []
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).write_bytes(os.urandom(size))
        made.append((number, str(tmp_path / str(number))))
    return made


@trio_test
async def test_it_answers_what_a_thread_answers(tmp_path: Path) -> None:
    paths = images(tmp_path, 0, 10, 5 * MIB)
    async with working() as worker:
        found, failed = await worker.call("hash_images", paths, TUNING)
    here, _ = await Threads().call("hash_images", paths, TUNING)
    assert not failed
    assert [(image, Hashed._make(each)) for image, each in found] == here
    content = decode_content(here[2][1].encoded)
    assert here[2][1].located(0, 10**6) == [
        (chunk.id, offset, chunk.length) for chunk, offset in zip(content.chunks, content.offsets(), strict=True)
    ]


@trio_test
async def test_what_the_disk_refuses_is_named_and_what_is_gone_is_not(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    asked = [(1, str(tmp_path / "gone")), (2, str(tmp_path / "directory")), *images(tmp_path, 7)]
    async with working() as worker:
        found, failed = await worker.call("hash_images", asked, TUNING)
    assert [image for image, _ in found] == [0]
    assert [image for image, _ in failed] == [2]


def memory_file(label: str) -> tuple[int, str]:
    fd = os.memfd_create(label)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


@trio_test
async def test_a_pack_is_built_in_the_memory_that_was_given(tmp_path: Path) -> None:
    data = [os.urandom(3 * MIB), b"a" * MIB, os.urandom(17)]
    wanted = []
    for number, each in enumerate(data):
        (tmp_path / str(number)).write_bytes(each)
        wanted.append((digest(each), len(each), None, [(str(tmp_path / "gone"), 0), (str(tmp_path / str(number)), 0)]))
    fd, path = memory_file("pack-one")
    try:
        async with working() as worker:
            built = Built._make(await worker.call("build_pack", wanted, path, "pack-one"))
        whole = os.pread(fd, 1 << 30, 0)
    finally:
        os.close(fd)
    assert built.size == len(whole)
    rows = read_index(whole, len(whole), built.name)
    assert [decode(row.codec, whole[row.offset : row.offset + row.length], row.raw_length) for row in rows] == data


@trio_test
async def test_a_chunk_that_is_not_there_is_missing(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other bytes")
    missing = ChunkId(digest(b"wanted bytes"[:11]))
    fd, path = memory_file("pack-two")
    try:
        async with working() as worker:
            answer = await worker.call(
                "build_pack", [(missing, 11, None, [(str(tmp_path / "other"), 0)])], path, "pack-two"
            )
    finally:
        os.close(fd)
    built = Built._make(answer)
    assert list(built.missing) == [missing]
    assert "other bytes" in built.notes[0]


@trio_test
async def test_a_descriptor_that_means_something_else_by_now_is_not_written(tmp_path: Path) -> None:
    """Who asked may have given up, and its number may be an image's."""
    (tmp_path / "chunk").write_bytes(b"chunk")
    image = tmp_path / "image"
    image.write_bytes(b"precious")
    fd = os.open(image, os.O_RDWR)
    try:
        async with working() as worker:
            with pytest.raises(OSError, match="is not the pack"):
                await worker.call(
                    "build_pack", [(digest(b"chunk"), 5, None, [(str(tmp_path / "chunk"), 0)])],
                    f"/proc/{os.getpid()}/fd/{fd}", "pack-three",
                )  # fmt: skip
    finally:
        os.close(fd)
    assert image.read_bytes() == b"precious"


@trio_test
async def test_work_of_a_killed_process_is_done_by_the_next(tmp_path: Path) -> None:
    paths = images(tmp_path, 10)
    async with working() as worker:
        await worker.call("hash_images", paths, TUNING)
        first = worker.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.call, "hash_images", paths, TUNING)
            await trio.sleep(0.1)
            os.kill(first, signal.SIGKILL)
        assert worker.pid not in (None, first)


@trio_test
async def test_work_that_kills_every_process_fails(tmp_path: Path) -> None:
    paths = images(tmp_path, 10)
    async with working() as worker:

        async def kill_each() -> None:
            while True:
                if worker.pid is not None:
                    os.kill(worker.pid, signal.SIGKILL)
                await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_each)
            with pytest.raises(OSError, match="ended while") as caught:
                await worker.call("hash_images", paths, TUNING)
            nursery.cancel_scope.cancel()
        assert caught.value.errno == errno.EIO
        assert (await worker.call("hash_images", paths, TUNING))[0]


@trio_test
async def test_its_priority_is_low_and_it_ends_with_the_daemon(tmp_path: Path) -> None:
    async with working() as worker:
        await worker.call("hash_images", images(tmp_path, 10), TUNING)
        pid = worker.pid
        assert pid is not None
        assert os.getpriority(os.PRIO_PROCESS, pid) == 15
        os.kill(pid, signal.SIGTERM)  # sent to every process of a unit that is stopped
        assert (await worker.call("hash_images", images(tmp_path, 10), TUNING))[0]
        assert worker.pid == pid
    assert not Path(f"/proc/{pid}").exists()


@trio_test
async def test_light_work_begins_no_process_and_goes_to_one_that_runs(tmp_path: Path) -> None:
    paths = images(tmp_path, 10)
    async with working() as worker:
        assert (await worker.call("hash_images", paths, TUNING, light=True))[0]
        assert worker.pid is None
        await worker.call("hash_images", paths, TUNING)
        pid = worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with trio.move_on_after(0.3):
            await worker.call("hash_images", paths, TUNING, light=True)
            raise AssertionError("a stopped process does no work")
        os.kill(pid, signal.SIGCONT)


@trio_test
async def test_urgent_work_does_not_wait_for_the_process(tmp_path: Path) -> None:
    paths = images(tmp_path, 10)
    async with working() as worker:
        await worker.call("hash_images", paths, TUNING)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        with worker.urgent():
            with trio.fail_after(10):
                assert (await worker.call("hash_images", paths, TUNING))[0]
        os.kill(worker.pid, signal.SIGCONT)
