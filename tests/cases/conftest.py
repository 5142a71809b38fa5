"""Fixtures for the numbered cases: what went wrong elsewhere, and must not here."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import Bucket
from tests.support.machines import Machines, machines_of
from tests.support.mounts import Site


@pytest.fixture(scope="module", params=["auto", "off"])
def mountpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A mount without a remote, with passthrough where it can be and without."""
    with Site(tmp_path_factory.mktemp("cases")) as site:
        site.mount("--owner", "stored", "--passthrough", request.param)
        yield site.mountpoint
        site.umount()
        assert "Traceback" not in site.log(), site.log()


@pytest.fixture
def top(mountpoint: Path, request: pytest.FixtureRequest) -> Path:
    """A directory of this test's own on a mount, with passthrough and without."""
    made = mountpoint / request.node.name
    made.mkdir()
    return made


@pytest.fixture
def machines(tmp_path: Path, bucket: Bucket) -> Iterator[Machines]:
    """Machines of this test's own that share one remote."""
    with machines_of(tmp_path, bucket) as made:
        yield made


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessPoolExecutor]:
    """Four other processes, as the ranks of one training."""
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        yield pool
