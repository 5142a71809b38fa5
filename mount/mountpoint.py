"""The directory that people see: may it be mounted on, is it dead, who keeps it busy, how it is unmounted.

Knows no store and no daemon. Nothing here waits on a mount that might hang: processes are found by reading links in
/proc, never by touching the files they have open.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ckptfs.errors import MountError
from ckptfs.local.mountinfo import CKPTFS_TYPE, Mount, mount_of, mounts, parse

_CAP_SYS_ADMIN = 21  # linux/capability.h
_MNT_DETACH, _UMOUNT_NOFOLLOW = 0x2, 0x8  # sys/mount.h
_FUSE_DEVICE = Path("/dev/fuse")
_FUSE_CONF = Path("/etc/fuse.conf")

_READ_AHEAD_KIB, _COLD_READ_AHEAD_KIB = 1024, 256

_UNSEEN = (
    "a process that cannot be seen from here: another user's, or one that waits in open() for what only the remote has"
)

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)


class MountBusy(MountError):
    """Somebody uses the mount; `users` are those that /proc shows."""

    def __init__(self, mountpoint: str, users: list[User]) -> None:
        who = [f"pid {user.pid} ({user.command}: {user.why})" for user in users]
        who += [f"the mount on {each}" for each in mounts_below(mountpoint)]
        super().__init__(f"{mountpoint} is in use by {', '.join(who) or _UNSEEN}")
        self.users = users


@dataclass(frozen=True)
class User:
    """A process that keeps a mount busy."""

    pid: int
    command: str
    why: str
    """`working directory`, `root`, or one of the files it has open or mapped."""


def mounted_at(mountpoint: str) -> Mount | None:
    """The topmost mount made exactly on *mountpoint* (absolute and resolved), None when there is none."""
    found = mount_of(mountpoint)
    return found if found is not None and found.mountpoint == mountpoint else None


def is_dead(mountpoint: str) -> bool:
    """Whether *mountpoint* is a FUSE mount whose daemon is gone ("Transport endpoint is not connected")."""
    try:
        os.statvfs(mountpoint)  # always asks the daemon; stat may be answered from the kernel's memory of a dead one
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def resolve(path: str) -> str:
    """*path* made absolute, its parents' symbolic links followed; works on dead mounts, which cannot be examined."""
    parent, name = os.path.split(os.path.abspath(path))
    if os.path.islink(path) and not is_dead(path):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(parent), name)


def clear_dead(mountpoint: str) -> bool:
    """Unmount dead ckptfs mounts on *mountpoint*, also several on top of each other; whether there were any.

    Raises MountError when a dead mount of another file system is in the way.
    """
    cleared = False
    while is_dead(mountpoint):
        found = mounted_at(mountpoint)
        if found is None:
            raise MountError(f"{mountpoint} lies in a mount whose daemon is gone: unmount that first")
        if found.type != CKPTFS_TYPE:
            raise MountError(f"{mountpoint} holds a dead {found.type} mount, which is not ours: unmount it first")
        unmount(mountpoint, lazy=True)
        cleared = True
    return cleared


def prepare(mountpoint: str) -> bool:
    """See that *mountpoint* is an empty directory of ours, and create it when missing; whether it was created.

    Raises MountError with what is wrong.
    """
    try:
        os.makedirs(mountpoint, mode=0o755)
        return True
    except FileExistsError:
        pass
    except OSError as error:
        raise MountError(f"cannot create {mountpoint}: {error.strerror}") from error
    try:
        if not os.path.isdir(mountpoint):
            raise MountError(f"{mountpoint} is not a directory")
        found = mounted_at(mountpoint)
        if found is not None:
            raise MountError(f"{mountpoint} already holds a mount of {found.source} ({found.type})")
        with os.scandir(mountpoint) as entries:
            if next(entries, None) is not None:
                raise MountError(
                    f"{mountpoint} is not empty: its files would be hidden; choose another directory or move them"
                )
    except OSError as error:
        raise MountError(f"{mountpoint}: {error.strerror}") from error
    if os.geteuid() != 0 and not os.access(mountpoint, os.W_OK):
        raise MountError(f"{mountpoint} is not writable for you, so you may not mount on it")
    return False


