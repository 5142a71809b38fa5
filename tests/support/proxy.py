"""An HTTP proxy of ours in front of an S3 endpoint that misbehaves on demand, and counts what passes.

Set `FaultProxy.faults` at any time; requests that begin later see it, and waits of earlier ones end. The proxy forwards
requests as they were signed, so the server sees the client's own Host header.
"""

from __future__ import annotations

import http.client
import io
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Literal
from urllib.parse import urlsplit

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

_BLOCK = 16 << 10
_LISTED = re.compile(rb"<(Contents|CommonPrefixes)>.*?</\1>", re.DOTALL)


@dataclass(frozen=True)
class Faults:
    """What goes wrong. The default is nothing."""

    mode: Literal["pass", "refuse", "black_hole"] = "pass"
    """refuse: nothing listens, and connections that are open break. black_hole: connections are taken and nothing is
    ever answered."""
    methods: frozenset[str] | None = None
    """Everything below happens to these methods only; None for all."""
    error_share: float = 0.0
    """This share of requests is answered with `error` and never reaches the server."""
    error: tuple[int, str] = (503, "SlowDown")
    """Status and S3 error code."""
    error_header: str | None = None
    """Only requests with this header are answered with `error`."""
    latency_s: float = 0.0
    """Wait before a request is forwarded."""
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    """Rates of all bodies together."""
    expired_keys: frozenset[str] = frozenset()
    """What is signed with one of these access keys is refused: it has expired."""
    clock_s: float = 0.0
    """The store's clock shows so much more than ours ..."""
    signed_within_s: float | None = None
    """... and what was signed further from its time than this is refused. S3's is 15 minutes."""
    cut_after: int | None = None
    """Break the connection after this many bytes of an answer's body ..."""
    cut_up_after: int | None = None
    """... or of a request's, before the server hears of it."""
    reset: bool = False
    """A connection that is broken within a request is reset, and what was on its way is lost; else it ends early."""
    short_after: int | None = None
    """Answers to GET end after this many bytes, as if that were all of them."""
    unlisted_share: float = 0.0
    """This share of keys and folders is missing in listings."""
    flip_up: bool = False
    """Change one byte in the middle of each request's body ..."""
    flip_down: bool = False
    """... or of each GET's answer."""
    drop_answer: bool = False
    """Break the connection once the server has answered, without passing the answer on."""
    hidden_header: str = "if-none-match"
    """Hide this header, in lower case, from the server, as if it did not know it; ..."""
    hidden_with: Credentials | None = None
    """... the request is signed anew with these. None: hide nothing."""


@dataclass
class Count:
    """Traffic of one method."""

    requests: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class FaultProxy:
    """The proxy. Use as a context manager; `endpoint` stays the same until it is stopped."""

    def __init__(self, upstream: str, *, seed: int = 0) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname is not None and parts.port is not None
        self.upstream = (parts.hostname, parts.port)
        self.random = random.Random(seed)
        self._lock = threading.Lock()
        self._faults = Faults()
        self._changed = threading.Event()  # set once `_faults` is no longer what it belongs to
        self._counts: dict[str, Count] = {}
        self._connections: set[socket.socket] = set()
        self._up, self._down = _Rate(), _Rate()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def faults(self) -> Faults:
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        with self._lock:
            before, self._faults = self._faults, faults
            changed, self._changed = self._changed, threading.Event()
            self._up, self._down = _Rate(), _Rate()
        changed.set()
        if faults.mode == "refuse":
            self._close()
        elif before.mode == "refuse":
            self._listen()

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self.faults = Faults()

    @property
    def counts(self) -> dict[str, Count]:
        """Requests that arrived, and bytes of bodies that passed, since the start or `reset`; by method."""
        with self._lock:
            return {method: Count(**vars(count)) for method, count in self._counts.items()}

    @property
    def requests(self) -> int:
        """How many requests of any method arrived since the start or `reset`."""
        return sum(count.requests for count in self.counts.values())

    def reset(self) -> None:
        """Count from nothing again."""
        with self._lock:
            self._counts.clear()

    def count(self, method: str, *, requests: int = 0, up: int = 0, down: int = 0) -> None:
        with self._lock:
            count = self._counts.setdefault(method, Count())
            count.requests += requests
            count.bytes_up += up
            count.bytes_down += down

    def arrived(self, method: str, target: str) -> None:
        """A request began; faults set here concern it. For subclasses that tell requests apart by their *target*."""

    def answered(self, method: str, target: str) -> None:
        """A request was answered, or its answer withheld."""

    def current(self) -> tuple[Faults, threading.Event]:
        """The faults now, and an event that is set when they are replaced."""
        with self._lock:
            return self._faults, self._changed

    def throttle(self, faults: Faults, changed: threading.Event, *, up: int = 0, down: int = 0) -> None:
        self._up.pass_(up, faults.up_bytes_per_s, changed)
        self._down.pass_(down, faults.down_bytes_per_s, changed)

    def connected(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)

    def disconnected(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)

    def _listen(self) -> None:
        self._server = _Server(("127.0.0.1", self._port), self)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def _close(self) -> None:
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.shutdown()
        server.server_close()
        self._thread.join(30)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _break(connection)

    def __enter__(self) -> FaultProxy:
        self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.faults = Faults(mode="refuse")


