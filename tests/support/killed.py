"""The real command, which is killed at its n-th step: `python -m tests.support.killed N fsck --repair ...`.

A step is what changes something that outlives the process: a file operation, or a commit of the catalog. It is killed
before that, or halfway through a write. With N = 0 nothing kills it; it writes the number of its steps to stderr.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ckptfs.local.catalog import catalog
from ckptfs_mount.cli import main

WRITES = ("pwrite", "write")
CHANGES = ("truncate", "ftruncate", "rename", "replace", "link", "unlink", "mkdir", "fsync", "fdatasync")


class Steps:
    """Counts, from any thread, and kills when it is time."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._numbers = itertools.count(1)
        self.taken = 0

    def take(self) -> None:
        self.taken = next(self._numbers)
        if self.taken == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, change: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(change)
        def counted(*arguments: Any, **options: Any) -> Any:
            self.take()
            return change(*arguments, **options)

        return counted

    def amid(self, write: Callable[..., int]) -> Callable[..., int]:
        """Two steps: nothing is written yet, and half of it is."""

        def halved(fd: int, data: Any, *where: int) -> int:
            self.take()
            view = memoryview(data).cast("B")
            written = write(fd, view[: len(view) // 2], *where)
            self.take()
            return written + write(fd, view[written:], *(at + written for at in where))

        return halved


def count(steps: Steps) -> None:
    for name in CHANGES:
        setattr(os, name, steps.before(getattr(os, name)))
    for name in WRITES:
        setattr(os, name, steps.amid(getattr(os, name)))
    leave = catalog._Transaction.__exit__

    def commits(transaction: Any, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None and transaction._depth == 1:
            steps.take()
        leave(transaction, kind, *rest)

    catalog._Transaction.__exit__ = commits  # type: ignore[method-assign]


if __name__ == "__main__":
    steps = Steps(int(sys.argv.pop(1)))
    count(steps)
    try:
        main()
    finally:
        print(f"{steps.taken} steps", file=sys.stderr)
