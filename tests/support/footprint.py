"""What a daemon takes of the machine's memory, together with its background process and the packs between them.

Packs lie in files of memory (memfd) that both know and the kernel counts to neither until it touches them.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

_WORKER = b"ckptfs.background.worker"
_OWN = re.compile(r"^(?:RssAnon|RssFile):\s+(\d+) kB", re.M)
_PACK = "/memfd:ckptfs-pack"
_LOOK_EVERY_S = 0.02


def background_of(pid: int) -> int | None:
    """The pid of the background process of daemon *pid*, None when it has none now."""
    for child in _children(pid):
        try:
            if _WORKER in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return child
        except OSError:
            continue
    return None


def taken_bytes(pid: int) -> int:
    """Resident bytes of daemon *pid* and its background process, and of their packs; libraries count for each."""
    worker = background_of(pid)
    return _own_bytes(pid) + (_own_bytes(worker) if worker else 0) + sum(_packs(pid).values())


class Footprint:
    """Looks at what daemon *pid* takes, fifty times a second, for the length of a `with` block."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.most_bytes = 0

    def __enter__(self) -> Footprint:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            try:
                self.most_bytes = max(self.most_bytes, taken_bytes(self._pid))
            except (FileNotFoundError, ProcessLookupError):
                return  # it has ended


def _children(pid: int) -> list[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return [int(each) for task in tasks for each in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _own_bytes(pid: int) -> int:
    try:
        return 1024 * sum(map(int, _OWN.findall(Path(f"/proc/{pid}/status").read_text())))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _packs(pid: int) -> dict[int, int]:
    """Bytes of each pack by inode: those being built, which are open, and those being put, which are mapped."""
    found: dict[int, int] = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(_PACK):
                status = os.stat(f"/proc/{pid}/fd/{fd}")
                found[status.st_ino] = 512 * status.st_blocks
        except FileNotFoundError:
            continue
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if _PACK in line:
            span, _, _, _, inode, _ = line.split(None, 5)
            start, end = (int(each, 16) for each in span.split("-"))
            found[int(inode)] = end - start
    return found
