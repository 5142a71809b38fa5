"""The store: the local directory of one mount, opened by one daemon at a time.

    catalog.db  images/  lost+found/  settings.json  lock  ballast  daemon.log  control.sock

Opening takes the lock, migrates the catalog and recovers from whatever the last stop left behind. What the parts mean
belongs to `catalog` and `images`; whether the disk is fit belongs to `probe`.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

from ckptfs.config import Settings, Tuning
from ckptfs.errors import StoreError
from ckptfs.ids import Clock, ImageId, WriterId, new_writer_id
from ckptfs.local.ballast import NAMES_LEAVE, Ballast
from ckptfs.local.catalog.catalog import SPARE_BYTES, Catalog
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.names import Names
from ckptfs.local.catalog.recovery import Recovery
from ckptfs.local.catalog.replaced import Replaced
from ckptfs.local.groupsync import GroupSync
from ckptfs.local.images import Image, Images

log = logging.getLogger(__name__)

LOST_AND_FOUND_S = 24 * 3600.0
"""How long an image without a row is kept: long enough that somebody who misses a file can ask."""

ROOM_BYTES = 256 << 10
"""Free on the disk when a name is made, from the ballast if need be: each costs the catalog a few pages."""
_OPENING_BYTES = 512 << 10
"""What opening takes: the catalog's log and its index, the settings, the daemon's log."""
_BLOCK_BYTES = 4096


class Store:
    """An open store. Use `Store.open`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self.settings = read_settings(path / "settings.json")
        self.ballast = Ballast(path / "ballast")
        self.ballast.give(_OPENING_BYTES)
        self.catalog = Catalog(path / "catalog.db", self.ballast.allocate)
        roomy = self.ballast.free_bytes() > 4 * self.ballast.full_bytes
        self.catalog.reserve(self.ballast.full_bytes if roomy else self.ballast.full_bytes // 4)
        self.ballast.take()
        self.names = Names(self.catalog)
        self.contents = Contents(self.catalog)
        self.replaced = Replaced(self.catalog, self.names, self.contents)
        self._recovery = Recovery(self.catalog)
        self.images = Images(path / "images")
        self.unowned: set[ImageId] = set()
        """Images with a row that are being made, and that no file or cut has yet."""
        self.unreadable: set[ImageId] = set()
        """Images that the disk did not give when they were to be sealed."""
        self.sync = GroupSync(self.catalog, self.images, self.contents.forget_images)
        self.sync.on_poisoned = self._poisoned
        self.clock = Clock()
        self.writer = WriterId(b"")

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> Store:
        """Open (or *create*) the store at *path* and recover it.

        Raises StoreError when it does not exist, is in use (naming the pid), is damaged or newer than this program.
        """
        if not path.is_dir():
            if not create:
                raise StoreError(f"there is no store at {path}")
            _make_durably(path)
        lock_fd = _lock(path)
        store = cls.__new__(cls)
        try:
            store.__init__(path, lock_fd)  # type: ignore[misc]
            store._recover()
            sync_directory(path)  # what was made in it
        except BaseException:
            os.close(lock_fd)
            raise
        return store

    def check_room(self) -> None:
        """Raises OSError (ENOSPC) when the disk is too full for another name: what is left is for deleting."""
        room = self.ballast.give(ROOM_BYTES, keeping=NAMES_LEAVE)
        if room and not self.ballast.is_full:  # what the name takes must not be taken from deleting
            room = (
                self.catalog.reserve(SPARE_BYTES + ROOM_BYTES, keeping=NAMES_LEAVE)
                or self.ballast.free_bytes() > 8 * ROOM_BYTES
            )
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self.path))

    def new_image(self) -> Image:
        """An empty image for a new file version. On a full disk too it has room for what a pointer such as `latest` is.

        Raises OSError.
        """
        self.ballast.give(ROOM_BYTES, keeping=NAMES_LEAVE)
        image = self.images.create()
        if not self.ballast.is_full:
            self.ballast.allocate(image.fd, 0, _BLOCK_BYTES, keeping=NAMES_LEAVE)
        return image

    def save_settings(self, settings: Settings) -> None:
        """Remember *settings* for the next mount; of `tuning` what somebody changed, so that defaults may improve."""
        self.settings = settings
        usual = dataclasses.asdict(Tuning())
        document = dataclasses.asdict(settings)
        document["tuning"] = {name: value for name, value in document["tuning"].items() if value != usual[name]}
        replace_file(self.path / "settings.json", json.dumps(document, indent=1).encode())

    def new_writer(self) -> WriterId:
        """Become another writer: this store was cloned or restored, its sequence may have been used elsewhere."""
        self.writer = new_writer_id()
        self._recovery.become(self.writer)
        self.catalog.set_setting("place", self._place())
        return self.writer

    def close(self) -> None:
        self.catalog.close()
        self.ballast.sleep()
        self.ballast.close()
        os.close(self._lock_fd)

    def _poisoned(self, image: ImageId) -> None:
        try:
            self.contents.poison(image)
        except OSError as error:
            log.error("that image %016x was not flushed is forgotten with the next stop: %s", image, error)

    def _recover(self) -> None:
        self._recovery.ensure_root()
        self.clock.see(self._recovery.newest_stamp())
        known = self._recovery.own_id()
        boot = _boot()
        power_cut = known is not None and (
            self.catalog.get_setting("place") != self._place() or self.catalog.get_setting("boot") != boot
        )
        with self.catalog.transaction():
            self._recover_replaced(power_cut)
            self.catalog.set_setting("boot", boot)
        if known is None:
            self.new_writer()
        elif self.catalog.get_setting("place") != self._place():
            log.warning("%s was copied or moved: it goes on as a new writer", self.path)
            self.new_writer()
        else:
            self.writer = known
        with self.catalog.transaction():
            for ino in self.names.orphans():
                if self.replaced.keeps(ino):
                    continue
                manifest = self.names.inode(ino).manifest
                self.names.remove_inode(ino)
                if manifest is not None:
                    self.contents.drop_unneeded_manifests([manifest])
        if power_cut:
            self._recovery.forget_unneeded_manifests()
        self._recover_images()
        if not power_cut:
            for image in self.contents.unsealed_images():
                if self.images.has(image):  # damage may name one that never was, and has no folder to flush
                    self.sync.created(image)

    def _recover_replaced(self, power_cut: bool) -> None:
        """Take back what replaced something and may not be on the disk: all of it when the power was cut.

        After a kill, and what is here was written by this boot's kernel, everything is there but what could not be
        flushed. It is flushed soon.
        """
        poisoned = self.contents.poisoned()
        doubtful = None if power_cut else poisoned
        for each in self.replaced.undo(doubtful, time.time_ns(), self.clock.tick()):
            log.warning("%s is as it was before it was replaced: what replaced it had not been flushed when the machine"
                        " stopped, and is kept in lost+found as %016x", os.fsdecode(each.path), each.image)  # fmt: skip
            self._recovery.disown(each.image)
        for image in self.contents.poisoned():
            self.sync.poisoned[image] = OSError(errno.EIO, "a flush failed before the last stop")

    def _place(self) -> str:
        """Where this catalog is: a copy or a restored backup has another inode, device or machine."""
        try:
            machine = Path("/etc/machine-id").read_text().strip()
        except OSError:
            machine = ""
        status = os.stat(self.catalog.path)
        return f"{machine}:{status.st_dev}:{status.st_ino}"

    def _recover_images(self) -> None:
        known = self.contents.images()
        found = set(self.images.ids())
        lost = self.path / "lost+found"
        lost.mkdir(exist_ok=True, mode=0o700)
        for path in lost.iterdir():
            if path.is_file() and path.stat().st_mtime < time.time() - LOST_AND_FOUND_S:
                path.unlink()
        for image in found - known:
            path = self.images.path(image)
            if self._recovery.restore_image_row(image):
                log.error("image %016x had no row in the catalog, and a file needs it: it has one again", image)
                known.add(image)
            elif path.stat().st_blocks == 0:  # killed between creating it and its row
                path.unlink()
            else:
                log.warning("image %016x has no row in the catalog: moved to %s", image, lost)
                shutil.move(path, lost / path.name)
                os.utime(lost / path.name)
        for image in known:
            if not self.contents.image_is_needed(image):
                self.contents.drop_image(image)
                self.sync.delete_later(image)
            elif image not in found:
                self._recover_lost_image(image)

    def _recover_lost_image(self, image: ImageId) -> None:
        """A power cut took an image's name: a sealed file is read from the remote, an unsealed one is empty."""
        log.error("image %016x is gone from the disk", image)
        if self._recovery.forget_lost_image(image):
            path = self.images.path(image)
            path.parent.mkdir(exist_ok=True, mode=0o700)
            path.touch(0o600)


def _boot() -> str:
    """What is another one after each start of the machine, and with it after each power cut."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _make_durably(path: Path) -> None:
    """Make a directory, and those above it, so that they survive a power cut."""
    if path.is_dir():
        return
    _make_durably(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make what was made in *path* survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Replace *path* by *data* so that a power cut leaves the old or the new, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def _lock(path: Path) -> int:
    """The descriptor that holds the store's lock. Raises StoreError naming the holder's pid."""
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreError(f"store {path} is in use by process {pid}: unmount it there first") from None
    os.ftruncate(fd, os.pwrite(fd, f"{os.getpid()}\n".encode(), 0))  # over what is there: the disk may be full
    return fd


def read_settings(path: Path) -> Settings:
    """Raises StoreError when the file is damaged. Fields that this version does not know are ignored."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        tuning = document.pop("tuning", {})
        return Settings(
            tuning=Tuning(**_known(Tuning, tuning)),
            **_known(Settings, document),
        )
    except FileNotFoundError:
        return Settings()
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is damaged ({error}): delete it to go back to the defaults") from error


def _known(kind: Any, document: dict[str, Any]) -> dict[str, Any]:
    names = {each.name for each in dataclasses.fields(kind)}
    return {name: value for name, value in document.items() if name in names}
