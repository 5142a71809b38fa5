"""A disk of memory that writes down every change and every flush, and fails on demand: what a store lies on in a test.

    with TestDisk(directory) as disk:
        ... disk.top is the mounted disk; disk.position() is how much was written down so far ...
        disk.fail(Fault("fsync", "catalog.db-wal", errno.EIO))
        disk.heal()

A FUSE file system in a process of its own: the real daemon, SQLite and the kernel (with passthrough) use it through
system calls, and whatever they do arrives here. What a power cut leaves of it is `tests.support.powercut`'s to say.
"""

from __future__ import annotations

import errno
import json
import marshal
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
import trio

from ckptfs.local.ballast import BALLAST_BYTES
from ckptfs.local.store import sync_directory
from tests.support.mounts import is_mounted, until

ROOT = pyfuse3.ROOT_INODE
DISK_BYTES = 1 << 30
CHANGES = ("create", "link", "unlink", "rename", "write", "truncate", "setattr")
"""Operations that a read-only disk refuses."""


@dataclass(frozen=True)
class Fault:
    """Makes requests fail. *operation*: one of `CHANGES`, 'change' for each of these, fsync, fsyncdir, open or read."""

    operation: str
    names: str
    """A regular expression that the file's name must match as a whole."""
    error: int
    after: int = 0
    """So many matching requests pass before."""
    times: int | None = None
    """Then so many fail; None: all."""


class TestDisk:
    """See the module. Skips the test where FUSE cannot be mounted. Use as a context manager."""

    __test__ = False

    def __init__(self, directory: Path, name: str = "testdisk") -> None:
        self.top = directory / name
        self.log = directory / f"{name}.log"

    def __enter__(self) -> TestDisk:
        if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
            pytest.skip("a test disk takes root and /dev/fuse")
        self.top.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.testdisk", self.top, self.log],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        try:
            until(lambda: is_mounted(self.top) or self._process.poll() is not None, "the test disk to be mounted")
            assert self._process.poll() is None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if is_mounted(self.top):
            subprocess.run(["umount", "--lazy", str(self.top)], timeout=30, check=False)
        self._process.send_signal(signal.SIGKILL)  # whoever still waits for it gets ENOTCONN
        self._process.wait(30)

    def store(self, tuning: Mapping[str, object]) -> Path:
        """A directory on it for a store, which begins with *tuning*."""
        store = self.directory("store")
        (store / "settings.json").write_text(json.dumps({"tuning": dict(tuning)}))
        ballast = store / "ballast"
        ballast.touch(0o600)
        os.truncate(ballast, BALLAST_BYTES)  # without fallocate it would be filled byte by byte
        return store

    def directory(self, name: str) -> Path:
        """A directory that survives."""
        made = self.top / name
        made.mkdir(mode=0o700)
        sync_directory(self.top)
        return made

    def position(self) -> int:
        """How many bytes of changes were written down; what returned before is in them."""
        return self.log.stat().st_size

    def fail(self, *faults: Fault) -> None:
        """From now on; instead of what was asked for before."""
        self._ask({"faults": [asdict(each) for each in faults]})

    def heal(self) -> None:
        self.fail()

    def free_bytes(self, wanted: int | None) -> None:
        """What statfs says; None for the truth."""
        self._ask({"free_bytes": wanted})

    def failed(self) -> int:
        """How many requests were made to fail since the last `fail`."""
        return int(os.getxattr(self.top, "user.failed"))

    def _ask(self, what: dict[str, Any]) -> None:
        os.setxattr(self.top, "user.ask", json.dumps(what).encode())


# The process


@dataclass
class _Node:
    id: int
    mode: int
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    nlink: int = 1
    data: bytearray = field(default_factory=bytearray)
    children: dict[bytes, _Node] = field(default_factory=dict)
    target: bytes = b""
    name: bytes = b""
    """The last that it had."""
    times: list[int] = field(default_factory=lambda: [time.time_ns()] * 3)
    """atime, mtime, ctime."""

    def touch(self, *, content: bool = True) -> None:
        now = time.time_ns()
        self.times[2] = now
        if content:
            self.times[1] = now


class _Disk(pyfuse3.Operations):
    enable_writeback_cache = False

    def __init__(self, log: str) -> None:
        super().__init__()
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        root = _Node(ROOT, stat.S_IFDIR | 0o755, nlink=2)
        self._nodes = {ROOT: root}
        self._next = ROOT + 1
        self._faults: list[dict[str, Any]] = []
        self._failed = 0
        self._free_bytes: int | None = None

    def _write_down(self, *record: object) -> None:
        data = marshal.dumps(record)
        os.write(self._log, len(data).to_bytes(4, "little") + data)

    def _check(self, operation: str, name: bytes) -> None:
        """Raises what a fault says."""
        for fault in self._faults:
            wanted = fault["operation"]
            if operation != wanted and not (wanted == "change" and operation in CHANGES):
                continue
            if not re.fullmatch(fault["names"], os.fsdecode(name)):
                continue
            if fault["after"] > 0:
                fault["after"] -= 1
                continue
            if fault["times"] is not None:
                if fault["times"] == 0:
                    continue
                fault["times"] -= 1
            self._failed += 1
            raise pyfuse3.FUSEError(fault["error"])

    def _child(self, parent: int, name: bytes) -> _Node:
        try:
            return self._nodes[parent].children[name]
        except KeyError:
            raise pyfuse3.FUSEError(errno.ENOENT) from None

    def _entry(self, node: _Node) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.st_mode, entry.st_nlink = node.id, node.mode, node.nlink
        entry.st_uid, entry.st_gid, entry.st_rdev = node.uid, node.gid, node.rdev
        entry.st_size = len(node.target) if stat.S_ISLNK(node.mode) else len(node.data)
        # The catalog's log looks for room that was allocated ahead; FUSE knows no fallocate, so say that it is there.
        ahead = 4 << 20 if node.name.endswith(b"-wal") else 0
        entry.st_blocks, entry.st_blksize = (len(node.data) + ahead + 511) // 512, 4096
        entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns = node.times
        entry.entry_timeout, entry.attr_timeout = 3600, 0
        return entry

    def _make(self, parent: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext, **fields: Any) -> _Node:
        self._check("create", name)
        if name in self._nodes[parent].children:
            raise pyfuse3.FUSEError(errno.EEXIST)
        node = _Node(self._next, mode, ctx.uid, ctx.gid, name=name, **fields)
        node.nlink = 2 if stat.S_ISDIR(mode) else 1
        self._next += 1
        self._nodes[node.id] = self._nodes[parent].children[name] = node
        self._nodes[parent].touch()
        self._write_down("make", parent, name, node.id, mode, node.target)
        return node

    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._entry(self._child(parent_inode, name))

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext | None = None) -> pyfuse3.EntryAttributes:
        return self._entry(self._nodes[inode])

    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        node = self._nodes[inode]
        if fields.update_size:
            self._truncate(node, attr.st_size)
        else:
            self._check("setattr", node.name)
        if fields.update_mode:
            node.mode = attr.st_mode
        if fields.update_uid:
            node.uid = attr.st_uid
        if fields.update_gid:
            node.gid = attr.st_gid
        if fields.update_atime:
            node.times[0] = attr.st_atime_ns
        if fields.update_mtime:
            node.times[1] = attr.st_mtime_ns
        node.touch(content=False)
        return self._entry(node)

    def _truncate(self, node: _Node, size: int) -> None:
        self._check("truncate", node.name)
        if size < len(node.data):
            del node.data[size:]
        else:
            node.data.extend(bytes(size - len(node.data)))
        node.touch()
        self._write_down("truncate", node.id, size)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext) -> Any:
        self._nodes[parent_inode].nlink += 1
        return self._entry(self._make(parent_inode, name, stat.S_IFDIR | mode, ctx))

    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext) -> Any:
        return self._entry(self._make(parent_inode, name, mode, ctx, rdev=rdev))

    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext) -> Any:
        return self._entry(self._make(parent_inode, name, stat.S_IFLNK | 0o777, ctx, target=target))

    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        return self._nodes[inode].target

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        node = self._make(parent_inode, name, stat.S_IFREG | mode, ctx)
        return pyfuse3.FileInfo(fh=node.id), self._entry(node)

    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext) -> Any:
        self._check("link", new_name)
        if new_name in self._nodes[new_parent_inode].children:
            raise pyfuse3.FUSEError(errno.EEXIST)
        node = self._nodes[inode]
        node.nlink += 1
        node.name = new_name
        self._nodes[new_parent_inode].children[new_name] = node
        self._write_down("link", new_parent_inode, new_name, inode)
        return self._entry(node)

    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        node = self._child(parent_inode, name)
        self._check("unlink", name)
        del self._nodes[parent_inode].children[name]
        node.nlink -= 1
        self._nodes[parent_inode].touch()
        self._write_down("unlink", parent_inode, name)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        if self._child(parent_inode, name).children:
            raise pyfuse3.FUSEError(errno.ENOTEMPTY)
        self._nodes[parent_inode].nlink -= 1
        await self.unlink(parent_inode, name, ctx)

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        node = self._child(parent_inode_old, name_old)
        self._check("rename", name_new)
        if flags:
            raise pyfuse3.FUSEError(errno.EINVAL)
        replaced = self._nodes[parent_inode_new].children.get(name_new)
        if replaced is not None:
            replaced.nlink -= 1
        del self._nodes[parent_inode_old].children[name_old]
        self._nodes[parent_inode_new].children[name_new] = node
        node.name = name_new
        self._write_down("rename", parent_inode_old, name_old, parent_inode_new, name_new, node.id)

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        node = self._nodes[inode]
        self._check("open", node.name)
        if flags & os.O_TRUNC:
            self._truncate(node, 0)
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        node = self._nodes[fh]
        self._check("read", node.name)
        return bytes(node.data[off : off + size])

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        node = self._nodes[fh]
        self._check("write", node.name)
        if off > len(node.data):
            node.data.extend(bytes(off - len(node.data)))
        node.data[off : off + len(buf)] = buf
        node.touch()
        self._write_down("write", fh, off, bytes(buf))
        return len(buf)

    async def fsync(self, fh: int, datasync: bool) -> None:
        self._check("fsync", self._nodes[fh].name)
        self._write_down("fsync", fh)

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        return inode

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        names = sorted(self._nodes[fh].children.items(), key=lambda each: each[1].id)
        for name, node in names:
            if node.id > start_id and not pyfuse3.readdir_reply(token, name, self._entry(node), node.id):
                return

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        self._check("fsyncdir", self._nodes[fh].name)
        self._write_down("fsyncdir", fh)

    async def forget(self, inode_list: Any) -> None:
        pass  # memory ends with the test

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        reply = pyfuse3.StatvfsData()
        used = sum(len(node.data) for node in self._nodes.values() if node.nlink)
        free = DISK_BYTES - used if self._free_bytes is None else self._free_bytes
        reply.f_bsize = reply.f_frsize = 4096
        reply.f_blocks, reply.f_bfree, reply.f_bavail = DISK_BYTES // 4096, free // 4096, free // 4096
        reply.f_files = reply.f_ffree = reply.f_favail = 1 << 20
        reply.f_namemax = 255
        return reply

    async def setxattr(
        self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        if name != b"user.ask":
            raise pyfuse3.FUSEError(errno.EOPNOTSUPP)
        asked = json.loads(value)
        if "faults" in asked:
            self._faults, self._failed = asked["faults"], 0
        if "free_bytes" in asked:
            self._free_bytes = asked["free_bytes"]

    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if name != b"user.failed":
            raise pyfuse3.FUSEError(errno.ENODATA)
        return str(self._failed).encode()


def _serve(top: str, log: str) -> None:
    pyfuse3.init(_Disk(log), top, {"fsname=testdisk", "default_permissions", "allow_other"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
