"""One machine without a mount: file system, sealing, settling, publishing, over real images and a real remote."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import trio
import trio.testing

from ckptfs.attributes import AttributeChange, Caller
from ckptfs.config import Settings, Tuning
from ckptfs.errors import IsADirectory
from ckptfs.filesystem import FileSystem
from ckptfs.ids import ROOT_INODE, Inode
from ckptfs.local.catalog.cuts import Cuts, Unneeded
from ckptfs.local.catalog.heads import Heads
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.store import Store
from ckptfs.remote.base import ObjectStore
from ckptfs.replica.publish import Publisher
from ckptfs.replica.seal import Sealer
from ckptfs.replica.settle import Settler

CALLER = Caller(os.getuid(), os.getgid())
TUNING = Tuning(
    piece_bytes=1024,
    small_bytes=128,
    cdc_bytes=256,
    pack_bytes=4096,
    pack_bytes_large=8192,
    inline_bytes=400,
    tree_entries=8,
    upload_threads=2,
    retry_first_s=0.01,
    retry_most_s=0.05,
    sync_every_s=3600.0,
)
SETTINGS = Settings(settle_s=0.05, max_lag_s=5.0, log_after_s=2.0, tuning=TUNING)


class NoTree:
    """Makes the file system keep tombstones, as on a machine that follows others."""

    async def expand(self, directory: Inode) -> None: ...
    async def fresh(self, *, waiting: bool) -> None: ...
    def unknown(self) -> str | None: ...


class Machine:
    """See the module. Use `machine`."""

    def __init__(self, path: Path, remote: ObjectStore | None, settings: Settings = SETTINGS) -> None:
        self.store = Store.open(path)
        self.store.settings = settings
        self.remote = remote
        self.cuts = Cuts(self.store.catalog)
        self.heads = Heads(self.store.catalog)
        self.packs = Packs(self.store.catalog)
        self.settler = Settler(self.store, self.cuts, self.heads, released=self._released, wake=self._wake)
        self.fs = FileSystem(self.store, listener=self.settler, tree=NoTree())
        self.sealer = Sealer(self.store, self.fs.files)
        self.fs.files.on_closed = self.sealer.submit
        self.sealer.on_sealed = lambda ino, image, manifest: self.settler.sealed(ino)
        self.publisher: Publisher | None = None
        if remote is not None:
            self.publisher = Publisher(
                self.store,
                remote,
                cuts=self.cuts,
                heads=self.heads,
                packs=self.packs,
                cut_now=self.settler.cut_now,
                reseal=self.sealer.submit,
                released=self._released,
            )
            self.publisher.on_abandoned = self.settler.load

    def _released(self, unneeded: Unneeded) -> None:
        self.store.contents.drop_unneeded_manifests(unneeded.manifests)
        for image in unneeded.images:
            self.fs.release_image(image)

    def _wake(self) -> None:
        if self.publisher is not None:
            self.publisher.wake()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.store.sync.run, self.store.settings.tuning.sync_every_s)
            nursery.start_soon(self.sealer.run)
            nursery.start_soon(self.settler.run)
            if self.publisher is not None:
                nursery.start_soon(self.publisher.run)

    async def publish(self) -> None:
        assert self.publisher is not None
        await self.publisher.publish_now()

    # What a program does

    async def walk(self, path: str) -> Inode:
        ino = ROOT_INODE
        for name in path.encode().split(b"/"):
            if name:
                ino = (await self.fs.lookup(ino, name)).ino
        return ino

    async def _parent(self, path: str) -> tuple[Inode, bytes]:
        directory, _, name = path.rpartition("/")
        return await self.walk(directory), name.encode()

    async def mkdir(self, path: str) -> Inode:
        return (await self.fs.mkdir(*await self._parent(path), 0o755, CALLER)).ino

    async def open(self, path: str, flags: int = os.O_WRONLY) -> int:
        """A handle; the file is created with O_CREAT."""
        parent, name = await self._parent(path)
        found = self.store.names.find(parent, name)
        if found is not None:
            if stat.S_ISDIR(self.store.names.inode(found).mode):
                raise IsADirectory(path)  # the kernel's part
            return await self.fs.open(found, flags, CALLER)
        return (await self.fs.create(parent, name, 0o644, flags, CALLER))[0]

    async def write(self, path: str, data: bytes) -> None:
        fh = await self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        await self.fs.files.write(fh, 0, data)
        await self.fs.release(fh)

    async def append(self, fh: int, data: bytes) -> None:
        size = os.fstat(self.fs.files.handle(fh).file.image.fd).st_size
        await self.fs.files.write(fh, size, data)

    async def rename(self, old: str, new: str) -> None:
        await self.fs.rename(*await self._parent(old), *await self._parent(new), 0)

    async def unlink(self, path: str) -> None:
        await self.fs.unlink(*await self._parent(path))

    async def rmdir(self, path: str) -> None:
        await self.fs.rmdir(*await self._parent(path))

    async def chmod(self, path: str, mode: int) -> None:
        await self.fs.setattr(await self.walk(path), AttributeChange(mode=mode), None, CALLER)

    def close(self) -> None:
        self.store.close()


@asynccontextmanager
async def machine(
    path: Path, remote: ObjectStore | None, settings: Settings = SETTINGS, kind: type[Machine] = Machine
) -> AsyncIterator[Machine]:
    """A running machine; everything is cancelled and closed at the end, as by a kill."""
    made = kind(path, remote, settings)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            await trio.testing.wait_all_tasks_blocked()
            yield made
            nursery.cancel_scope.cancel()
    finally:
        made.close()


def run(function: Callable[[], Awaitable[None]], clock: trio.abc.Clock | None = None, timeout_s: float = 60) -> None:
    """Run an async test; under a real clock it fails rather than hangs."""

    async def limited() -> None:
        if clock is None:
            with trio.fail_after(timeout_s):
                await function()
        else:
            await function()

    trio.run(limited, clock=clock)


def restore(remote: Path, target: Path) -> dict[str, bytes | str | None]:
    """What docs/restore.py makes of a remote: path -> bytes of a file, target of a link, None for a directory."""
    script = Path(__file__).parents[2] / "docs" / "restore.py"
    done = subprocess.run(
        [sys.executable, script, remote, target], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return read_tree(target)


def read_tree(top: Path) -> dict[str, bytes | str | None]:
    found: dict[str, bytes | str | None] = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = None
        else:
            found[name] = path.read_bytes()
    return found


def tuned(settings: Settings = SETTINGS, **changes: float | int) -> Settings:
    """*settings* with other values; names of `Tuning` are taken as its."""
    tuning = {name: value for name, value in changes.items() if name in Tuning.__dataclass_fields__}
    others = {name: value for name, value in changes.items() if name not in tuning}
    return replace(settings, tuning=replace(settings.tuning, **tuning), **others)  # type: ignore[arg-type]
