"""A mount with a local store, beside a plain directory on the same disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.posix.sides import Case, compare
from tests.support.mounts import TINY, Site

_numbers = itertools.count()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One mount for a module's tests; each works in a directory of its own. Tiny tuning: kilobytes are many chunks."""
    with Site(tmp_path_factory.mktemp("local"), tuning=TINY) as made:
        made.mount("--owner", "stored", "--allow-other")
        yield made
        made.umount()
        assert "Traceback" not in made.log(), made.log()


@pytest.fixture
def same(site: Site, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """`same(case)`: run a case on the mount and on a plain directory; see `sides.compare`."""
    mask = os.umask(0o022)
    passthrough = site.has_passthrough()

    def run(case: Case, *, seal: bool = False) -> None:
        number = next(_numbers)
        plain = tmp_path / f"case-{number}"
        compare(case, site.mountpoint / plain.name, plain, seal=seal, passthrough=passthrough)

    yield run
    os.umask(mask)
