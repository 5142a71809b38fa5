"""Fixtures for saving and loading with what people use, on real mounts that replicate to a real S3 server."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import Bucket
from tests.support.mounts import Site
from tests.support.proxy import FaultProxy

QUICK = ("--settle", "100ms", "--lag", "100ms")
"""Options with which a test need not wait."""

MakeSite = Callable[..., Site]


@pytest.fixture
def url(bucket: Bucket) -> str:
    """A prefix in a bucket of this test's own."""
    return f"{bucket.url}/run"


@pytest.fixture
def network(bucket: Bucket) -> Iterator[FaultProxy]:
    """The way to the bucket's server, for tests that count or disturb."""
    with FaultProxy(bucket.environment["AWS_ENDPOINT_URL"]) as proxy:
        yield proxy


@pytest.fixture
def machine(tmp_path: Path, bucket: Bucket) -> Iterator[MakeSite]:
    """`machine("a")`: a mountpoint and a store of a machine of that name, not mounted yet; cleaned up in the end."""
    with ExitStack() as stack:

        def make(name: str, *, endpoint: str | None = None, tuning: Mapping[str, object] | None = None) -> Site:
            environment = dict(bucket.environment)
            if endpoint is not None:
                environment["AWS_ENDPOINT_URL"] = endpoint
            return stack.enter_context(Site(tmp_path, environment=environment, name=name, tuning=tuning))

        yield make


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A mount without a remote."""
    with Site(tmp_path) as made:
        made.mount()
        yield made


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """Another process, for loads that go through `network`.

    A page fault on a mapped file waits for the proxy while it holds the interpreter's lock, so that in this process the
    proxy would never answer.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool
