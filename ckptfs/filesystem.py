"""What every operation on names and inodes means; open files' bytes are `openfiles`' work.

No kernel types and no errno here: arguments and results are plain values, refusals are `errors.FileSystemError`.
Permission bits are checked by the kernel (default_permissions).

Who calls: the event loop's thread. Except where an operation first awaits (expanding a directory that only the remote
knows, un-sealing), it runs from its checks to its commit without letting others run, and is answered after the commit.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import trio

from ckptfs.attributes import AttributeChange, Attributes, Caller
from ckptfs.errors import (
    ContentUnavailable,
    DirectoryNotEmpty,
    InvalidArgument,
    IsADirectory,
    NameExists,
    NameMissing,
    NotDirectory,
    ReadOnly,
    Stale,
)
from ckptfs.handles import ByteSource, ChangeListener, NoListener, OpenFile, Space, TreeSource
from ckptfs.ids import ROOT_INODE, ImageId, Inode
from ckptfs.local.catalog.names import InodeRow
from ckptfs.local.images import Image
from ckptfs.local.store import Store
from ckptfs.naming import Naming, check_name
from ckptfs.openfiles import OpenFiles
from ckptfs.replica.logs import OpenLog
from ckptfs.saves import SaveTimes
from ckptfs.xattrs import ExtendedAttributes

log = logging.getLogger(__name__)

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
_UNLINKED_JUST_NOW_S = 1.0
_FORGOTTEN_AFTER_S = 0.05
_ATIME_NS = 24 * 3600 * 10**9
"""An atime that is older moves when somebody reads, whatever happened since."""


class FileSystem:
    """The tree of one store."""

    def __init__(
        self,
        store: Store,
        *,
        listener: ChangeListener | None = None,
        source: ByteSource | None = None,
        tree: TreeSource | None = None,
        space: Space | None = None,
        read_only: bool = False,
    ) -> None:
        self.store = store
        self._names = store.names
        self._listener = listener or NoListener()
        self._tree = tree
        self._space = space
        self._read_only = read_only
        self._pins: Counter[Inode] = Counter()
        self._unpurged: set[Inode] = set()
        self._unlinked_here: set[Inode] = set()
        """Without a name because a program here took it away, and not another writer."""
        self._unlinked_at = float("-inf")
        self._unlinked_bytes = 0
        """Of files that were removed a moment ago, and whose room may not be free yet."""
        self._changed_at = -1e9
        self.saves = SaveTimes()
        self.xattrs = ExtendedAttributes(store, self._listener, read_only=read_only)
        self.files = OpenFiles(store, self._listener, source)
        self.files.on_freed = self.purge_if_gone
        self.on_accessed: Callable[[Inode], None] = lambda ino: None
        """Called when atime moved and the kernel, which may have the file's pages, will not see that it was read."""
        self._naming = Naming(store, tombstones=tree is not None, is_flushed=self.files.is_flushed)
        store.sync.is_being_written = self.files.is_being_written
        store.sync.on_flushed = self._flushed

    # Looking

    async def lookup(self, parent: Inode, name: bytes) -> Attributes:
        await self._look(parent)
        if name == b".":
            return self.attributes(self._names.inode(parent))
        if name == b"..":
            above = self._names.parents(parent)
            return self.attributes(self._names.inode(above[0][0] if above else ROOT_INODE))
        check_name(name)
        return self.attributes(self._names.child(parent, name))

    async def getattr(self, ino: Inode) -> Attributes:
        return self.attributes(self._names.inode(ino))

    async def entries(self, directory: Inode) -> list[tuple[bytes, Inode]]:
        """Live entries ordered by name, without . and .."""
        await self._look(directory)
        row = self._names.inode(directory)
        if not stat.S_ISDIR(row.mode):
            raise NotDirectory(f"inode {directory} is not a directory")
        if row.nlink == 0:  # as Linux: a removed directory is not an empty one
            raise NameMissing(f"directory {directory} was removed")
        entries = self._names.entries(directory)
        if not entries and directory == ROOT_INODE and self._tree is not None:
            unknown = self._tree.unknown()
            if unknown is not None:  # empty would read as: nothing was ever saved, start from the beginning
                raise ContentUnavailable(f"what is on the remote is not known: {unknown}")
        self._accessed(row)
        return entries

    def check_named(self, ino: Inode) -> None:
        """Raises Stale when another writer removed or replaced *ino*, whose path the kernel has not looked up since.

        What was removed here is opened by who still has a descriptor of it, or it as working directory.
        """
        if self._names.inode(ino).nlink == 0 and ino not in self._unlinked_here:
            raise Stale(f"inode {ino} has no name any more")

    async def readlink(self, ino: Inode) -> bytes:
        row = self._names.inode(ino)
        if row.target is None:
            raise InvalidArgument(f"inode {ino} is not a symbolic link")
        if self._tree is not None:
            self.check_named(ino)  # a marker that was replaced elsewhere must not name what was removed since
        self._accessed(row)
        return row.target

    def attributes(self, row: InodeRow) -> Attributes:
        """What stat shows of *row*: an unsealed file's size and times are its image's."""
        size, mtime_ns, ctime_ns, blocks = row.size, row.mtime_ns, row.ctime_ns, 0
        if stat.S_ISREG(row.mode):
            blocks = (size + 511) // 512
            status = self._image_status(row)
            if status is not None and row.manifest is None:
                size, mtime_ns = status.st_size, status.st_mtime_ns
                ctime_ns, blocks = max(ctime_ns, status.st_ctime_ns), status.st_blocks
            elif status is not None and row.image_whole == 1:
                blocks = status.st_blocks
        elif stat.S_ISDIR(row.mode):
            size, blocks = 4096, 8
        # 1 says "not counted", and keeps find from concluding that there are no subdirectories.
        nlink = row.nlink if row.expanded or not row.nlink else 1
        whole = row.image_whole == 1 or not stat.S_ISREG(row.mode)
        return Attributes(
            row.ino, row.mode, nlink, row.uid, row.gid, row.rdev, size, blocks, row.atime_ns, mtime_ns, ctime_ns, whole
        )

    def statfs(self) -> os.statvfs_result:
        """The store's disk, with what can make way."""
        disk = os.statvfs(self.store.path)
        return self._space.shown(disk) if self._space is not None else disk

    def listed(self, directory: Inode, names: list[tuple[bytes, Inode]]) -> list[Attributes | None]:
        """What stat shows of each of *names*, some in a row of `entries`; None for one that means another by now.

        Raises NameMissing when the directory itself went meanwhile: it is not one that became empty.
        """
        if self._names.inode(directory).nlink == 0:
            raise NameMissing(f"directory {directory} was removed")
        rows = self._names.rows(directory, names[0][0], names[-1][0])
        return [
            self.attributes(rows[name]) if name in rows and rows[name].ino == ino else None for name, ino in names
        ]

    # Making names

    async def create(
        self, parent: Inode, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[int, Attributes]:
        """A new regular file, open; returns its handle.

        Raises NameExists with O_EXCL; Stale without it, when the name came from another machine since the kernel looked
        it up: it does that again then, and opens the file if its mode allows it.
        """
        await self._before_save()
        await self._before_change(parent)
        try:
            directory = self._naming.check_new(parent, name)
        except NameExists as error:
            if flags & os.O_EXCL:
                raise
            raise Stale(f"{name!r} came to be meanwhile; look it up again and open it") from error
        image = self.store.new_image()
        try:
            with self.store.catalog.transaction():
                self.store.contents.add_image(image.id, whole=True)
                ino = self._naming.add(directory, name, stat.S_IFREG | stat.S_IMODE(mode), caller, image=image.id)
        except BaseException:
            os.close(image.fd)
            self.store.images.delete(image.id)
            raise
        self.store.sync.created(image.id)
        fh = self.files.create(ino, image, flags, privileged=caller.uid == 0)
        self._listener.entry_changed(parent, name)
        await self._sync_if_asked(fh)
        return fh, self.attributes(self._names.inode(ino))

    async def mknod(self, parent: Inode, name: bytes, mode: int, rdev: int, caller: Caller) -> Attributes:
        """A fifo, socket or device; a regular file is created and closed."""
        if stat.S_ISREG(mode):
            fh, attributes = await self.create(parent, name, mode, os.O_WRONLY | os.O_EXCL, caller)
            await self.files.release(fh)
            return attributes
        await self._before_change(parent)
        directory = self._naming.check_new(parent, name)
        with self.store.catalog.transaction():
            ino = self._naming.add(directory, name, mode, caller, rdev=rdev)
        self._listener.entry_changed(parent, name)
        return self.attributes(self._names.inode(ino))

    async def mkdir(self, parent: Inode, name: bytes, mode: int, caller: Caller) -> Attributes:
        await self._before_change(parent)
        directory = self._naming.check_new(parent, name)
        mode = stat.S_IFDIR | stat.S_IMODE(mode) | (directory.mode & stat.S_ISGID)
        with self.store.catalog.transaction():
            ino = self._naming.add(directory, name, mode, caller, dirty=2)
            self._names.update_inode(parent, nlink=directory.nlink + 1)
        self._listener.entry_changed(parent, name)
        return self.attributes(self._names.inode(ino))

    async def symlink(self, parent: Inode, name: bytes, target: bytes, caller: Caller) -> Attributes:
        await self._before_change(parent)
        directory = self._naming.check_new(parent, name)
        with self.store.catalog.transaction():
            ino = self._naming.add(directory, name, stat.S_IFLNK | 0o777, caller, target=target, size=len(target))
        self._listener.entry_changed(parent, name)
        return self.attributes(self._names.inode(ino))

    async def link(self, ino: Inode, parent: Inode, name: bytes) -> Attributes:
        """Another name of *ino*."""
        await self._before_change(parent)
        self._naming.link(ino, parent, name)
        self._listener.entry_changed(parent, name)
        return self.attributes(self._names.inode(ino))

    # Removing and moving names

    async def unlink(self, parent: Inode, name: bytes) -> None:
        await self._before_change(parent)
        row = self._names.child(parent, name)
        if stat.S_ISDIR(row.mode):
            raise IsADirectory(f"{name!r} is a directory")
        dropped = self._naming.remove(parent, name, row)
        self._unlinked(row)
        self.purge_if_gone(*dropped)
        self._listener.entry_changed(parent, name)

    async def rmdir(self, parent: Inode, name: bytes) -> None:
        await self._before_change(parent)
        row = self._names.child(parent, name)
        if not stat.S_ISDIR(row.mode):
            raise NotDirectory(f"{name!r} is not a directory")
        await self._expand(row)
        if not self._names.is_empty(row.ino):
            raise DirectoryNotEmpty(f"{name!r} is not empty")
        if self._names.find(parent, name) != row.ino:
            raise NameMissing(f"{name!r} was moved meanwhile")
        self._naming.remove(parent, name, row)
        self._unlinked(row)
        self._listener.entry_changed(parent, name)

    async def rename(self, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes, flags: int) -> None:
        """rename(2), with RENAME_NOREPLACE and RENAME_EXCHANGE."""
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == RENAME_NOREPLACE | RENAME_EXCHANGE:
            raise InvalidArgument(f"rename flags {flags:#x} are not known")
        await self._before_change(parent)
        await self._before_change(new_parent)
        target_ino = self._names.find(new_parent, new_name)
        if target_ino is not None:
            await self._expand(self._names.inode(target_ino))
        source = self._names.child(parent, name)
        self._naming.check_parent(new_parent)
        check_name(new_name)
        target_ino = self._names.find(new_parent, new_name)
        target = self._names.inode(target_ino) if target_ino is not None else None
        if flags == RENAME_EXCHANGE:
            if target is None:
                raise NameMissing(f"no entry {new_name!r} to exchange with")
            self._naming.check_not_below(target.ino, parent)
        self._naming.check_not_below(source.ino, new_parent)
        if target is not None and flags == RENAME_NOREPLACE:
            raise NameExists(f"{new_name!r} exists")
        if target is not None and target.ino == source.ino:
            return  # two names of one file: rename does nothing
        if target is not None and flags != RENAME_EXCHANGE:
            self._naming.check_replaceable(source, target)
        dropped = self._naming.move(
            parent, name, new_parent, new_name, source, target, exchange=flags == RENAME_EXCHANGE
        )
        if target is not None and flags != RENAME_EXCHANGE:
            self._unlinked(target)
        self.purge_if_gone(*dropped)
        self._listener.entry_changed(parent, name, renamed=parent == new_parent)
        self._listener.entry_changed(new_parent, new_name)

    # Attributes

    async def setattr(self, ino: Inode, change: AttributeChange, fh: int | None, caller: Caller) -> Attributes:
        """chmod, chown, truncate, utimens: whatever *change* names, in one. Nothing at all is a chown to nobody new."""
        self._check_writable()
        row = self._names.inode(ino)
        if change.size is not None:
            await self._truncate(ino, change.size, fh, caller)
            row = self._names.inode(ino)
        columns = change.columns(row, caller)
        if columns:
            columns["ctime_ns"] = time.time_ns()
            if change.mtime_ns is not None and row.manifest is None and row.image is not None:
                self.files.set_times(row, columns.get("atime_ns", row.atime_ns), columns["mtime_ns"])
            with self.store.catalog.transaction():
                self._names.update_inode(ino, **columns)
                self._names.state_changed(ino, self.store.clock.tick())
            self._listener.attributes_changed(ino)
        return self.attributes(self._names.inode(ino))

    # Opening

    async def open(self, ino: Inode, flags: int, caller: Caller) -> int:
        """A handle; `files` does the rest."""
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            self._check_writable()
            await self._before_save()
        self._changed_at = time.monotonic() if flags & os.O_ACCMODE else self._changed_at
        self.check_named(ino)
        fh = await self.files.open(ino, flags, privileged=caller.uid == 0)
        reads = flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_TRUNC
        if reads and self._accessed(self._names.inode(ino)) and self.files.handle(fh).file.backing is None:
            self.on_accessed(ino)
        await self._sync_if_asked(fh)
        return fh

    async def _sync_if_asked(self, fh: int) -> None:
        """With O_SYNC and O_DSYNC the name is durable from here on, since the kernel may write the bytes by itself."""
        if self.files.handle(fh).syncs:
            try:
                await self.files.fsync(fh)
            except BaseException:
                with trio.CancelScope(shield=True):
                    await self.release(fh)
                raise

    async def release(self, fh: int) -> None:
        file = await self.files.release(fh)
        if self._space is not None:
            self._space.used(file.ino)
        self.purge_if_gone(file.ino)

    async def release_all(self) -> None:
        """Nobody has anything open any more: the kernel drops releases that are still queued when it unmounts."""
        for fh in self.files.handles():
            await self.release(fh)

    async def sync_names(self) -> None:
        """fsync of a directory: every name and attribute so far survives a power cut."""
        await self.store.sync.sync()

    # The kernel's memory of inodes

    def pin(self, ino: Inode, count: int = 1) -> None:
        """The kernel knows *ino*: it stays while it does, also without a name."""
        self._pins[ino] += count

    def unpin(self, counts: Sequence[tuple[Inode, int]]) -> None:
        """The kernel forgets (inode, how many of its lookups)."""
        for ino, count in counts:
            self._pins[ino] -= count
            if self._pins[ino] <= 0:
                del self._pins[ino]
        self.purge_if_gone(*(ino for ino, _ in counts))

    # Within

    async def _look(self, directory: Inode) -> None:
        if self._tree is None:
            return
        waiting = self.unchanged_s > 5.0
        await self._tree.fresh(waiting=waiting)
        if not self._names.inode(directory).expanded:
            await self._tree.expand(directory)
            await self._tree.fresh(waiting=waiting)  # others went on meanwhile, and may be halfway

    async def _expand(self, row: InodeRow) -> None:
        if not row.expanded and self._tree is not None:
            await self._tree.expand(row.ino)

    async def _before_change(self, parent: Inode) -> None:
        self._check_writable()
        self._changed_at = time.monotonic()
        await self._expand(self._names.inode(parent))

    async def _before_save(self) -> None:
        if self._unlinked_bytes:
            await self._room_of_removed()
        if self._space is not None and not self._read_only:
            await self._space.make_room()

    async def _room_of_removed(self) -> None:
        """Who removes a file to save another in its room finds it, as on a local disk: where little else is free, wait.

        For the kernel to say that it forgot the file, and for the round of flushes that deletes its image.
        """
        disk, removed_bytes, self._unlinked_bytes = os.statvfs(self.store.path), self._unlinked_bytes, 0
        just_now = time.monotonic() - self._unlinked_at < _UNLINKED_JUST_NOW_S
        if not just_now or disk.f_bavail * disk.f_frsize > 2 * removed_bytes:
            return
        await trio.sleep(_FORGOTTEN_AFTER_S)
        try:
            await self.store.sync.sync()
        except OSError as error:  # whoever fsyncs is told; here it is only that no room comes of it
            log.warning("the room of files that were removed is not free yet: %s", error)

    def _check_writable(self) -> None:
        if self._read_only:
            raise ReadOnly("this mount is read-only")

    def _accessed(self, row: InodeRow) -> bool:
        """Somebody looks into it: atime moves by relatime's rule, and is published with the next change of the entry.

        Whether it moved. The kernel does not tell of reads that it serves itself: opening a file to read it counts.
        """
        now_ns, shown = time.time_ns(), self.attributes(row)
        is_recent = max(shown.mtime_ns, shown.ctime_ns) < row.atime_ns and now_ns - row.atime_ns < _ATIME_NS
        if is_recent or self._read_only:
            return False
        try:
            self._names.update_inode(row.ino, atime_ns=now_ns)
        except OSError as error:  # a full or failing disk: reading goes on
            log.debug("inode %d keeps its atime: %s", row.ino, error)
            return False
        return True

    def _unlinked(self, row: InodeRow) -> None:
        """A name of *row*, as it was before, was taken away by a program."""
        if row.nlink <= 1 or stat.S_ISDIR(row.mode):
            self._unlinked_here.add(row.ino)
        if row.nlink <= 1 and stat.S_ISREG(row.mode):
            self._unlinked_at = time.monotonic()
            self._unlinked_bytes += self.attributes(row).size
        self.purge_if_gone(row.ino)

    def purge_if_gone(self, *inos: Inode) -> None:
        """Remove those without a name, opener or place in the kernel's memory, and images that nobody needs then."""
        gone = [row for ino in dict.fromkeys(inos) if (row := self._gone(ino)) is not None]
        if not gone:
            return
        unneeded: list[ImageId] = []
        try:
            with self.store.catalog.transaction():
                for row in gone:
                    self._names.remove_inode(row.ino)
                    if row.manifest is not None:
                        self.store.contents.drop_unneeded_manifests([row.manifest])
                    if row.image is not None and not self.store.contents.image_is_needed(row.image):
                        self.store.contents.drop_image(row.image)
                        unneeded.append(row.image)
        except OSError as error:
            log.warning("%d inodes have no name any more and are removed later: %s", len(gone), error)
            self._unpurged.update(row.ino for row in gone)
            return
        self._unlinked_here.difference_update(row.ino for row in gone)
        for image in unneeded:
            self.store.sync.delete_later(image)
            self.files.forget_image(image)
        others, self._unpurged = self._unpurged, set()
        self.purge_if_gone(*others)  # there is room again

    def _gone(self, ino: Inode) -> InodeRow | None:
        if self._pins.get(ino) or self.files.get(ino):
            return None
        try:
            row = self._names.inode(ino)
        except NameMissing:
            return None
        return row if row.nlink == 0 and not self.store.replaced.keeps(ino) else None

    def _flushed(self, images: Collection[ImageId]) -> None:
        """*images* are whole on the disk now: what they replaced is kept no longer."""
        waiting = self.store.replaced.images()
        done = {
            image
            for image in waiting
            if image in images or self.files.is_flushed(image) or not self.store.contents.has_image(image)
        }
        if not done:
            return
        try:
            dropped = self.store.replaced.flushed(done)
        except OSError as error:  # a full disk; the next flush does it
            log.warning("what %d flushed images replaced is kept for now: %s", len(done), error)
            return
        self.purge_if_gone(*dropped)

    def release_image(self, image: ImageId) -> None:
        """Drop *image* when no inode and no cut needs it."""
        if not self.store.contents.image_is_needed(image):
            self.store.contents.drop_image(image)
            self.store.sync.delete_later(image)
            self.files.forget_image(image)

    def _image_status(self, row: InodeRow) -> os.stat_result | None:
        file: OpenFile | None = self.files.get(row.ino)
        if file is not None:
            return os.fstat(file.image.fd)
        if row.image is None:
            return None
        try:
            return self.store.images.status(row.image)
        except FileNotFoundError:  # whoever opens it hears that; the names beside it are to be seen
            return None

    # What replication asks (replica.Files)

    def open_logs(self) -> list[OpenLog]:
        """Files that are open and changed, as sealing of logs looks at them."""
        self.files.look()
        return [
            OpenLog(
                file.ino, file.image.id, file.opened_for_write_at, file.fsynced_at, file.lowest_write, file.unwatched
            )
            for file in self.files.files()
            if file.modified and (file.writers or file.held)
        ]

    def forget_writes(self, ino: Inode) -> None:
        file = self.files.get(ino)
        if file:
            file.lowest_write = None

    def is_changing(self, ino: Inode) -> bool:
        """Whether the content is being changed through a handle, so that a merge must not replace it."""
        file = self.files.get(ino)
        return file is not None and (file.modified or file.lock.locked())

    def is_open(self, ino: Inode) -> bool:
        """Whether somebody has *ino* open, or can write it all the same."""
        return self.files.get(ino) is not None

    def content_replaced(self, ino: Inode) -> None:
        """Another writer replaced the content of *ino*. Who has it open goes on with the old one.

        As after a rename over it, its names belong to another inode from then on: the kernel has one size and one page
        cache per inode, in which old and new would mix.
        """
        file = self.files.get(ino)
        if file is None and not self._pins.get(ino):
            return
        with self.store.catalog.transaction():
            self._names.move_names(ino)
            if file is not None:
                self._names.update_inode(ino, size=os.fstat(file.image.fd).st_size)
                file.detached = True

    @property
    def unchanged_s(self) -> float:
        """How long ago a program last made, renamed or removed a name, or opened a file for writing."""
        return time.monotonic() - self._changed_at

    def is_saving(self) -> bool:
        """Whether something is being saved just now."""
        return self.files.is_saving()

    def sparse_images(self) -> list[Image]:
        """Open images that are not whole."""
        return [file.image for file in self.files.files() if not file.image.whole]

    async def _truncate(self, ino: Inode, size: int, fh: int | None, caller: Caller) -> None:
        if fh is not None:
            await self.files.truncate(self.files.handle(fh).file, size, privileged=caller.uid == 0)
            return
        if not stat.S_ISREG(self._names.inode(ino).mode):
            raise InvalidArgument("only regular files have a size to set")
        file = await self.files.borrow(ino, emptied=size == 0)
        try:
            await self.files.truncate(file, size, privileged=caller.uid == 0, replaces=size == 0)
        finally:
            self.files.give_back(file)