class _Rate:
    """Lets so many bytes pass per second, whoever sends them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0

    def pass_(self, size: int, bytes_per_s: float | None, changed: threading.Event) -> None:
        if not size or bytes_per_s is None or changed.is_set():
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / bytes_per_s
            wait_s = self._free_at - time.monotonic()
        changed.wait(wait_s)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], proxy: FaultProxy) -> None:
        self.proxy = proxy
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that broke is the proxy's trade, not news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.proxy.connected(self.connection)

    def finish(self) -> None:
        self.server.proxy.disconnected(self.connection)
        super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        try:
            self._serve()
        except (OSError, http.client.HTTPException):
            self._drop()
        self.server.proxy.answered(self.command, self.path)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_OPTIONS = do_GET

    def _serve(self) -> None:
        proxy = self.server.proxy
        proxy.count(self.command, requests=1)
        proxy.arrived(self.command, self.path)
        faults, changed = proxy.current()
        if faults.mode == "black_hole":
            changed.wait()
            return self._drop()
        if faults.methods is not None and self.command not in faults.methods:
            faults = Faults()
        if faults.latency_s:
            changed.wait(faults.latency_s)
        if faults.cut_up_after is not None and faults.cut_up_after < int(self.headers.get("Content-Length") or 0):
            self.rfile.read(faults.cut_up_after)
            return self._drop()
        body = b"".join(self._request_body(faults, changed))
        error = self._refusal(faults)
        if error is not None:
            return self._answer_error(*error)
        if faults.flip_up:
            body = _flipped(body)
        headers = self._headers(faults)
        upstream = http.client.HTTPConnection(*proxy.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                upstream.putheader(name, value)
            upstream.endheaders(body)
            response = upstream.getresponse()
            if faults.drop_answer:
                response.read()
                return self._drop()
            self._pass_on(response, faults, changed)
        finally:
            upstream.close()

    def _refusal(self, faults: Faults) -> tuple[int, str] | None:
        """Status and code of the error with which this request is answered, None when it is passed on."""
        concerned = faults.error_header is None or faults.error_header in self.headers
        if concerned and self.server.proxy.random.random() < faults.error_share:
            return faults.error
        if any(f"Credential={key}/" in self.headers.get("Authorization", "") for key in faults.expired_keys):
            return 400, "ExpiredToken"
        if faults.signed_within_s is not None:
            signed = datetime.strptime(self.headers["X-Amz-Date"], "%Y%m%dT%H%M%S%z")
            if abs(time.time() + faults.clock_s - signed.timestamp()) > faults.signed_within_s:
                return 403, "RequestTimeTooSkewed"
        return None

    def _request_body(self, faults: Faults, changed: threading.Event) -> Iterator[bytes]:
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            block = self.rfile.read(min(left, _BLOCK))
            if not block:
                raise ConnectionResetError("the client went away")
            left -= len(block)
            self.server.proxy.count(self.command, up=len(block))
            self.server.proxy.throttle(faults, changed, up=len(block))
            yield block

    def _headers(self, faults: Faults) -> list[tuple[str, str]]:
        if faults.hidden_with is None or faults.hidden_header not in self.headers:
            return list(self.headers.items())
        kept = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in (faults.hidden_header, "authorization", "x-amz-date")
        }
        request = AWSRequest(self.command, f"http://{self.headers['Host']}{self.path}", headers=kept)
        _Resign(faults.hidden_with, "s3", "us-east-1").add_auth(request)
        return list(request.headers.items())

    def _pass_on(self, response: http.client.HTTPResponse, faults: Faults, changed: threading.Event) -> None:
        has_body = self.command != "HEAD" and response.status not in (204, 304)
        other = self._other_body(response, faults) if has_body else None
        source: IO[bytes] = response if other is None else io.BytesIO(other)  # type: ignore[assignment]
        length = response.getheader("Content-Length") if other is None else str(len(other))
        chunked = has_body and length is None
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", length)
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent, size = 0, int(length or 0)
        while has_body and (block := source.read(_BLOCK)):
            if faults.flip_down and self.command == "GET" and sent <= size // 2 < sent + len(block):
                block = _flipped(block)
            if faults.cut_after is not None and sent + len(block) > faults.cut_after:
                self.wfile.write(block[: faults.cut_after - sent])
                return self._drop()
            self.server.proxy.throttle(faults, changed, down=len(block))
            self.server.proxy.count(self.command, down=len(block))  # before the client can know of it
            self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)
            sent += len(block)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _other_body(self, response: http.client.HTTPResponse, faults: Faults) -> bytes | None:
        """What is passed on in place of the answer's body; None for that itself."""
        if faults.unlisted_share and "list-type=2" in self.path:
            random = self.server.proxy.random
            return _LISTED.sub(
                lambda found: b"" if random.random() < faults.unlisted_share else found[0], response.read()
            )
        if faults.short_after is not None and self.command == "GET":
            return response.read()[: faults.short_after]
        return None

    def _answer_error(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>by the fault proxy</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Date", formatdate(time.time() + self.server.proxy.faults.clock_s, usegmt=True))
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _drop(self) -> None:
        self.close_connection = True
        if self.server.proxy.faults.reset:
            _reset(self.connection)
        else:
            _break(self.connection)


class _Resign(SigV4Auth):
    """Signs a request anew and keeps the digest of the body that it came with."""

    def payload(self, request: AWSRequest) -> str:
        return str(request.headers["X-Amz-Content-SHA256"])


def _flipped(body: bytes) -> bytes:
    """*body* with one bit changed in its middle."""
    if not body:
        return body
    changed = bytearray(body)
    changed[len(body) // 2] ^= 1
    return bytes(changed)


def _break(connection: socket.socket) -> None:
    """End a connection at once; what is on its way to the client still arrives."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended already


def _reset(connection: socket.socket) -> None:
    """End a connection with RST; only for the thread that serves it, which cannot use it any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(connection.detach())  # `close` would wait until nothing reads from it or writes to it
