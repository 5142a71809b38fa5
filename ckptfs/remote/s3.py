"""An S3-compatible object store, through botocore (what is below boto3). The only module that knows it; never retries.

Credentials, region and endpoint follow boto3's own conventions: AWS_* variables, profiles, instance roles, and
AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL for stores other than AWS. Every request is signed when it is sent, so nothing
signed goes stale while it waits. Threads share one client; `refresh_credentials`, and a change of the profile's files,
swap it for a new one, and requests on their way end with the old one.

An upload is verified by what the store says about it: the CRC32 that it computed, on AWS (an ETag is no MD5 there when
the bucket encrypts with KMS) and wherever a store answers with it; else the ETag when it is the MD5, which takes six
times as long. Either travels with the request too, so that a store refuses a body that changed on its way. Bodies go to
the socket in steps: a pack is not copied whole.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast
from urllib.parse import urlsplit

import botocore.loaders
import botocore.session
import urllib3.exceptions
from botocore import exceptions as boto_errors
from botocore.config import Config
from botocore.handlers import add_expect_header
from botocore.parsers import ResponseParserError

from ckptfs.errors import ObjectExists, ObjectMissing, RemoteError, RemoteForbidden, RemoteUnusable
from ckptfs.remote.base import Buffer, Listing, ObjectInfo, check_folder, check_key, check_range, is_key
from ckptfs.remote.bodies import Body, add_md5, agrees, crc32, md5, read_most
from ckptfs.remote.credential_files import CredentialFiles
from ckptfs.remote.refusals import MISSING, NotOffered, RangeMissing, refusal

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

log = logging.getLogger(__name__)

PAGE = 1000
"""Keys per listing page and per batch of deletions; the most that S3 takes."""
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
"""Longest silence within a request; a store that is slow but moves is given its time."""
LARGE_PUT_TIMEOUT_S = 300.0
"""How long a large PUT may go without an answer once its body was handed over: megabytes of it still lie in socket
buffers then, of other PUTs too, and leave at the uplink's rate. 6 x 4 MiB in this time are 82 KiB/s."""
_LARGE_PUT = 1 << 20
_IDLE_PAGES = 100
"""Pages of a listing in a row that may bring nothing new: some stores pass over what was deleted in that way. One that
is broken, or means harm, would go on for ever."""
_FOLDERS_MOST = 100_000
"""Folders of one listing, a writer each: more are no store's that anybody uses, and would be held in memory."""
_WHOLE_MOST = 320 << 20
"""Bytes of a whole object: the largest are manifests, of up to 256 MiB. A longer body is not even begun ..."""
_SURPLUS_MOST = 8 << 20
"""... nor a range that comes with so much more than was asked for; a cache on the way may hand out whole blocks."""

_LOADER = botocore.loaders.create_loader()
"""botocore's descriptions of S3, parsed once per process: 10 MB and 0.15 s, which each session would pay again."""

_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
)
"""They mean something only together: a new key must not meet an old session token."""

_CREDENTIAL_ERRORS = (
    boto_errors.NoCredentialsError,
    boto_errors.PartialCredentialsError,
    boto_errors.CredentialRetrievalError,
    boto_errors.TokenRetrievalError,
    boto_errors.SSOError,
    boto_errors.ProfileNotFound,
    boto_errors.ConfigNotFound,
    boto_errors.NoAuthTokenError,
)
_TRIED_WITH = 64 << 10
"""Largest object with which conditional puts are tried: it is sent twice."""
_PASSING_ERRORS = (
    boto_errors.ConnectionError,
    boto_errors.HTTPClientError,  # timeouts, connection closed, and whatever urllib3 raised
    boto_errors.IncompleteReadError,
    boto_errors.ResponseStreamingError,
    boto_errors.UnseekableStreamError,  # a redirect to another region: the next request goes there at once
    boto_errors.ChecksumError,
    boto_errors.FlexibleChecksumError,
    boto_errors.MetadataRetrievalError,
    ResponseParserError,  # somebody else answered: a captive portal, a proxy
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
)
_UNCONNECTED = (boto_errors.EndpointConnectionError, boto_errors.ConnectTimeoutError, boto_errors.ProxyConnectionError)
"""Nobody was there to ask: which request it was says nothing."""


