"""S3 behind a faulty network and a faulty server: each fault has its error, and none corrupts or hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.credentials import Credentials

from ckptfs.errors import ObjectExists, ObjectMissing, RemoteError, RemoteForbidden, RemoteUnusable
from ckptfs.remote.retry import Limits, Retrying
from ckptfs.remote.s3 import S3Store
from tests.support.mounts import resident_bytes
from tests.support.polling import Poller
from tests.support.proxy import FaultProxy, Faults
from tests.support.seaweed import ACCESS_KEY, NEXT_ACCESS_KEY, NEXT_SECRET_KEY, SECRET_KEY, Seaweed

DATA = os.urandom(300_000)
READ_TIMEOUT_S = 0.6
GET = frozenset({"GET"})
PUT = frozenset({"PUT"})


@pytest.fixture(scope="module")
def bucket_name(seaweed: Seaweed) -> Iterator[str]:
    """One bucket for all tests here: the first object of each new bucket costs the server 0.2 s."""
    name = seaweed.create_bucket("faults")
    yield name
    seaweed.delete_bucket(name)


@pytest.fixture
def store(seaweed: Seaweed, bucket_name: str, s3_proxy: FaultProxy, tmp_path: Path) -> S3Store:
    """A store behind the proxy, under a prefix of its own, with one object "k" and short timeouts."""
    made = S3Store(
        bucket_name,
        tmp_path.name,
        environment=seaweed.environment(s3_proxy.endpoint),
        connect_timeout_s=2,
        read_timeout_s=READ_TIMEOUT_S,
    )
    assert made.put("k", DATA)
    s3_proxy.reset()
    return made


def calls(store: S3Store) -> list[Callable[[], object]]:
    """One of each kind of request."""
    return [
        lambda: store.put("new", DATA),
        lambda: store.put("newer", DATA, if_absent=True),
        lambda: store.get("k"),
        lambda: store.get("k", 5, 10),
        lambda: store.get_tail("k", 10),
        lambda: store.size("k"),
        lambda: store.list(""),
        lambda: store.list_folders(""),
        lambda: store.delete(["new"]),
    ]


def fails(
    call: Callable[[], object], kind: type[RemoteError], *, temporary: bool, match: str | None = None
) -> RemoteError:
    """Check that *call* raises exactly *kind* and says where."""
    with pytest.raises(RemoteError, match=match) as caught:
        call()
    assert type(caught.value) is kind and caught.value.temporary is temporary, repr(caught.value)
    assert "s3://" in str(caught.value)
    return caught.value


def test_nothing_wrong(store: S3Store, s3_proxy: FaultProxy) -> None:
    """The proxy itself changes nothing and counts requests and bytes."""
    for call in calls(store):
        call()
    assert store.get("k") == DATA
    counts = s3_proxy.counts
    assert counts["GET"].bytes_down >= 2 * len(DATA)
    assert counts["PUT"].bytes_up >= 2 * len(DATA)
    assert counts["POST"].requests == 1


@pytest.mark.parametrize("mode", ["refuse", "black_hole"])
def test_no_answer(store: S3Store, s3_proxy: FaultProxy, mode: str) -> None:
    """A store that is down, or accepts and says nothing, is a temporary error within the timeout, and heals."""
    s3_proxy.faults = Faults(mode=mode)  # type: ignore[arg-type]
    for call in calls(store):
        begun = time.monotonic()
        fails(call, RemoteError, temporary=True, match="no answer")
        assert time.monotonic() - begun < 5
    s3_proxy.heal()
    assert store.get("k") == DATA


@pytest.mark.parametrize(
    ("status", "code", "kind", "temporary", "match"),
    [
        (503, "SlowDown", RemoteError, True, "SlowDown"),
        (503, "ServiceUnavailable", RemoteError, True, None),
        (500, "InternalError", RemoteError, True, None),
        (502, "", RemoteError, True, None),
        (507, "XMinioStorageFull", RemoteError, True, "store is full.*Make room"),
        (403, "QuotaExceeded", RemoteError, True, "store is full.*Make room"),
        (507, "", RemoteError, True, "store is full.*Make room"),
        (429, "TooManyRequests", RemoteError, True, None),
        (400, "RequestTimeout", RemoteError, True, None),
        (409, "OperationAborted", RemoteError, True, None),
        (403, "AccessDenied", RemoteForbidden, True, "rights on the bucket"),
        (403, "SignatureDoesNotMatch", RemoteForbidden, True, "refuses these credentials"),
        (403, "InvalidAccessKeyId", RemoteForbidden, True, "refuses these credentials"),
        (400, "ExpiredToken", RemoteForbidden, True, "expired"),
        (403, "RequestTimeTooSkewed", RemoteForbidden, True, "clock"),
        (404, "NoSuchBucket", RemoteUnusable, False, "no such bucket"),
        (400, "AuthorizationHeaderMalformed", RemoteUnusable, False, "AWS_DEFAULT_REGION"),
        (400, "InvalidArgument", RemoteError, False, "InvalidArgument"),
        (404, "NoSuchKey", ObjectMissing, False, "no such object"),
    ],
)
def test_refusals(
    store: S3Store,
    s3_proxy: FaultProxy,
    status: int,
    code: str,
    kind: type[RemoteError],
    temporary: bool,
    match: str | None,
) -> None:
    """Each error answer becomes the class that says what to do, for every request that has a body to say so."""
    s3_proxy.faults = Faults(error_share=1.0, error=(status, code))
    for call in (lambda: store.put("new", DATA), lambda: store.get("k", 3, 9)):
        fails(call, kind, temporary=temporary, match=match)
    if kind is ObjectMissing:  # a web server says so of a bucket, an S3 store never
        words = f"no such bucket.* or {s3_proxy.endpoint} is"
        fails(lambda: store.list(""), RemoteUnusable, temporary=False, match=words)
    else:
        fails(lambda: store.list(""), kind, temporary=temporary, match=match)
        fails(lambda: store.delete(["new"]), kind, temporary=temporary, match=match)


def test_head_has_only_a_status(store: S3Store, s3_proxy: FaultProxy) -> None:
    """Answers to HEAD carry no code: the status decides."""
    for status, kind in ((503, RemoteError), (403, RemoteForbidden)):
        s3_proxy.faults = Faults(error_share=1.0, error=(status, "ignored"))
        fails(lambda: store.size("k"), kind, temporary=True)
    s3_proxy.faults = Faults(error_share=1.0, error=(404, "ignored"))
    assert store.size("k") is None


@pytest.mark.parametrize(("clock_s", "words"), [(1200, "20 minutes behind"), (-1200, "20 minutes ahead of")])
def test_a_clock_that_is_off_is_told(store: S3Store, s3_proxy: FaultProxy, clock_s: float, words: str) -> None:
    """For each request, also where the answer has no body to say so; ten minutes are fine."""
    s3_proxy.faults = Faults(clock_s=clock_s, signed_within_s=900)
    for call in (lambda: store.put("new", DATA), lambda: store.get("k"), lambda: store.size("k")):
        fails(call, RemoteForbidden, temporary=True, match=f"clock is {words} the store's.* Set the clock")
    s3_proxy.faults = Faults(clock_s=clock_s / 2, signed_within_s=900)
    assert store.get("k") == DATA


def test_every_request_is_signed_when_it_is_sent(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A request that is repeated after a while is signed anew: no store refuses it for being old."""
    s3_proxy.faults = Faults(error_share=1.0)

    def heal(error: RemoteError, wait_s: float) -> None:
        s3_proxy.faults = Faults(signed_within_s=2.5)

    retrying = Retrying(store, Limits(attempts=2), on_retry=heal, sleep=lambda _: time.sleep(3.5))
    assert retrying.put("late", DATA)


