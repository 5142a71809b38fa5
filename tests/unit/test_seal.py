"""When closed files are sealed: small ones of a burst together at its end, large ones at once, refused ones again."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.replica import seal
from tests.support.publishing import Machine, run


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst may have long gaps, so that a busy machine does not end it; 1,000 bytes are large."""
    monkeypatch.setattr(seal, "_BURST_GAP_S", 2.0)
    monkeypatch.setattr(seal, "_BATCH_BYTES", 1000)


def sealing(path: Path, test: Callable[[Machine], Awaitable[None]]) -> None:
    async def body() -> None:
        here = Machine(path, None)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(here.store.sync.run, 3600.0)
                nursery.start_soon(here.sealer.run)
                await here.write("first", b"1")
                await sealed(here, "first")  # alone: nothing to wait for
                await test(here)
                nursery.cancel_scope.cancel()
        finally:
            here.close()

    run(body)


async def is_sealed(here: Machine, path: str) -> bool:
    return here.store.names.inode(await here.walk(path)).manifest is not None


async def sealed(here: Machine, *paths: str) -> None:
    with trio.fail_after(20):
        for path in paths:
            while not await is_sealed(here, path):
                await trio.sleep(0.01)


async def write_burst(here: Machine) -> list[str]:
    names = [f"small-{number}" for number in range(20)]
    for name in names:
        await here.write(name, b"x" * 10)
    return names


def test_small_files_wait_for_the_end_of_the_burst(tmp_path: Path) -> None:
    async def test(here: Machine) -> None:
        began = trio.current_time()
        names = await write_burst(here)
        await trio.sleep(0.3)
        waiting = [name for name in names if not await is_sealed(here, name)]
        assert len(waiting) >= len(names) - 1  # the first of them was alone
        await sealed(here, *names)
        assert trio.current_time() - began >= 2.0

    sealing(tmp_path / "s", test)


def test_a_large_file_does_not_wait_for_small_ones(tmp_path: Path) -> None:
    async def test(here: Machine) -> None:
        names = await write_burst(here)
        await here.write("large", b"y" * 2000)
        with trio.fail_after(1.5):
            await sealed(here, "large")
        assert not await is_sealed(here, names[-1])

    sealing(tmp_path / "s", test)


def test_who_waits_ends_the_waiting(tmp_path: Path) -> None:
    async def test(here: Machine) -> None:
        names = await write_burst(here)
        here.sealer.hurry()
        with trio.fail_after(1.9):
            while not here.sealer.idle:
                here.sealer.hurry()
                await trio.sleep(0.01)
        assert all([await is_sealed(here, name) for name in names])

    sealing(tmp_path / "s", test)


def test_a_burst_without_end_is_sealed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "_BURST_S", 0.5)

    async def test(here: Machine) -> None:
        await write_burst(here)
        with trio.fail_after(20):
            while not await is_sealed(here, "small-19"):
                await here.write("another", b"z")
                await trio.sleep(0.1)

    sealing(tmp_path / "s", test)


def test_a_seal_that_could_not_be_committed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for a moment: every file is sealed when it is no longer."""
    monkeypatch.setattr(seal, "_RETRY_S", 0.05)
    monkeypatch.setattr(seal, "_BURST_GAP_S", 0.01)

    async def test(here: Machine) -> None:
        refused = []
        add_manifest = here.store.contents.add_manifest

        def add(**fields: Any) -> int:
            if len(refused) < 3:
                refused.append(fields)
                raise OSError(errno.ENOSPC, "no space")
            return add_manifest(**fields)

        monkeypatch.setattr(here.store.contents, "add_manifest", add)
        await sealed(here, *(await write_burst(here)))
        assert len(refused) == 3

    sealing(tmp_path / "s", test)
