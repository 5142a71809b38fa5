"""The real daemon, noting how many bytes each read of the kernel asks for: `python -m tests.support.counted mount ...`.

One line for each in the file that CKPTFS_READS names. Reads that the kernel does itself (passthrough) are not seen.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.mounts import COMMAND_S, Site, is_mounted, until

Reads = Callable[[], list[int]]
"""The sizes so far, in bytes."""


@contextmanager
def counted(site: Site, *options: str) -> Iterator[Reads]:
    """Mount *site* with *options* and count, until the block ends."""
    noted = site.store.with_name(f"{site.store.name}-reads")
    noted.touch()
    command = [sys.executable, "-m", __name__, "mount", str(site.mountpoint), "--store", str(site.store), "--force"]
    daemon = subprocess.Popen(
        [*command, "--foreground", *options],
        cwd=Path(__file__).parents[2],
        env={**site.environment, "CKPTFS_READS": str(noted)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: is_mounted(site.mountpoint) and "mounted" in site.log(), "the mount")
        yield lambda: [int(line) for line in noted.read_text().splitlines()]
        site.umount("--no-wait")
        daemon.wait(COMMAND_S)
    finally:
        daemon.kill()
        daemon.wait(30)


def count() -> None:
    from ckptfs_mount.errnos import replies
    from ckptfs_mount.operations import Operations

    original: Callable[..., Any] = inspect.unwrap(Operations.read)
    noted = os.open(os.environ["CKPTFS_READS"], os.O_WRONLY | os.O_APPEND)

    async def read(self: Operations, fh: int, off: int, size: int) -> Any:
        os.write(noted, b"%d\n" % size)
        return await original(self, fh, off, size)

    Operations.read = replies(read)  # type: ignore[method-assign]


if __name__ == "__main__":
    from ckptfs_mount.cli import main

    count()
    main()
