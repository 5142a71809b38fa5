"""Real mounts through the real command, in a directory of the test's own, always cleaned up.

    with Site(tmp_path) as site:
        site.mount("--remote", url)
        (site.mountpoint / "file").write_bytes(b"...")
        site.umount()

Nothing here waits for ever: commands have a timeout and are killed with everything they started; at the end every
daemon is killed by its pid and the mountpoints are detached, however the test went.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "ckptfs_mount")
COMMAND_S = 60.0
"""Longest that a command may take."""

TINY = {
    "piece_bytes": 4096,
    "small_bytes": 1024,
    "cdc_bytes": 2048,
    "pack_bytes": 32768,
    "inline_bytes": 256,
    "tree_entries": 8,
    "retry_first_s": 0.05,
    "retry_most_s": 0.5,
}
"""Tuning with which kilobytes cross every boundary."""

_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err


class Site:
    """One mountpoint with its store below *directory*. Use as a context manager."""

    def __init__(
        self,
        directory: Path,
        *,
        environment: Mapping[str, str] | None = None,
        name: str = "mnt",
        tuning: Mapping[str, object] | None = None,
    ) -> None:
        """*environment* is added to this process's; *tuning* (such as `TINY`) is what the store starts with."""
        self.mountpoint = directory / name
        self.store = directory / f"{name}-store"
        self.environment = {
            **{key: value for key, value in os.environ.items() if _is_passed_on(key)},
            "XDG_DATA_HOME": str(directory / "xdg"),
            **(environment or {}),
        }
        self._pids: set[int] = set()
        if tuning is not None:
            self.store.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.store / "settings.json").write_text(json.dumps({"tuning": dict(tuning)}))

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._pids | self._lock_holder():
            end(pid)
        while is_mounted(self.mountpoint):
            if _libc.umount2(os.fsencode(self.mountpoint), _MNT_DETACH) != 0:
                subprocess.run(["fusermount3", "-u", "-z", str(self.mountpoint)], timeout=COMMAND_S, check=False)

    def run(self, *arguments: str, timeout_s: float = COMMAND_S, **environment: str) -> Done:
        """Run `ckptfs` with *arguments*; TimeoutExpired, with everything it started killed, when it takes too long."""
        return run([*COMMAND, *arguments], {**self.environment, **environment}, timeout_s)

    def mount(self, *options: str, **environment: str) -> Done:
        """Mount, and fail with the command's words if that fails. --force, because a test's disk may be tmpfs."""
        done = self.try_mount(*options, **environment)
        assert done.status == 0, done.said
        return done

    def try_mount(self, *options: str, **environment: str) -> Done:
        done = self.run("mount", str(self.mountpoint), "--store", str(self.store), "--force", *options, **environment)
        self._pids |= self._lock_holder()
        return done

    def umount(self, *options: str, status: int = 0) -> Done:
        """Unmount; the exit status must be *status*."""
        done = self.run("umount", str(self.mountpoint), *options)
        assert done.status == status, done.said
        return done

    def spawn(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `ckptfs` and do not wait for it; whoever calls this ends it (`Popen` is a context manager)."""
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._pids.add(process.pid)
        return process

    def status(self) -> dict[str, Any]:
        done = self.run("status", "--json", str(self.mountpoint))
        assert done.status == 0, done.said
        document: dict[str, Any] = json.loads(done.out)
        return document

    def has_passthrough(self) -> bool:
        """Whether the kernel reads and writes whole files itself."""
        return bool(self.status()["mount"]["passthrough"]["state"] == "on")

    def pid(self) -> int:
        """Of the daemon."""
        return int((self.store / "lock").read_text())

    def daemon(self) -> int | None:
        """The pid of the daemon that has the store, None when there is none."""
        return next(iter(self._lock_holder()), None)

    def gone(self, timeout_s: float) -> bool:
        """Wait until the daemon has ended by itself; whether it did within *timeout_s*."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.daemon() is None:
                return True
            time.sleep(0.02)
        return False

    def kill(self) -> None:
        """SIGKILL the daemon and wait until it is gone; its mount is dead then."""
        end(self.pid())

    def log(self) -> str:
        """What the daemon wrote."""
        return (self.store / "daemon.log").read_text(errors="replace")

    def _lock_holder(self) -> set[int]:
        try:
            pid = self.pid()
        except (OSError, ValueError):
            return set()
        return {pid} if _is_ours(pid) else set()


def run(command: list[str], environment: Mapping[str, str] | None = None, timeout_s: float = COMMAND_S) -> Done:
    """Run *command* in a process group of its own, killed whole when it takes longer than *timeout_s*."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Done(process.returncode, out, err)


def is_mounted(mountpoint: Path) -> bool:
    """Whether something, dead or alive, is mounted there; never touches it."""
    escaped = str(mountpoint).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011").replace("\n", "\\012")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        return any(line.split(" ")[4] == escaped for line in table)


def is_alive(pid: int) -> bool:
    """Whether process *pid* runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def end(pid: int) -> None:
    """SIGKILL *pid*, if it is one of our daemons, and wait until it is gone."""
    if _is_ours(pid):
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_alive(pid), f"process {pid} to end")


def until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Look until *condition* holds; fails, saying *what* was awaited, after *timeout_s*."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.02)


def peak_bytes(pid: int) -> int:
    """The most that process *pid* ever had resident."""
    return _memory(pid, "VmHWM")


def resident_bytes(pid: int) -> int:
    """What process *pid* has resident now."""
    return _memory(pid, "VmRSS")


def _memory(pid: int, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _is_passed_on(variable: str) -> bool:
    """CKPTFS_PASSTHROUGH=off makes a whole test run daemon-served; nothing else of ours may change what tests do."""
    return variable == "CKPTFS_PASSTHROUGH" or not variable.startswith(("CKPTFS_", "PYTHONWARNINGS"))


def _is_ours(pid: int) -> bool:
    # A pid in a lock file may be long gone and given to somebody else.
    try:
        return is_alive(pid) and b"ckptfs_mount" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
