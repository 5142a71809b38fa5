"""Fixtures for tests on real mounts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounts import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A mountpoint and a store of this test's own, not yet mounted."""
    with Site(tmp_path) as made:
        yield made