class S3Store:
    """`ObjectStore` over one bucket, optionally below a prefix."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        environment: Mapping[str, str] | None = None,
        pool_size: int = 32,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        """No request is sent. *environment* stands for os.environ; *pool_size* is how many connections are kept.

        Raises RemoteUnusable for an endpoint that is no URL, RemoteForbidden for a profile that does not exist.
        """
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._pool_size = pool_size
        self._timeouts_s = (connect_timeout_s, read_timeout_s)
        self._environment = dict(os.environ if environment is None else environment)
        self._refreshing = threading.Lock()
        self._conditional: bool | None = None  # whether If-None-Match: * is honoured; None until tried
        self._crc32: bool | None = None  # whether a store that is not AWS answers with CRC32s; None until tried
        self._bulk_delete = True  # False once the store refused DeleteObjects
        self._client, self._patient, self._on_aws = self._connect(self._environment)

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def description(self) -> str:
        meta = self._client.meta
        return f"{self.url} at {meta.endpoint_url} (region {meta.region_name})"

    def refresh_credentials(self, environment: Mapping[str, str]) -> None:
        """Use the AWS_* variables of *environment* from now on; what it does not name stays as it was.

        When it names any credential, all earlier ones are dropped. Raises as the constructor does, and then changes
        nothing.
        """
        with self._refreshing:
            kept = self._environment
            if any(environment.get(name) for name in _CREDENTIALS):
                kept = {name: value for name, value in kept.items() if name not in _CREDENTIALS}
            merged = {**kept, **{name: value for name, value in environment.items() if name.startswith("AWS_")}}
            client, patient, on_aws = self._connect(merged)
            if client.meta.endpoint_url != self._client.meta.endpoint_url:
                # Another store, with abilities of its own.
                self._conditional, self._crc32, self._bulk_delete = None, None, True
            self._client, self._patient, self._on_aws = client, patient, on_aws
            self._environment = merged

    def _follow_files(self) -> None:
        """Take up credentials that were written to the profile's files since they were read."""
        if not self._files.changed():
            return
        with self._refreshing:
            try:
                self._client, self._patient, self._on_aws = self._connect(self._environment)
                log.info("%s: the files with the credentials changed and were read again", self.url)
            except RemoteError as error:  # half written, perhaps: its next change is looked at, too
                log.warning("%s: the files with the credentials changed, but cannot be used: %s", self.url, error)

    def close(self) -> None:
        """Close idle connections."""
        self._client.close()
        self._patient.close()

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> bool:
        check_key(key)
        body = memoryview(data).cast("B")
        if not if_absent:
            return self._put(key, body)
        if self._conditional is not True and self.size(key) is not None:
            raise ObjectExists(f"{self.url}: {key} exists already", key=key)
        if self._conditional is False:
            return self._put(key, body)
        try:
            verified = self._put(key, body, IfNoneMatch="*")
        except NotOffered:
            self._without_conditional_put()
            return self._put(key, body)
        if self._conditional is None and len(body) <= _TRIED_WITH:
            self._try_condition(key, body)
        return verified

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        check_range(start, end)
        if start == end:
            return b""
        if start == 0 and end is None:
            return self._fetch(key)[0]
        asked = None if end is None else end - start
        body, first, total = self._fetch(key, f"bytes={start}-{'' if end is None else end - 1}", asked)
        if end is None:
            end = total
        if end > total or start >= total:
            raise RemoteError(f"{self.url}: {key} has {total} bytes, no range [{start}, {end})", key=key)
        if first != start or len(body) != end - start:  # a store that answers with more than was asked for
            body = body[start - first : end - first] if first <= start else b""
        if len(body) != end - start:
            raise RemoteError(
                f"{self.url}: {key}: {len(body)} bytes came for the range [{start}, {end})", key=key, temporary=True
            )
        return body

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        check_key(key)
        if length <= 0:
            raise ValueError(f"a tail of {length} bytes")
        try:
            body, first, total = self._fetch(key, f"bytes=-{length}", length)
        except RangeMissing:
            return b"", 0  # only an empty object has no last bytes
        wanted = min(length, total)
        if first + len(body) != total or len(body) < wanted:
            raise RemoteError(
                f"{self.url}: {key}: {len(body)} bytes came for its last {wanted}", key=key, temporary=True
            )
        return body[len(body) - wanted :], total

    def size(self, key: str) -> int | None:
        check_key(key)
        try:
            return int(self._call("head_object", key, Key=self._prefix + key)["ContentLength"])
        except ObjectMissing:
            return None

    def list(self, prefix: str, *, start_after: str = "", limit: int = PAGE) -> Listing:
        if limit < 1:
            raise ValueError(f"a listing of {limit} objects")
        objects: dict[str, ObjectInfo] = {}
        full = self._prefix + prefix
        where = {"StartAfter": self._prefix + start_after} if start_after else {}
        idle = 0
        while True:
            most, before = min(PAGE, limit - len(objects)), len(objects)
            page = self._call("list_objects_v2", prefix, Prefix=full, MaxKeys=most, **where)
            for each in page.get("Contents", ()):
                key = each.get("Key", "")[len(self._prefix) :]
                if is_key(key) and key > start_after and each.keys() >= {"Size", "LastModified"}:
                    objects[key] = ObjectInfo(key, each["Size"], each["LastModified"].timestamp())
            truncated = bool(page.get("IsTruncated"))
            if not truncated or len(objects) >= limit:
                return Listing(tuple(objects.values()), truncated)
            idle = 0 if len(objects) > before else idle + 1
            where = self._following(page, prefix, idle)

    def list_folders(self, prefix: str) -> tuple[str, ...]:
        check_folder(prefix)
        full = self._prefix + prefix
        names: set[str] = set()
        where: dict[str, str] = {}
        idle = 0
        while True:
            before = len(names)
            page = self._call("list_objects_v2", prefix, Prefix=full, Delimiter="/", **where)
            names.update(each.get("Prefix", "")[len(full) : -1] for each in page.get("CommonPrefixes", ()))
            if not page.get("IsTruncated"):
                return tuple(sorted(name for name in names if is_key(name)))
            if len(names) > _FOLDERS_MOST:
                raise RemoteError(f"{self.url}: list {prefix}: more than {_FOLDERS_MOST} folders", key=prefix)
            idle = 0 if len(names) > before else idle + 1
            where = self._following(page, prefix, idle)

    def _following(self, page: Mapping[str, Any], prefix: str, idle: int) -> dict[str, str]:
        """Where the listing of *prefix* goes on after *page*, the last of *idle* that brought nothing new."""
        token = page.get("NextContinuationToken")
        if not token or idle >= _IDLE_PAGES:
            why = f"{idle} pages brought nothing new" if token else "a page does not say where the next one begins"
            raise RemoteError(
                f"{self.url}: list {prefix}: the listing does not end ({why}). Is {self._client.meta.endpoint_url} "
                "an S3 service that works?",
                key=prefix,
                temporary=True,
            )
        return {"ContinuationToken": token}

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        for at in range(0, len(keys), PAGE):
            self._delete_page(keys[at : at + PAGE])

    def _delete_page(self, keys: Sequence[str]) -> None:
        if self._bulk_delete:
            objects = [{"Key": self._prefix + key} for key in keys]
            try:
                answer = self._call("delete_objects", keys[0], Delete={"Objects": objects, "Quiet": True})
            except NotOffered:
                self._bulk_delete = False
            else:
                for failed in answer.get("Errors", ()):
                    if failed.get("Code") not in MISSING:
                        key = failed.get("Key", "")[len(self._prefix) :]
                        where = f"{self.url}: delete {key}"
                        raise refusal(failed.get("Code", ""), 0, failed.get("Message", ""), where, key)
                return
        for key in keys:
            try:
                self._call("delete_object", key, Key=self._prefix + key)
            except ObjectMissing:
                pass  # some stores say so; it is what was asked for

    def _put(self, key: str, body: memoryview, **condition: str) -> bool:
        """One PUT; whether the store's checksum of it equals ours."""
        if self._on_aws or self._crc32:
            return self._put_with(key, body, crc32(body), **condition)
        if self._crc32 is None and len(body) > _LARGE_PUT:
            return self._try_crc32(key, body, **condition)
        return self._put_with(key, body, md5(body), **condition)

    def _try_crc32(self, key: str, body: memoryview, **condition: str) -> bool:
        """Learn, once, whether the store answers with CRC32s: a PUT with both, and another where that is refused."""
        of_crc32, of_md5 = crc32(body), md5(body)
        try:
            answer = self._send(key, body, of_crc32 | of_md5, **condition)
        except ObjectExists:
            raise
        except RemoteError as error:
            if error.temporary and not isinstance(error, RemoteForbidden):  # a proxy may drop a header that was signed
                raise
            verified = self._put_with(key, body, of_md5, **condition)  # raises where it was not the header
            log.info("%s takes no CRC32 (%s); uploads carry MD5", self.url, error)
            self._crc32 = False
            return verified
        self._crc32 = agrees(answer, of_crc32)
        return self._crc32 or agrees(answer, of_md5)

    def _put_with(self, key: str, body: memoryview, checksum: dict[str, str], **condition: str) -> bool:
        return agrees(self._send(key, body, checksum, **condition), checksum)

    def _send(self, key: str, body: memoryview, checksums: dict[str, str], **condition: str) -> Any:
        return self._call("put_object", key, Key=self._prefix + key, Body=Body(body), **checksums, **condition)

    def _try_condition(self, key: str, body: memoryview) -> None:
        """Learn, once, whether the store honours If-None-Match or ignores it silently and replaces objects.

        The object just stored is put again: a store that knows the condition refuses, another keeps the same bytes.
        """
        try:
            self._put(key, body, IfNoneMatch="*")
        except ObjectExists:
            self._conditional = True
        except NotOffered:
            self._without_conditional_put()
        except RemoteError as error:
            log.debug("whether %s has conditional puts stays open: %s", self.url, error)
        else:
            self._without_conditional_put()

    def _without_conditional_put(self) -> None:
        self._conditional = False
        log.info("%s has no conditional put; keys are looked up before they are created", self.url)

    def _fetch(self, key: str, byte_range: str | None = None, asked: int | None = None) -> tuple[bytes, int, int]:
        """Body of one GET, the offset of its first byte in the object, and the object's size.

        *asked* is the length of *byte_range* where that says it. No more is read than such an answer may have.
        """
        arguments = {} if byte_range is None else {"Range": byte_range}
        answer = self._call("get_object", key, Key=self._prefix + key, **arguments)
        span, _, size = answer.get("ContentRange", "").removeprefix("bytes ").partition("/")
        most = asked + _SURPLUS_MOST if asked is not None and size.isdigit() else _WHOLE_MOST
        with contextlib.closing(answer["Body"]) as stream:
            length = answer.get("ContentLength")
            body: bytes | None = None
            if length is None:
                body = self._guard("get", key, partial(read_most, stream, most))
            elif 0 <= length <= most:
                body = self._guard("get", key, stream.read)
        if body is None:
            raise RemoteError(
                f"{self.url}: {key}: {length or 'endlessly many'} bytes come where at most {most} can be right. "
                f"Is {self._client.meta.endpoint_url} an S3 service that works?",
                key=key,
                temporary=True,
            )
        if length is not None and len(body) != length:
            raise RemoteError(f"{self.url}: {key}: {len(body)} of {length} bytes came", key=key, temporary=True)
        first = span.partition("-")[0]
        if not (size.isdigit() and first.isdigit()):
            return body, 0, len(body)  # the whole object
        return body, int(first), int(size)

    def _call(self, operation: str, key: str, **arguments: Any) -> Any:
        self._follow_files()
        is_large = operation == "put_object" and len(arguments["Body"]) > _LARGE_PUT
        call = getattr(self._patient if is_large else self._client, operation)
        return self._guard(operation.partition("_")[0], key, lambda: call(Bucket=self._bucket, **arguments))

    def _guard(self, what: str, key: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except boto_errors.ClientError as error:
            details = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = details.get("Code", "")
            if what == "list" and code != "NoSuchBucket" and (code in MISSING or status == 404):
                endpoint = self._client.meta.endpoint_url
                raise RemoteUnusable(  # a bucket that exists lists nothing instead
                    f"{self.url}: no such bucket ({self._bucket}), or {endpoint} is no S3 service. "
                    "Create the bucket, or correct the URL or AWS_ENDPOINT_URL.",
                    key=key,
                ) from error
            where = f"{self.url}: {what} {key}".rstrip()
            ahead_s = _ahead_s(error.response)
            raise refusal(code, status, details.get("Message", ""), where, key, ahead_s=ahead_s) from error
        except (boto_errors.BotoCoreError, *_PASSING_ERRORS) as error:
            self._failed(error, what, key)

    def _failed(self, error: Exception, what: str, key: str) -> NoReturn:
        """Raise the RemoteError for a request that got no answer, or none that could be read."""
        where = f"{self.url}: {what} {key}".rstrip()
        if isinstance(error, _CREDENTIAL_ERRORS):
            raise RemoteForbidden(
                f"{self.url}: no usable credentials ({error}). Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or AWS_PROFILE.",
                key=key,
            ) from error
        if isinstance(error, boto_errors.SSLError):
            raise RemoteError(
                f"{where}: {error}. If the certificate is your own authority's, name it in AWS_CA_BUNDLE.",
                key=key,
                temporary=True,
            ) from error
        if isinstance(error, _UNCONNECTED):
            raise RemoteError(
                f"{self.url}: no answer ({error}). Is the network up? Check AWS_ENDPOINT_URL.",
                key=key,
                temporary=True,
            ) from error
        if isinstance(error, ResponseParserError):
            raise RemoteError(
                f"{where}: {self._client.meta.endpoint_url} does not answer as an S3 service does. "
                "Check AWS_ENDPOINT_URL, and proxies on the way.",
                key=key,
                temporary=True,
            ) from error
        if isinstance(error, _PASSING_ERRORS):
            raise RemoteError(f"{where}: no answer ({error})", key=key, temporary=True) from error
        raise RemoteUnusable(f"{where}: {error}. Check the URL and AWS_ENDPOINT_URL.", key=key) from error

    def _connect(self, environment: Mapping[str, str]) -> tuple[S3Client, S3Client, bool]:
        """A client for *environment*, a patient one for large PUTs, and whether they talk to AWS."""

        def from_environment(*names: str) -> str | None:
            return next((environment[name] for name in names if environment.get(name)), None)

        session = botocore.session.Session(profile=from_environment("AWS_PROFILE", "AWS_DEFAULT_PROFILE"))
        session.register_component("data_loader", _LOADER)
        for variable, name in (
            ("config_file", "AWS_CONFIG_FILE"),
            ("credentials_file", "AWS_SHARED_CREDENTIALS_FILE"),
            ("ca_bundle", "AWS_CA_BUNDLE"),
        ):
            if environment.get(name):
                session.set_config_variable(variable, environment[name])
        access_key, secret = from_environment("AWS_ACCESS_KEY_ID"), from_environment("AWS_SECRET_ACCESS_KEY")
        if access_key and secret:
            session.set_credentials(access_key, secret, from_environment("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"))
        files = CredentialFiles(None if access_key and secret else environment)
        endpoint = from_environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        try:
            region = from_environment("AWS_DEFAULT_REGION", "AWS_REGION") or session.get_config_variable("region")
            style = (session.get_scoped_config().get("s3") or {}).get("addressing_style")
            client = self._client_for(session, endpoint, region, style, self._timeouts_s[1])
            if endpoint is None and not _is_aws(client.meta.endpoint_url):  # a profile names another store
                endpoint = client.meta.endpoint_url
                client = self._client_for(session, endpoint, region, style, self._timeouts_s[1])
            patience_s = max(self._timeouts_s[1], LARGE_PUT_TIMEOUT_S)
            patient = self._client_for(session, endpoint, region, style, patience_s)
        except _CREDENTIAL_ERRORS as error:
            raise RemoteForbidden(f"{self.url}: {error}. Check AWS_PROFILE and the files in ~/.aws.") from error
        except (boto_errors.BotoCoreError, ValueError) as error:
            raise RemoteUnusable(f"{self.url}: {error}. Check AWS_ENDPOINT_URL and the bucket's name.") from error
        self._files = files
        return client, patient, endpoint is None or _is_aws(endpoint)

    def _client_for(
        self,
        session: botocore.session.Session,
        endpoint: str | None,
        region: str | None,
        style: Any,
        read_timeout_s: float,
    ) -> S3Client:
        on_aws = endpoint is None or _is_aws(endpoint)
        # A wildcard certificate covers one label only, and a store of one's own seldom has names for its buckets.
        style = style or ("path" if "." in self._bucket or not on_aws else "auto")
        checksums: Any = "when_supported" if on_aws else "when_required"  # many stores refuse AWS's newer checksums
        encrypted = endpoint is None or endpoint.startswith("https:")
        config = Config(
            connect_timeout=self._timeouts_s[0],
            read_timeout=read_timeout_s,
            retries={"total_max_attempts": 1, "mode": "standard"},  # ckptfs.remote.retry does it, and can be cancelled
            max_pool_connections=self._pool_size,
            tcp_keepalive=True,
            parameter_validation=False,  # it refuses memoryview, which everything behind it takes
            request_checksum_calculation=checksums,
            response_checksum_validation=checksums,
            # TLS and the checksum of each body guard it as well as its SHA-256, for a third of the CPU time.
            s3={"addressing_style": style, "payload_signing_enabled": not encrypted},
        )
        client = session.create_client("s3", region_name=region or "us-east-1", endpoint_url=endpoint, config=config)
        # "Expect: 100-continue" costs a round trip, and a second with stores that do not know it.
        client.meta.events.unregister("before-call.s3", add_expect_header)
        if not on_aws:
            client.meta.events.register("before-call.s3.DeleteObjects", add_md5)
        return cast("S3Client", client)


def _ahead_s(answer: Mapping[str, Any]) -> float:
    """How much our clock is ahead of the date of *answer*; 0 when that is not told."""
    try:
        date = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    except (KeyError, ValueError):
        return 0.0
    return time.time() - date.timestamp()


def _is_aws(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))
