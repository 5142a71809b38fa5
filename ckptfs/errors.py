"""Every error that ckptfs raises, as one tree; catch at any level.

    CkptfsError
    ├── FileSystemError            an operation on names, inodes or open files was refused
    │   ├── NameMissing            no such name (or the inode is gone)
    │   ├── NameExists             the name is taken
    │   ├── NotDirectory           a directory was needed
    │   ├── IsADirectory           something other than a directory was needed
    │   ├── DirectoryNotEmpty
    │   ├── NameTooLong
    │   ├── AttributeMissing       no such extended attribute
    │   ├── NotPermitted           the operation is not allowed on this object
    │   ├── ReadOnly               the mount, or this handle, does not write
    │   ├── InvalidArgument
    │   ├── NotSupported
    │   ├── TooManyLinks
    │   └── ContentUnavailable     bytes exist but cannot be had: remote down or damaged, image poisoned
    ├── StoreError                 the local store cannot be used (in use, wrong disk, damaged, newer version)
    │   └── StoreFull              its disk has no room for what was to be brought there
    ├── MountError                 a directory cannot be mounted, unmounted or found to be a mount
    ├── FormatError                stored bytes do not decode, or their digest differs
    └── RemoteError                the object store; `temporary` says whether to try again
        ├── ObjectMissing
        ├── ObjectExists           a conditional put found the key taken
        ├── RemoteForbidden        credentials or policy; heals when they change, so `temporary`
        └── RemoteUnusable         another format, no such bucket, not a ckptfs prefix

The library knows no errno: `mount/errnos.py` holds the one table that turns these into numbers. OSError from the
local disk (ENOSPC, EIO) is passed through as it is.
"""

from __future__ import annotations


class CkptfsError(Exception):
    """Base of everything below. The message says what happened, to what, and what to do next."""


class FileSystemError(CkptfsError):
    """An operation on the file system was refused."""


class NameMissing(FileSystemError):
    """No such name, or an inode that no longer exists."""


class Stale(FileSystemError):
    """What was looked up is no longer so: an inode lost its content to another writer, or a free name was taken."""


class NameExists(FileSystemError):
    """The name is already taken."""


class NotDirectory(FileSystemError):
    """A directory was needed."""


class IsADirectory(FileSystemError):
    """Something other than a directory was needed."""


class DirectoryNotEmpty(FileSystemError):
    """The directory still has entries."""


class NameTooLong(FileSystemError):
    """A name of more than 255 bytes."""


class AttributeMissing(FileSystemError):
    """No such extended attribute."""


class NotPermitted(FileSystemError):
    """The operation is not allowed on this object."""


class ReadOnly(FileSystemError):
    """The mount is read-only."""


class InvalidArgument(FileSystemError):
    """An argument makes no sense for this object."""


class NotSupported(FileSystemError):
    """The operation exists, but not here."""


class TooManyLinks(FileSystemError):
    """A hard link too many."""


class ContentUnavailable(FileSystemError):
    """The bytes exist but cannot be had now: the remote is down or damaged, or a flush of the image failed."""

    @property
    def is_damage(self) -> bool:
        """Whether the remote answers, and has not what it should: that says nothing of other bytes."""
        return isinstance(self.__cause__, FormatError | ObjectMissing)


class StoreError(CkptfsError):
    """The local store cannot be used."""


class StoreFull(StoreError):
    """The store's disk has no room for what was to be brought there."""


class MountError(CkptfsError):
    """A directory cannot be mounted or unmounted, or no ckptfs is mounted there."""


class FormatError(CkptfsError):
    """Stored bytes do not decode, or are not what their name says."""


class RemoteError(CkptfsError):
    """The object store failed.

    `temporary` is True when the same request may succeed later without anybody's help.
    """

    def __init__(self, message: str, *, key: str | None = None, temporary: bool = False) -> None:
        super().__init__(message)
        self.key = key
        self.temporary = temporary


class ObjectMissing(RemoteError):
    """No object has this key."""


class ObjectExists(RemoteError):
    """A conditional put found the key taken."""


class RemoteForbidden(RemoteError):
    """The remote refuses these credentials. New ones may come, so it counts as temporary."""

    def __init__(self, message: str, *, key: str | None = None, temporary: bool = True) -> None:
        super().__init__(message, key=key, temporary=temporary)


class RemoteUnusable(RemoteError):
    """Another format, no such bucket, or a prefix that holds something else."""
