"""Group sync: what nobody asked for is flushed in time, whatever else is asked for."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.groupsync import GroupSync
from ckptfs.local.images import Image, Images


def test_what_nobody_asks_for_is_flushed_beside_a_program_that_syncs_all_the_time(tmp_path: Path) -> None:
    """Closed files are promised to be durable some seconds later, also beside a log that is synced twice a second."""

    async def main() -> None:
        catalog, images = Catalog(tmp_path / "catalog.db"), Images(tmp_path / "images")
        sync = GroupSync(catalog, images)

        def made() -> Image:
            image = images.create()
            os.pwrite(image.fd, b"bytes", 0)
            sync.created(image.id)
            return image

        log, saved = made(), made()

        async def keep_syncing() -> None:
            while True:
                sync.wrote(log.id)
                await sync.sync(log.id)
                await trio.sleep(0.02)

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sync.run, 0.3)
                nursery.start_soon(keep_syncing)
                await trio.sleep(0.15)
                assert not sync.is_flushed(saved.id), "who asks for one file waits for that one alone"
                while not sync.is_flushed(saved.id):
                    await trio.sleep(0.02)
                nursery.cancel_scope.cancel()
        for image in (log, saved):
            os.close(image.fd)
        catalog.close()

    trio.run(main)


def test_rounds_that_nobody_asks_for_come_as_often_on_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was closed while one of them ran waits for no more than a period and the next round."""
    began: list[float] = []

    async def main() -> None:
        catalog = Catalog(tmp_path / "catalog.db")
        sync = GroupSync(catalog, Images(tmp_path / "images"))

        async def serve() -> None:
            began.append(trio.current_time())
            await trio.sleep(2.0 if len(began) < 4 else 10.0)

        monkeypatch.setattr(sync, "_serve", serve)
        with trio.move_on_after(40):
            await sync.run(3.0)
        catalog.close()

    clock = MockClock(autojump_threshold=0)
    trio.run(main, clock=clock)
    assert [round(after - before, 1) for before, after in pairwise(began)] == [3.0, 3.0, 3.0, 10.6, 10.6]
