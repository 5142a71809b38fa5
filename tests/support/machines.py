"""Several machines that share one remote: each a `Site` with a store and, if wanted, a way to the server of its own.

What they hold is compared as a user sees it (`census`): every name, type, size, mode, time and byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.conftest import Bucket
from tests.support.mounts import TINY, Site, until
from tests.support.proxy import FaultProxy

QUICK = ("--settle", "100ms", "--lag", "100ms")
"""What other machines see is fresh within a tenth of a second."""


class Machines:
    """Machines of one test below *directory*, all replicating to the same prefix of *bucket*."""

    def __init__(self, directory: Path, bucket: Bucket, stack: ExitStack) -> None:
        self._directory = directory
        self._bucket = bucket
        self._stack = stack
        self.url = f"{bucket.url}/run"
        self.environment = bucket.environment
        """The way to it that never misbehaves, as AWS_* variables."""

    def proxy(self) -> FaultProxy:
        """A way to the server that misbehaves on demand."""
        return self._stack.enter_context(FaultProxy(self._bucket.environment["AWS_ENDPOINT_URL"]))

    def site(
        self,
        name: str,
        *,
        by: FaultProxy | None = None,
        tuning: Mapping[str, object] | None = TINY,
        settings: Mapping[str, object] | None = None,
        store: Path | None = None,
    ) -> Site:
        """A machine that is not mounted yet, going through the proxy *by*; *settings* are what its store remembers.

        *store* is where that lies, if not with the rest.
        """
        environment = dict(self._bucket.environment)
        if by is not None:
            environment["AWS_ENDPOINT_URL"] = by.endpoint
        made = self._stack.enter_context(Site(self._directory, environment=environment, name=name))
        made.store = store or made.store
        made.store.mkdir(mode=0o700, parents=True)
        document = {**(settings or {}), "tuning": dict(tuning or {})}
        (made.store / "settings.json").write_text(json.dumps(document))
        return made

    def mount(self, site: Site, *options: str) -> Path:
        """Mount *site*, quickly fresh unless *options* say otherwise; its mountpoint."""
        site.mount("--remote", self.url, *QUICK, *options)
        return site.mountpoint


@contextmanager
def machines_of(directory: Path, bucket: Bucket) -> Iterator[Machines]:
    """Machines that are all ended, however the block went."""
    with ExitStack() as stack:
        yield Machines(directory, bucket, stack)


def census(top: Path, *, times: bool = True) -> dict[str, tuple[object, ...]]:
    """Path -> (type and mode, size, mtime in ns, what it holds) of everything below *top*, as `lstat` and reading say.

    Directories' times are left out: a name added and taken away again changes them.
    """
    found: dict[str, tuple[object, ...]] = {}
    for directory, directories, files in os.walk(top):
        for name in directories + files:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                content: object = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    content = hashlib.blake2b(file.read()).hexdigest()
            else:
                content = None
            is_directory = stat.S_ISDIR(status.st_mode)
            found[os.path.relpath(path, top)] = (
                stat.filemode(status.st_mode),
                None if is_directory else status.st_size,
                status.st_mtime_ns if times and not is_directory else None,
                content,
            )
    return found


def same_soon(first: Path, second: Path, timeout_s: float = 30) -> None:
    """Wait until both directories hold the same; fails with what differs."""
    censuses: list[dict[str, tuple[object, ...]]] = [{}, {}]

    def same() -> bool:
        try:
            censuses[:] = census(first), census(second)
        except FileNotFoundError:  # went away between listing and looking: not converged yet
            return False
        return censuses[0] == censuses[1]

    try:
        until(same, "both machines to hold the same", timeout_s)
    except AssertionError as error:
        ours, theirs = censuses
        differing = {path: (ours.get(path), theirs.get(path)) for path in sorted(ours.keys() | theirs.keys())
                     if ours.get(path) != theirs.get(path)}  # fmt: skip
        raise AssertionError(f"{error}; {differing}") from None
