"""What the error answers of S3-compatible stores mean: a code and a status become a `RemoteError`. Pure.

Codes are those of https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html and what MinIO, Ceph, SeaweedFS,
R2 and GCS send instead; answers to HEAD have no body, so that the status is all there is.
"""

from __future__ import annotations

from ckptfs.errors import ObjectExists, ObjectMissing, RemoteError, RemoteForbidden, RemoteUnusable

MISSING = {"NoSuchKey", "NotFound", "404"}
_TAKEN = {"PreconditionFailed", "412"}
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301", "307"}
_CLOCK = {"RequestTimeTooSkewed", "RequestExpired"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
_FORBIDDEN = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled", "AccountProblem"}
_NOT_OFFERED = {"NotImplemented", "MissingContentMD5", "MethodNotAllowed"}
_FULL = {"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull"}
_TEMPORARY = {
    "BadDigest",  # the body changed on its way
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
}
_TEMPORARY_STATUS = {408, 409, 425, 429}
_MOST_SKEW_S = 900.0
"""What S3 takes, and everybody after it."""


class RangeMissing(RemoteError):
    """The object is shorter than the range that was asked for."""


class NotOffered(RemoteError):
    """The store does not know this operation or header."""


def refusal(code: str, status: int, message: str, where: str, key: str, *, ahead_s: float = 0.0) -> RemoteError:
    """The error for an answer with *code* (may be empty) and HTTP *status* (0 when unknown).

    *where* opens the message: the URL, what was tried and the key. *ahead_s* is how much this machine's clock is ahead
    of the answer's date.
    """
    said = f"{code or status}: {message}" if message else str(code or status)
    if code in _TAKEN or status == 412:
        return ObjectExists(f"{where}: the key exists already", key=key)
    if code == "NoSuchBucket":
        return RemoteUnusable(f"{where}: no such bucket. Create it, or correct the URL or AWS_ENDPOINT_URL.", key=key)
    skewed = status == 403 and abs(ahead_s) > _MOST_SKEW_S  # an answer to HEAD says no more
    if code in _CLOCK or skewed:
        differs = f"is {abs(ahead_s) / 60:.0f} minutes {'ahead of' if ahead_s > 0 else 'behind'} the store's"
        if not skewed:
            differs = "differs too much from the store's"
        return RemoteForbidden(f"{where}: this machine's clock {differs} ({said}). Set the clock.", key=key)
    if code in _REGION or status in (301, 307):
        return RemoteUnusable(f"{where}: the bucket is in another region ({said}). Set AWS_DEFAULT_REGION.", key=key)
    if code in _EXPIRED:
        return RemoteForbidden(f"{where}: the credentials have expired ({said}). Provide new ones.", key=key)
    if code in _FULL or status == 507:  # of a quota that is reached, Ceph says 403
        return RemoteError(
            f"{where}: the store is full ({said}). Make room there, or have the quota raised.", key=key, temporary=True
        )
    if code in _FORBIDDEN or status in (401, 403):
        return RemoteForbidden(
            f"{where}: the store refuses these credentials ({said}). Check them, and their rights on the bucket.",
            key=key,
        )
    if code in MISSING or status == 404:
        return ObjectMissing(f"{where}: no such object", key=key)
    if code == "InvalidRange" or status == 416:
        return RangeMissing(f"{where}: the object has no such range", key=key)
    if code in _NOT_OFFERED or status == 501:
        return NotOffered(f"{where}: the store does not offer this ({said})", key=key)
    temporary = code in _TEMPORARY or status >= 500 or status in _TEMPORARY_STATUS
    return RemoteError(f"{where}: {said}", key=key, temporary=temporary)