def test_rotated_keys_in_a_file(seaweed: Seaweed, bucket_name: str, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    """The file is read again once it changed, replaced or written in place, half or whole; the old key may go then."""
    file = tmp_path / "credentials"

    def write(key: str, secret: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    write(ACCESS_KEY, SECRET_KEY)
    environment = {
        "AWS_SHARED_CREDENTIALS_FILE": str(file),
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_ENDPOINT_URL": s3_proxy.endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    store = S3Store(bucket_name, tmp_path.name, environment=environment)
    assert store.put("k", DATA)
    s3_proxy.faults = Faults(expired_keys=frozenset({ACCESS_KEY}))
    fails(lambda: store.get("k"), RemoteForbidden, temporary=True, match="expired")
    file.write_text("[default]\naws_access_key_id = ")
    fails(lambda: store.get("k"), RemoteForbidden, temporary=True)
    write(NEXT_ACCESS_KEY, NEXT_SECRET_KEY)
    assert store.get("k") == DATA
    new = tmp_path / "new"
    new.write_text(file.read_text().replace(NEXT_ACCESS_KEY, ACCESS_KEY).replace(NEXT_SECRET_KEY, SECRET_KEY))
    new.replace(file)
    s3_proxy.faults = Faults(expired_keys=frozenset({NEXT_ACCESS_KEY}))
    assert store.get("k") == DATA
    file.unlink()
    fails(lambda: store.get("k"), RemoteForbidden, temporary=True, match="no usable credentials")


@pytest.mark.parametrize("cut_after", [0, 1, 100_000, len(DATA) - 1])
def test_body_cut_short(store: S3Store, s3_proxy: FaultProxy, cut_after: int) -> None:
    """A body that breaks off is a temporary error, never fewer bytes."""
    s3_proxy.faults = Faults(cut_after=cut_after, methods=GET)
    fails(lambda: store.get("k"), RemoteError, temporary=True)
    fails(lambda: store.get("k", 0, len(DATA)), RemoteError, temporary=True)
    fails(lambda: store.get_tail("k", len(DATA)), RemoteError, temporary=True)
    s3_proxy.heal()
    assert store.get("k") == DATA


def test_reset_within_a_body(store: S3Store, s3_proxy: FaultProxy) -> None:
    """So is one whose connection is reset, either way."""
    s3_proxy.faults = Faults(cut_after=100_000, reset=True, methods=GET)
    fails(lambda: store.get("k"), RemoteError, temporary=True, match="[Rr]eset")
    fails(lambda: store.get("k", 0, len(DATA)), RemoteError, temporary=True, match="[Rr]eset")
    s3_proxy.faults = Faults(cut_up_after=100_000, reset=True)
    fails(lambda: store.put("new", DATA), RemoteError, temporary=True, match="no answer")
    s3_proxy.heal()
    assert store.get("k") == DATA and store.size("new") is None


@pytest.mark.parametrize("cut_up_after", [0, 100_000])
def test_request_cut_short(store: S3Store, s3_proxy: FaultProxy, cut_up_after: int) -> None:
    """A connection that breaks while a body is sent is a temporary error, and nothing is stored."""
    s3_proxy.faults = Faults(cut_up_after=cut_up_after)
    fails(lambda: store.put("new", DATA), RemoteError, temporary=True)
    s3_proxy.heal()
    assert store.size("new") is None


def test_a_range_that_is_too_short(store: S3Store, s3_proxy: FaultProxy) -> None:
    """Fewer bytes than were asked for, which call themselves all, are a temporary error: a range knows its length."""
    s3_proxy.faults = Faults(short_after=1000)
    fails(lambda: store.get("k", 0, len(DATA)), RemoteError, temporary=True, match="1000 bytes came")
    fails(lambda: store.get_tail("k", 5000), RemoteError, temporary=True, match="1000 bytes came")


def test_listings_that_miss_keys(store: S3Store, s3_proxy: FaultProxy) -> None:
    """The proxy leaves out what it should, so that tests of what becomes of it can rely on that."""
    for number in range(9):
        store.put(f"l/{number}/x", b"")
    s3_proxy.faults = Faults(unlisted_share=0.5)
    listed = [each.key for each in store.list("l/").objects]
    assert 0 < len(listed) < 9 and listed == sorted(listed)
    s3_proxy.faults = Faults(unlisted_share=1.0)
    assert store.list("l/").objects == () and store.list_folders("l/") == ()


def test_body_that_stops(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A body that stops coming ends with the read timeout; one that is merely slow is waited for."""
    s3_proxy.faults = Faults(down_bytes_per_s=10_000)  # a block takes 1.6 s, the timeout is 0.6 s
    fails(lambda: store.get("k"), RemoteError, temporary=True, match="no answer")
    s3_proxy.faults = Faults(down_bytes_per_s=200_000)
    begun = time.monotonic()
    assert store.get("k") == DATA
    assert time.monotonic() - begun > 1.0


def test_slow_upload(store: S3Store, s3_proxy: FaultProxy) -> None:
    """An upload over a slow line succeeds, and its rate is the line's."""
    s3_proxy.faults = Faults(up_bytes_per_s=600_000)
    begun = time.monotonic()
    assert store.put("slow", DATA)
    assert time.monotonic() - begun > 0.4


def test_bytes_changed_on_the_way_up(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A body that changed on its way is refused by the store and nothing is stored; sent again it is fine."""
    s3_proxy.faults = Faults(flip_up=True, methods=PUT)
    error = fails(lambda: store.put("new", DATA), RemoteError, temporary=True)
    assert any(code in str(error) for code in ("BadDigest", "XAmzContentSHA256Mismatch"))
    s3_proxy.heal()
    assert store.size("new") is None
    assert store.put("new", DATA)


def test_bytes_changed_on_the_way_down(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A range carries no checksum on S3: finding changed bytes is left to whoever knows their digest."""
    s3_proxy.faults = Faults(flip_down=True, methods=GET)
    got = store.get("k", 0, len(DATA))
    assert len(got) == len(DATA) and sum(a != b for a, b in zip(got, DATA, strict=True)) == 1


def test_lost_answer(store: S3Store, s3_proxy: FaultProxy) -> None:
    """When the store acknowledged but the answer was lost, the error is temporary and the object is there."""
    s3_proxy.faults = Faults(drop_answer=True, methods=PUT)
    fails(lambda: store.put("new", DATA), RemoteError, temporary=True)
    s3_proxy.heal()
    assert store.get("new") == DATA


def test_lost_answer_of_a_conditional_put(store: S3Store, s3_proxy: FaultProxy) -> None:
    """Repeating a conditional put whose answer was lost finds its own object and succeeds; another's is a conflict."""
    store.put("settled", b"", if_absent=True)
    answers: list[str] = []

    def heal(error: RemoteError, wait_s: float) -> None:
        answers.append(str(error))
        s3_proxy.heal()

    retrying = Retrying(store, Limits(attempts=3), on_retry=heal, sleep=lambda _: None)
    s3_proxy.faults = Faults(drop_answer=True, methods=PUT)
    assert retrying.put("head", DATA, if_absent=True) is True
    assert len(answers) == 1 and store.get("head") == DATA

    store.put("theirs", b"theirs")
    s3_proxy.faults = Faults(error_share=1.0, methods=PUT)
    with pytest.raises(ObjectExists):
        retrying.put("theirs", DATA, if_absent=True)
    assert store.get("theirs") == b"theirs"


def test_throttling_heals_by_retries(store: S3Store, s3_proxy: FaultProxy) -> None:
    """With 90 % of requests refused, retries bring every object through, and each waits longer than the one before."""
    s3_proxy.faults = Faults(error_share=0.9)
    waits: list[float] = []
    retrying = Retrying(store, on_retry=lambda _, wait_s: waits.append(wait_s), sleep=lambda _: None, jitter=lambda: 1)
    for number in range(5):
        assert retrying.put(f"t/{number}", DATA)
    assert len(waits) == s3_proxy.counts["PUT"].requests - 5 > 5
    assert max(waits) > 4


def test_cancelled_while_waiting(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A call that waits for a store which is down ends when it is cancelled, with the error it waited on."""
    cancel, waiting = threading.Event(), threading.Event()
    retrying = Retrying(store, Limits(first_s=600, cancel=cancel), on_retry=lambda *_: waiting.set(), jitter=lambda: 1)
    s3_proxy.faults = Faults(mode="refuse")
    caught: list[RemoteError] = []

    def wait() -> None:
        try:
            retrying.get("k")
        except RemoteError as error:
            caught.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert waiting.wait(10)
    cancel.set()
    thread.join(10)
    assert caught and caught[0].temporary


def test_store_without_conditional_put(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A store that answers 501 to If-None-Match is asked for the key first, and not bothered with it again."""
    s3_proxy.faults = Faults(error_share=1.0, error=(501, "NotImplemented"), error_header="If-None-Match")
    assert store.put("head", b"one", if_absent=True)
    assert s3_proxy.counts["PUT"].requests == 2
    with pytest.raises(ObjectExists):
        store.put("head", b"two", if_absent=True)
    assert store.put("other", b"three", if_absent=True)
    assert s3_proxy.counts["PUT"].requests == 3
    assert store.get("head") == b"one"


def test_store_that_ignores_conditions(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A store that takes If-None-Match for nothing is found out before it replaces an object."""
    s3_proxy.faults = Faults(hidden_with=Credentials(ACCESS_KEY, SECRET_KEY))
    store.put("taken", b"theirs")
    with pytest.raises(ObjectExists):
        store.put("taken", b"ours", if_absent=True)
    assert store.put("head", b"one", if_absent=True)
    for key in ("head", "taken"):
        with pytest.raises(ObjectExists):
            store.put(key, b"two", if_absent=True)
    assert (store.get("head"), store.get("taken")) == (b"one", b"theirs")


CRC32 = "x-amz-checksum-crc32"
LARGE = os.urandom(2 << 20)


def without(header: str) -> Faults:
    """Whatever comes with *header* is refused."""
    return Faults(error_share=1.0, error=(400, "InvalidArgument"), error_header=header)


def test_store_that_answers_with_crc32(store: S3Store, s3_proxy: FaultProxy) -> None:
    """Once a large object showed that the store computes CRC32s, nothing is sent with an MD5 any more."""
    assert store.put("large", LARGE)
    s3_proxy.faults = without("Content-MD5")
    assert store.put("larger", LARGE + DATA)
    assert store.put("small", DATA, if_absent=True)
    assert store.get("larger") == LARGE + DATA


def test_store_that_refuses_crc32(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A store that takes no CRC32 is asked once; its objects go with MD5, and are verified all the same."""
    s3_proxy.faults = without(CRC32)
    assert store.put("large", LARGE)
    assert s3_proxy.counts["PUT"].requests == 2
    assert store.put("larger", LARGE + DATA)
    assert s3_proxy.counts["PUT"].requests == 3
    assert store.get("large") == LARGE


def test_store_that_ignores_crc32(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A store that says nothing of the CRC32 gets none from then on."""
    s3_proxy.faults = Faults(hidden_header=CRC32, hidden_with=Credentials(ACCESS_KEY, SECRET_KEY))
    assert store.put("large", LARGE)
    s3_proxy.faults = without(CRC32)
    assert store.put("larger", LARGE)


def test_refused_for_another_reason(store: S3Store, s3_proxy: FaultProxy) -> None:
    """What the store refuses whatever is sent along is the error; a passing one leaves open what the store can."""
    s3_proxy.faults = Faults(error_share=1.0, error=(403, "AccessDenied"), methods=PUT)
    fails(lambda: store.put("large", LARGE), RemoteForbidden, temporary=True)
    s3_proxy.faults = Faults(error_share=1.0, error=(503, "SlowDown"), methods=PUT)
    fails(lambda: store.put("large", LARGE), RemoteError, temporary=True)
    s3_proxy.heal()
    assert store.put("large", LARGE)
    s3_proxy.faults = without("Content-MD5")
    assert store.put("larger", LARGE)


def test_store_without_bulk_delete(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A store that does not know DeleteObjects has its objects deleted one by one."""
    s3_proxy.faults = Faults(error_share=1.0, error=(501, "NotImplemented"), methods=frozenset({"POST"}))
    store.delete(["k", "never/was"])
    store.delete(["k"])
    assert store.list("").objects == ()
    assert s3_proxy.counts["POST"].requests == 1


def test_no_credentials(seaweed: Seaweed, tmp_path: Path) -> None:
    """Without any credentials the message says which variables to set."""
    environment = {
        "AWS_ENDPOINT_URL": seaweed.endpoint,
        "AWS_SHARED_CREDENTIALS_FILE": f"{tmp_path}/none",
        "AWS_CONFIG_FILE": f"{tmp_path}/none",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    store = S3Store("bucket", environment=environment)
    fails(lambda: store.get("k"), RemoteForbidden, temporary=True, match="AWS_ACCESS_KEY_ID")


def test_not_s3_at_all(seaweed: Seaweed, s3_proxy: FaultProxy) -> None:
    """TLS spoken to a server without it, and a host that does not exist, are temporary errors that say so."""
    for endpoint in (s3_proxy.endpoint.replace("http:", "https:"), "http://no-such-host.invalid:1"):
        store = S3Store("bucket", environment=seaweed.environment(endpoint))
        fails(lambda store=store: store.get("k"), RemoteError, temporary=True)  # type: ignore[misc]


def test_a_slow_uplink_carries_large_objects(store: S3Store, s3_proxy: FaultProxy) -> None:
    """Sending may take far longer than connecting, and the answer may come long after the body was handed over."""
    data = os.urandom(20 << 20)
    s3_proxy.faults = Faults(methods=PUT, up_bytes_per_s=4 << 20)
    started = time.monotonic()
    assert store.put("large", data)
    assert time.monotonic() - started > 2 * (2 + READ_TIMEOUT_S) - 1
    assert store.get("large") == data


ENDLESS_MIB = 1200
"""A body without an end, as far as a test goes."""


class Hostile(BaseHTTPRequestHandler):
    """Answers as no S3 service does; `how` says in which way, `served` how often."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    how = ""
    served = count()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        if "list-type" in asked:
            return self.list(next(self.served), asked)
        self.send_response(206 if "Content-Range" in self.how else 200)
        if "Content-Range" in self.how:
            self.send_header("Content-Range", "bytes 5-14/1000")
        self.send_header(*(("Content-Length", str(1 << 60)) if "Content-Length" in self.how else
                           ("Transfer-Encoding", "chunked")))  # fmt: skip
        self.end_headers()
        self.close_connection = True
        try:
            for _ in range(ENDLESS_MIB):
                self.wfile.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
        except OSError:
            pass  # the client has heard enough

    def list(self, number: int, asked: dict[str, list[str]]) -> None:
        name = "same" if self.how == "the same page" else f"{number:09}"
        prefix = asked["prefix"][0]
        entries = {
            "empty pages": "",
            "no token": "",
            "the same page": f"<Contents><Key>{prefix}same</Key><Size>1</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            f"<CommonPrefixes><Prefix>{prefix}same/</Prefix></CommonPrefixes>",
            "no fields": f"<Contents><Key>{prefix}{name}</Key></Contents><Contents/><CommonPrefixes/>",
            "names of nobody": f"<Contents><Key>{prefix}.{name}</Key><Size>1</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>",
            "new folders": "".join(f"<CommonPrefixes><Prefix>{prefix}{name}-{each}/</Prefix></CommonPrefixes>"
                                   for each in range(5000)),
        }[self.how]  # fmt: skip
        token = "" if self.how == "no token" else f"<NextContinuationToken>{name}</NextContinuationToken>"
        body = f"<ListBucketResult><IsTruncated>true</IsTruncated>{token}{entries}</ListBucketResult>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def hostile(how: str) -> Iterator[S3Store]:
    """A store on a server that is `Hostile` in this way."""
    handler = type("Handler", (Hostile,), {"how": how, "served": count()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": endpoint}
        made = S3Store("bucket", "run", environment=keys, connect_timeout_s=2, read_timeout_s=READ_TIMEOUT_S)
        try:
            yield made
        finally:
            made.close()
            server.shutdown()
            thread.join(10)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["empty pages", "the same page", "no token", "no fields", "names of nobody"])
def test_listings_without_an_end(how: str) -> None:
    """A server that goes on answering that more follows, and brings nothing new, is given up with an error."""
    with hostile(how) as store:
        fails(lambda: store.list("heads/"), RemoteError, temporary=True, match="does not end")
        fails(lambda: store.list_folders("heads/"), RemoteError, temporary=True, match="does not end")


@pytest.mark.timeout(60)
def test_folders_without_an_end() -> None:
    """Names that go on and on are not all held in memory."""
    with hostile("new folders") as store:
        fails(lambda: store.list_folders("heads/"), RemoteError, temporary=False, match="more than 100000 folders")


class Peak(Poller):
    """The most that this process has resident meanwhile."""

    pause_s = 0.005
    bytes = 0

    def look(self) -> None:
        self.bytes = max(self.bytes, resident_bytes(os.getpid()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["chunked", "Content-Length", "chunked Content-Range", "Content-Length Content-Range"])
def test_bodies_without_an_end(how: str) -> None:
    """A body that claims to be, or is, far longer than what was asked for is given up in bounded memory and time."""
    before = resident_bytes(os.getpid())
    with hostile(how) as store, Peak() as peak:
        for call in (lambda: store.get("k", 5, 15), lambda: store.get_tail("k", 10), lambda: store.get("k")):
            begun = time.monotonic()
            fails(call, RemoteError, temporary=True, match="bytes come where")
            assert time.monotonic() - begun < 10
    assert peak.bytes - before < 800 << 20
