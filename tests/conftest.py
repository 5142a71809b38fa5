"""Fixtures for all tests: a real S3 server, fresh buckets, and stacks of every thread when a test hangs."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import pytest

from tests.support.proxy import FaultProxy
from tests.support.seaweed import Seaweed


@dataclass(frozen=True)
class Bucket:
    """A fresh bucket of a running server."""

    name: str
    url: str
    """s3://<name>"""
    environment: dict[str, str]
    """The AWS_* variables with which a store, or a process, reaches it."""


_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # the terminal's: tests run with theirs captured


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Shortly before pytest-timeout ends a test, print every thread's stack.

    Its signal does not reach a main thread that waits inside the kernel, as a system call on a dead mount does;
    faulthandler's own thread does not depend on it.
    """
    marker = item.get_closest_marker("timeout")
    timeout_s = float(marker.args[0] if marker and marker.args else item.config.getini("timeout") or 0)
    if timeout_s > 0:
        faulthandler.dump_traceback_later(timeout_s * 0.95, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Seaweed]:
    """One SeaweedFS for the whole run."""
    with Seaweed() as server:
        yield server


@pytest.fixture
def bucket(seaweed: Seaweed, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A bucket of this test's own, deleted afterwards (each holds a volume of the server)."""
    name = seaweed.create_bucket(request.node.name)
    yield Bucket(name, f"s3://{name}", seaweed.environment())
    seaweed.delete_bucket(name)


@pytest.fixture
def s3_proxy(seaweed: Seaweed) -> Iterator[FaultProxy]:
    """A proxy in front of the server; give `seaweed.environment(s3_proxy.endpoint)` to what should go through it."""
    with FaultProxy(seaweed.endpoint) as proxy:
        yield proxy
