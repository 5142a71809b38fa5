"""pyfuse3's requests, translated to `FileSystem` calls and back. Decides nothing itself.

Timeouts: without a remote every change comes through this kernel, so names and attributes may be cached for long; with
one, other writers' changes must show within the lag. An open file's pages stay valid across opens (keep_cache) while
nothing changed its content except through this kernel.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, ReaddirToken, RequestContext, SetattrFields, StatvfsData

from ckptfs.attributes import AttributeChange, Attributes, Caller
from ckptfs.filesystem import FileSystem
from ckptfs.ids import Inode

from .errnos import answers, replies
from .passthrough import KERNEL, direct_maps, directory_handle, kernel_handle, own_handle

log = logging.getLogger(__name__)

_LONG_S = 3600.0
_BLOCK_BYTES, _COLD_BLOCK_BYTES = 128 << 10, 4 << 10
"""Buffer that programs should use: smaller ones make buffered writes cost more requests. But torch reads this much for
each ZIP record's header, which must not be fetched in vain where a file's bytes are elsewhere."""
_LISTED_AT_ONCE = _FORGOTTEN_AT_ONCE = 64
_FORGET_AFTER_S = 0.02
STATE_XATTR = b"user.ckptfs.state"
STORE_XATTR = b"user.ckptfs.store"


@dataclass(frozen=True)
class MountOptions:
    """What the adapter must know of the mount."""

    owner: tuple[int, int] | None = None
    """(uid, gid) that everything is shown to belong to; None shows what is stored."""
    cache_s: float = _LONG_S
    """How long the kernel may keep names and attributes."""
    state: Callable[[Inode], Awaitable[str]] | None = None
    """Answers the virtual attribute user.ckptfs.state."""


class Operations(pyfuse3.Operations):
    """One request each; see FileSystem for what they mean."""

    supports_dot_lookup = True
    enable_writeback_cache = False

    def __init__(self, filesystem: FileSystem, options: MountOptions) -> None:
        super().__init__()
        self._fs = filesystem
        self._options = options
        self._listings: dict[int, tuple[Inode, list[tuple[bytes, Inode]] | None]] = {}
        self._next_listing = 1
        self._listed_at: dict[Inode, float] = {}
        """When the kernel was last told the names of a directory, and with them what they are."""
        self._content_seen: set[Inode] = set()
        self._forgotten: list[tuple[Inode, int]] = []
        filesystem.on_accessed = _forget_attributes

    def changed_elsewhere(self, ino: Inode) -> None:
        """Another writer changed the bytes of a file or a name in a directory: the next open must not find what was."""
        self._content_seen.discard(ino)
        self._listed_at.pop(ino, None)

    # Names

    @replies
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        return self._entry(await self._fs.lookup(Inode(parent_inode), name), pin=name not in (b".", b".."))

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Nobody waits for it: what comes within a moment is done together, and not before what somebody waits for."""
        self._forgotten += [(Inode(ino), count) for ino, count in inode_list]
        if len(self._forgotten) > len(inode_list):
            return  # somebody is at it
        await trio.sleep(_FORGET_AFTER_S)
        while self._forgotten:
            some = self._forgotten[:_FORGOTTEN_AT_ONCE]
            for ino, _ in some:
                self._content_seen.discard(ino)
                self._listed_at.pop(ino, None)
            try:
                self._fs.unpin(some)
            except Exception:  # pyfuse3 would end the mount
                log.exception("forgetting inodes failed")
            await trio.lowlevel.checkpoint()
            del self._forgotten[: len(some)]

    @replies
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        return self._entry(await self._fs.mkdir(Inode(parent_inode), name, mode, _caller(ctx)))

    @replies
    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext) -> EntryAttributes:
        return self._entry(await self._fs.mknod(Inode(parent_inode), name, mode, rdev, _caller(ctx)))

    @replies
    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        return self._entry(await self._fs.symlink(Inode(parent_inode), name, target, _caller(ctx)))

    @replies
    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext) -> EntryAttributes:
        return self._entry(await self._fs.link(Inode(inode), Inode(new_parent_inode), new_name))

    @replies
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        await self._fs.unlink(Inode(parent_inode), name)

    @replies
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        await self._fs.rmdir(Inode(parent_inode), name)

    @replies
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        await self._fs.rename(Inode(parent_inode_old), name_old, Inode(parent_inode_new), name_new, flags)

    @replies
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return await self._fs.readlink(Inode(inode))

    # Attributes

    @replies
    async def getattr(self, inode: int, ctx: RequestContext | None = None) -> EntryAttributes:
        return self._attributes(await self._fs.getattr(Inode(inode)))

    @replies
    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        uid = attr.st_uid if fields.update_uid else None
        gid = attr.st_gid if fields.update_gid else None
        if self._options.owner is not None and (uid is not None or gid is not None):
            if uid not in (None, self._options.owner[0]) or gid not in (None, self._options.owner[1]):
                raise pyfuse3.FUSEError(errno.EPERM)
            uid = gid = None
        handle = None if fh is None else own_handle(fh)
        change = AttributeChange(
            mode=attr.st_mode if fields.update_mode else None,
            uid=uid,
            gid=gid,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        caller = _caller(ctx)
        if change == AttributeChange() and not caller.privileged:
            caller = Caller(ctx.uid, ctx.gid, frozenset(pyfuse3.get_sup_groups(ctx.pid)))
        return self._attributes(await self._fs.setattr(Inode(inode), change, handle, caller))

    @replies
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        if name == STORE_XATTR:
            return os.fsencode(self._fs.store.path)
        if name == STATE_XATTR and self._options.state is not None:
            return (await self._options.state(Inode(inode))).encode()
        return self._fs.xattrs.get(Inode(inode), name)

    @answers(False)
    def is_plain(self, inode: int) -> bool:
        """Whether `getxattr` finds no capabilities (see `answer_with`)."""
        return self._fs.xattrs.is_plain(Inode(inode))

    @replies
    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        names = self._fs.xattrs.names(Inode(inode))
        return [name for name in names if ctx.uid == 0 or not name.startswith(b"trusted.")]

    @replies
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        if name in (STATE_XATTR, STORE_XATTR):
            raise pyfuse3.FUSEError(errno.EPERM)
        self._fs.xattrs.set(Inode(inode), name, value)

    @replies
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        self._fs.xattrs.remove(Inode(inode), name)

    @replies
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        real, reply = self._fs.statfs(), StatvfsData()
        for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail"):
            setattr(reply, name, getattr(real, name))
        reply.f_namemax = 255
        return reply

    # Files

    @replies
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        started = time.monotonic()
        fh, attributes = await self._fs.create(Inode(parent_inode), name, mode, flags, _caller(ctx))
        self._fs.saves.waited(attributes.ino, time.monotonic() - started)
        self._content_seen.add(attributes.ino)  # its pages come from this kernel's own writes
        return self._opened(attributes.ino, fh, flags, new=True), self._entry(attributes)

    @replies
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        ino = Inode(inode)
        started = time.monotonic()
        fh = await self._fs.open(ino, flags, _caller(ctx))
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self._fs.saves.waited(ino, time.monotonic() - started)
        return self._opened(ino, fh, flags, new=False)

    @replies
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await self._fs.files.read(own_handle(fh), off, size)

    @replies
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        with self._saving(fh):
            return await self._fs.files.write(own_handle(fh), off, buf)

    @replies
    async def flush(self, fh: int) -> None:
        self._fs.files.check_poison(self._fs.files.handle(own_handle(fh)).file)

    @replies
    async def fsync(self, fh: int, datasync: bool) -> None:
        with self._saving(fh):
            await self._fs.files.fsync(own_handle(fh))

    @answers(False)
    def is_sound(self, fh: int) -> bool:
        """Whether `flush` has nothing to report (see `answer_with`)."""
        return self._fs.files.is_sound(self._fs.files.handle(own_handle(fh)).file)

    @answers(-1)
    def to_read(self, fh: int, offset: int, size: int) -> int:
        """The descriptor of the image to read these bytes from; -1 where `read` must be asked (see `Answers`)."""
        return self._fs.files.to_read(own_handle(fh), offset, size)

    @answers(-1)
    def to_write(self, fh: int) -> int:
        """The descriptor of the image to write to; -1 where `write` must be asked."""
        return self._fs.files.to_write(own_handle(fh))

    @answers(False)
    def wrote(self, fh: int, offset: int, seconds: float) -> bool:
        """What `to_write` named was written."""
        handle = self._fs.files.handle(own_handle(fh))
        self._fs.saves.waited(handle.file.ino, seconds)
        self._fs.files.wrote(handle, offset)
        return True

    def seek(self, fh: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE; pyfuse3 does not know this request (see `answer_with`), so no errors are raised."""
        try:
            return self._fs.files.seek(own_handle(fh), offset, hole=whence == os.SEEK_HOLE)
        except OSError as error:
            return -(error.errno or errno.EIO)
        except Exception:
            log.exception("lseek failed unexpectedly")
            return -errno.EIO

    @replies
    async def release(self, fh: int) -> None:
        await self._fs.release(own_handle(fh))

    # Directories

    @replies
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        self._fs.check_named(Inode(inode))
        fh = self._next_listing
        self._next_listing += 1
        self._listings[fh] = (Inode(inode), None)
        listed_s = time.monotonic() - self._listed_at.get(Inode(inode), -math.inf)
        return directory_handle(fh, keep=listed_s < self._options.cache_s)

    @replies
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        """Entries as they were when the listing began, less what is gone since: nothing twice, nothing skipped.

        An answer is also a lookup: a name that means something else by now must not be answered from the old listing.
        The kernel keeps the names for as long as what it learned of each, unless one is changed through it.
        """
        ino, names = self._listings[own_handle(fh)]
        dots = (b".", b"..")
        seen = [await self._fs.lookup(ino, name) for name in dots]
        if names is None or start_id == 0:
            names = await self._fs.entries(ino)
            self._listings[own_handle(fh)] = (ino, names)
            self._listed_at[ino] = time.monotonic()
        # From here on nothing awaits: what another machine removed meanwhile would look like an empty directory.
        for index, name in enumerate(dots[start_id:], start_id + 1):  # the kernel does not count these as lookups
            if not pyfuse3.readdir_reply(token, name, self._attributes(seen[index - 1]), index):
                return
        at = max(start_id - len(dots), 0)
        while at < len(names):
            some = names[at : at + _LISTED_AT_ONCE]
            for (name, child), listed in zip(some, self._fs.listed(ino, some), strict=True):
                at += 1
                if listed is None:
                    continue
                if not pyfuse3.readdir_reply(token, name, self._attributes(listed), at + len(dots)):
                    return
                self._fs.pin(child)

    @replies
    async def releasedir(self, fh: int) -> None:
        del self._listings[own_handle(fh)]

    @replies
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._fs.sync_names()

    # Within

    def _opened(self, ino: Inode, fh: int, flags: int, *, new: bool) -> FileInfo:
        file = self._fs.files.handle(fh).file
        if file.backing is not None:
            self._content_seen.discard(ino)  # what the page cache of the mount had is not kept up to date
            return FileInfo(fh=kernel_handle(fh, file.backing))
        keep = ino in self._content_seen and not file.unwatched
        self._content_seen.add(ino)
        return FileInfo(fh=fh, keep_cache=keep, direct_io=_direct(flags, new=new))

    def _saving(self, fh: int) -> AbstractContextManager[None]:
        return self._fs.saves.blocking(self._fs.files.handle(own_handle(fh)).file.ino)

    def _attributes(self, attributes: Attributes) -> EntryAttributes:
        reply = EntryAttributes()
        reply.st_ino = attributes.ino
        reply.generation = 0
        reply.entry_timeout = self._options.cache_s
        volatile = self._fs.files.is_volatile(attributes.ino, attributes.size)
        reply.attr_timeout = 0 if volatile else self._options.cache_s
        reply.st_mode = attributes.mode
        reply.st_nlink = attributes.nlink
        reply.st_uid, reply.st_gid = self._options.owner or (attributes.uid, attributes.gid)
        reply.st_rdev = attributes.rdev
        reply.st_size = attributes.size
        reply.st_blksize = _BLOCK_BYTES if attributes.whole else _COLD_BLOCK_BYTES
        reply.st_blocks = attributes.blocks
        reply.st_atime_ns = attributes.atime_ns
        reply.st_mtime_ns = attributes.mtime_ns
        reply.st_ctime_ns = attributes.ctime_ns
        return reply

    def _entry(self, attributes: Attributes, *, pin: bool = True) -> EntryAttributes:
        if pin:
            self._fs.pin(attributes.ino)
        return self._attributes(attributes)


def _direct(flags: int, *, new: bool) -> bool:
    """Whether the bytes of a handle bypass the kernel's page cache of the mount: those that only write do.

    They are in the image's page cache anyway; a second copy cost half of the speed (np.save of 1 GiB 0.8 instead of
    1.5 GB/s). A handle that also reads may be mapped, which direct I/O forbids, unless it was agreed with the kernel;
    then *new* files are written that way too. Before Linux 6.6 a direct write left pages that others had cached as they
    were.
    """
    access = flags & os.O_ACCMODE
    return KERNEL >= (6, 6) and (access == os.O_WRONLY or (new and access == os.O_RDWR and direct_maps()))


def _forget_attributes(ino: Inode) -> None:
    """Have the kernel ask for the attributes of *ino* anew."""
    try:
        pyfuse3.invalidate_inode(ino, attr_only=True)
    except OSError as error:  # it does not know them, or the mount ends
        log.debug("the kernel keeps what it knows of inode %d: %s", ino, error)


def _caller(ctx: RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid)
