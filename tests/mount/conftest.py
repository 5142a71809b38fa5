"""Fixtures for tests on real mounts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Bucket
from tests.support.machines import Machines, machines_of
from tests.support.mounts import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A mountpoint and a store of this test's own, not yet mounted."""
    with Site(tmp_path) as made:
        yield made


@pytest.fixture
def machines(tmp_path: Path, bucket: Bucket) -> Iterator[Machines]:
    """Machines of this test's own that share one remote."""
    with machines_of(tmp_path, bucket) as made:
        yield made
