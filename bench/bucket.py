"""The bucket behind a benchmark: the link to its server, and transfers that no file system takes part in.

The server is a SeaweedFS of this machine (`tests.support.seaweed`), whose work competes with everybody's. A link that
is long or thin is a proxy of ours in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from tests.support.proxy import FaultProxy, Faults

from .machine import MIB

_DOWNLOADS = 12
"""Ranges that a raw download asks for at once."""


@dataclass(frozen=True)
class Link:
    """A way to the server."""

    endpoint: str
    pids: list[int]
    """The process that plays the link; none where there is nothing between."""
    take_bytes_down: Callable[[], int]
    """Bytes of answers that passed since it was last asked. Only where a process plays the link."""


def add_link_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--latency-ms", type=float, default=0, help="round trip of the link: added to each request")
    options.add_argument("--mbit", type=float, help="bandwidth of the link each way, in megabits a second")


def words_for_link(arguments: argparse.Namespace) -> str:
    """For a table's title."""
    if not arguments.latency_ms and not arguments.mbit:
        return "loopback"
    return f"{arguments.latency_ms:g} ms, {f'{arguments.mbit:g}' if arguments.mbit else 'any'} Mb/s"


@contextmanager
def link(endpoint: str, arguments: argparse.Namespace, *, counting: bool = False) -> Iterator[Link]:
    """The way to *endpoint* that was asked for; with *counting*, a process that counts plays it even if it is short."""
    if not (counting or arguments.latency_ms or arguments.mbit):
        yield Link(endpoint, [], lambda: 0)
        return
    rate = arguments.mbit * 1e6 / 8 if arguments.mbit else None
    faults = Faults(latency_s=arguments.latency_ms / 1e3, up_bytes_per_s=rate, down_bytes_per_s=rate)
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_play, args=(far, endpoint, faults), daemon=True)
    process.start()
    far.close()

    def take() -> int:
        near.send(None)
        return int(near.recv())

    try:
        assert process.pid is not None
        yield Link(near.recv(), [process.pid], take)
    finally:
        process.terminate()
        process.join(10)


def _play(pipe: Connection, endpoint: str, faults: Faults) -> None:
    with FaultProxy(endpoint) as proxy:
        proxy.faults = faults
        pipe.send(proxy.endpoint)
        try:
            while True:
                pipe.recv()
                passed = sum(count.bytes_down for count in proxy.counts.values())
                proxy.reset()
                pipe.send(passed)
        except EOFError:
            pass  # the benchmark is gone


def client(connections: int = _DOWNLOADS) -> Any:
    """A client for raw transfers, as lean as boto3 can. Made before the clock starts: it reads megabytes of JSON."""
    config = Config(max_pool_connections=connections, request_checksum_calculation="when_required")
    return boto3.client("s3", config=config)


def sizes(bucket: str, prefix: str) -> dict[str, int]:
    """Every object below *prefix*, with its bytes."""
    pages = client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return {each["Key"]: each["Size"] for page in pages for each in page.get("Contents", ())}


def fetch(bucket: str, prefix: str) -> dict[str, bytes]:
    """All objects below *prefix*, in memory."""
    s3 = client()
    return {key: s3.get_object(Bucket=bucket, Key=key)["Body"].read() for key in sizes(bucket, prefix)}


def download(s3: Any, bucket: str, keys: Iterable[str], target: Path) -> None:
    """Objects into files, several at once, in parallel ranges."""
    target.mkdir()
    config = TransferConfig(multipart_threshold=8 * MIB, multipart_chunksize=8 * MIB, max_concurrency=4)
    with ThreadPoolExecutor(_DOWNLOADS // 4) as pool:
        done = [
            pool.submit(s3.download_file, bucket, key, str(target / key.replace("/", "-")), Config=config)
            for key in keys
        ]
        for each in done:
            each.result()


def put(s3: Any, bucket: str, objects: Mapping[str, bytes], connections: int) -> None:
    """All of *objects*, each in one PUT, over so many connections at once."""
    with ThreadPoolExecutor(connections) as pool:
        done = [pool.submit(s3.put_object, Bucket=bucket, Key=key, Body=body) for key, body in objects.items()]
        for each in done:
            each.result()