def check_fuse(allow_other: bool) -> None:
    """See that this process may mount FUSE file systems, with *allow_other* if asked; raises MountError if not."""
    if not _FUSE_DEVICE.exists():
        raise MountError(
            "/dev/fuse is missing: load the kernel module (modprobe fuse), or give the container the device "
            "(docker run --device /dev/fuse --cap-add SYS_ADMIN)"
        )
    root = os.geteuid() == 0
    try:
        os.close(os.open(_FUSE_DEVICE, os.O_RDWR))
    except OSError as error:
        remedy = (
            "give the container the device (docker run --device /dev/fuse --cap-add SYS_ADMIN)"
            if root
            else "its usual mode is 0666 (chmod 666 /dev/fuse, as root)"
        )
        raise MountError(f"/dev/fuse cannot be opened ({error.strerror}): {remedy}") from error
    if root:
        if not has_sys_admin():
            raise MountError(
                "this root may not mount (no CAP_SYS_ADMIN): start the container with --cap-add SYS_ADMIN"
            )
        return
    if shutil.which("fusermount3") is None:
        raise MountError("fusermount3 is missing: install the package fuse3")
    if allow_other and "user_allow_other" not in _fuse_conf():
        raise MountError("--allow-other needs the line user_allow_other in /etc/fuse.conf, or root")


def unmount(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmount *mountpoint*; *lazy* detaches it even while it is in use.

    Raises MountBusy with those who use it, and MountError when it cannot be unmounted for another reason.
    """
    if os.geteuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        if _libc.umount2(os.fsencode(mountpoint), flags) == 0:
            return
        number = ctypes.get_errno()
        busy, said = number == errno.EBUSY, os.strerror(number)
    else:
        command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", mountpoint]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        except FileNotFoundError as error:
            raise MountError("fusermount3 is missing: install the package fuse3") from error
        if done.returncode == 0:
            return
        said = done.stderr.strip().removeprefix("fusermount3: ") or f"fusermount3 failed ({done.returncode})"
        busy = "busy" in said
    if mounted_at(mountpoint) is None:
        return  # somebody else was faster
    if busy:
        raise MountBusy(mountpoint, users(mountpoint))
    raise MountError(f"cannot unmount {mountpoint}: {said}")


def users(mountpoint: str) -> list[User]:
    """The processes that keep *mountpoint* busy, as far as this user may look into them; not this process."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        process = Path("/proc", name)
        why = _why(process, mountpoint)
        if why is not None:
            found.append(User(int(name), _command(process), why))
    return found


def mounts_below(mountpoint: str) -> list[str]:
    """The mountpoints below *mountpoint*: they keep it busy too, and have no pid."""
    return [mount.mountpoint for mount in mounts() if mount.mountpoint.startswith(mountpoint.rstrip("/") + "/")]


def elsewhere(device: str) -> list[User]:
    """One process of each other mount namespace that has the mount of *device*, as far as this user may look there."""
    found, seen = [], {_target(Path("/proc/self/ns/mnt"))}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        process = Path("/proc", name)
        namespace = _target(process / "ns" / "mnt")
        if not namespace or namespace in seen:
            continue
        seen.add(namespace)
        try:
            table = parse((process / "mountinfo").read_bytes())
        except OSError:
            continue  # gone
        places = [each.mountpoint for each in table if each.device == device and each.type == CKPTFS_TYPE]
        if places:
            found.append(User(int(name), _command(process), f"mounted on {places[-1]}"))
    return found


def _why(process: Path, mountpoint: str) -> str | None:
    for link, words in (("cwd", "working directory"), ("root", "root directory")):
        if _inside(_target(process / link), mountpoint):
            return words
    try:
        for descriptor in os.listdir(process / "fd"):
            target = _target(process / "fd" / descriptor)
            if _inside(target, mountpoint):
                return target
    except OSError:
        pass  # another user's, or gone
    try:
        for line in (process / "maps").read_bytes().splitlines():
            path = os.fsdecode(line.split(b" ", 5)[-1].strip())
            if _inside(path, mountpoint):
                return path
    except OSError:
        pass
    return None


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _inside(path: str, mountpoint: str) -> bool:
    return path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")


def _command(process: Path) -> str:
    try:
        return (process / "comm").read_text(errors="replace").strip()
    except OSError:
        return "?"


def has_sys_admin() -> bool:
    """Whether this process has CAP_SYS_ADMIN, which mounting and passthrough ask for."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return True


def _fuse_conf() -> set[str]:
    try:
        return {line.strip() for line in _FUSE_CONF.read_text().splitlines()}
    except OSError:
        return set()


def raise_read_ahead(device: int, *, cold_only: bool) -> None:
    """Let the kernel read ahead more at a time than 128 KiB on the mount with this device number.

    They cost a request each: 512 MiB were read at 0.6 GB/s, with the largest request, 1 MiB, at 1.2, for half the CPU.
    But half of that is also read before, and more behind, whatever a program touches in a map. That must not be fetched
    in vain, so it is less where *cold_only* files come to us, those with bytes elsewhere. Root may change it; anybody
    else's mount keeps what the kernel chose.
    """
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        setting.write_text(f"{_COLD_READ_AHEAD_KIB if cold_only else _READ_AHEAD_KIB}\n")
    except OSError as error:
        log.debug("%s stays as it is: %s", setting, error)
