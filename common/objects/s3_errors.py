"""Explanations of S3 errors and of missing answers, for the operator.

Each is one line that names the operation and the key. Of an address it contains scheme, host and port only.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from common.errors import ConfigError, FloeError, OutcomeUnknown, Refused, Unavailable
from common.objects.port import ChecksumMismatch, ObjectStore

PERMISSIONS = {
    "list": "s3:ListBucket",
    "get": "s3:GetObject",
    "head": "s3:GetObject",
    "put": "s3:PutObject",
    "delete": "s3:DeleteObject",
    "get versioning": "s3:GetBucketVersioning",
    "get lifecycle": "s3:GetLifecycleConfiguration",
    "create": "s3:CreateBucket",
}


class Meaning(NamedTuple):
    """The meaning of a refusal for the operator: the error to raise, a hint, and a code (empty: that of `kind`)."""

    kind: type[FloeError]
    hint: str = ""
    code: str = ""


RETRY_LATER = Meaning(Unavailable, "", "E-S3-LATER")
ACCESS_DENIED = Meaning(Refused, "", "E-S3-DENIED")  # the hint names the permission that the verb needs
WRONG_REGION = Meaning(ConfigError, "", "E-S3-REGION")  # the hint names the region
_SIGNATURE = "the secret key is not the one of this access key, or a proxy changes requests"
_REFUSED = Meaning(Refused, "check the credential, its rights, and the state of the account", "E-S3-DENIED")
_SETTINGS = "check store: endpoint_url (http or https), addressing_style, checksum, encryption, storage_class"
_INVALID = Meaning(ConfigError, _SETTINGS, "E-S3-REQUEST")
_UNSUPPORTED = Meaning(ConfigError, "unsupported here; see store.checksum and store.encryption", "E-S3-REQUEST")
_CLASS = Meaning(
    ConfigError, "the store has no such class; see store.storage_class and compaction.levels", "E-S3-REQUEST"
)
_KMS = Meaning(Refused, "grant kms:GenerateDataKey and kms:Decrypt on the key", "E-S3-KMS")
_FULL = Meaning(Unavailable, "make room in the store", "E-STORE-FULL")
_CAPPED = Meaning(Unavailable, "make room, or raise the quota or cap of the bucket and the account", "E-STORE-FULL")
_SUSPENDED = Meaning(Refused, "the store has suspended the account; ask its provider", "E-S3-AUTH")
_REDIRECTED = Meaning(Unavailable, "redirected, such as to https://; check store.endpoint_url", RETRY_LATER.code)
_EXPIRED = Meaning(Refused, "the credential has expired; renew it", "E-S3-AUTH")

MISSING_KEY = {"NoSuchKey", "NoSuchVersion"}

# Busy, too many requests, a conflict with another write, a request that came too late or in part.
_LATER = (
    "SlowDown SlowDownRead SlowDownWrite ServiceUnavailable ServiceUnavailableException ServerBusy InternalError "
    "Throttling ThrottlingException ThrottledException RequestThrottled RequestThrottledException TooManyRequests "
    "TooManyRequestsException RequestLimitExceeded LimitExceededException BandwidthLimitExceeded "
    "PriorRequestNotComplete ConditionalRequestConflict OperationAborted ConcurrentModification RequestTimeout "
    "RequestExpired IncompleteBody InvalidPart TemporaryRedirect Redirect XMinioServerNotInitialized "
    "InternalException KMSInternalException DependencyTimeoutException KeyUnavailableException"
)

#: The meaning of each code that a store may answer. A code of AWS KMS is listed without its `KMS.`.
CODE_MEANINGS: Mapping[str, Meaning] = {
    **dict.fromkeys(_LATER.split(), RETRY_LATER),
    "RequestTimeTooSkewed": Meaning(Unavailable, "set this host's clock: it differs from the store's", "E-S3-CLOCK"),
    "InvalidObjectState": Meaning(Unavailable, "the object is archived: restore it first", "E-S3-ARCHIVED"),
    **dict.fromkeys(("InsufficientStorage", "Insufficient Storage", "XMinioStorageFull"), _FULL),
    **dict.fromkeys(("QuotaExceeded", "ServiceQuotaExceededException", "XMinioAdminBucketQuotaExceeded"), _CAPPED),
    **dict.fromkeys(
        ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"),
        Meaning(ChecksumMismatch),
    ),
    "InvalidStorageClass": _CLASS,
    # The credential and its rights.
    "InvalidAccessKeyId": Meaning(Refused, "the server does not know this access key", "E-S3-AUTH"),
    "SignatureDoesNotMatch": Meaning(Refused, _SIGNATURE, "E-S3-AUTH"),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), _EXPIRED),
    "InvalidToken": Meaning(Refused, "the session token is not valid; renew it", "E-S3-AUTH"),
    "NotSignedUp": Meaning(Refused, "the account has no S3", "E-S3-AUTH"),
    "InvalidSecurity": Meaning(Refused, "check the credential", "E-S3-AUTH"),
    **dict.fromkeys(("UserSuspended", "UserDisable", "AccountProblem", "AllAccessDisabled"), _SUSPENDED),
    **dict.fromkeys(("AccessDenied", "Forbidden", "Unauthorized"), ACCESS_DENIED),
    # The configuration.
    "NoSuchBucket": Meaning(ConfigError, "create the bucket, or correct store.url", "E-S3-BUCKET"),
    "NotImplemented": _UNSUPPORTED,
    **dict.fromkeys(
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"), WRONG_REGION
    ),
}

# The meaning of an unknown code, by the status of its answer. For other statuses: LATER from 500 on, else _INVALID.
STATUS_MEANINGS: Mapping[int, Meaning] = {
    **dict.fromkeys((307, 404, 408, 409, 423, 425, 429), RETRY_LATER),
    **dict.fromkeys((401, 403), _REFUSED),
    **dict.fromkeys((301, 302, 308), _REDIRECTED),
    402: _SUSPENDED,
    501: _UNSUPPORTED,
    507: _FULL,
}
_DECISIVE_STATUSES = {408, 409, 425, 429}  # these, and 5xx except 501, take precedence over the code in the answer
_CAP_EXCEEDED = re.compile(r"\b(cap|quota)\b.{0,20}\bexceeded\b", re.IGNORECASE)


def error_meaning(code: str, status: int, message: str = "") -> Meaning:
    """Return the meaning of an answer with `code` and HTTP `status`.

    `code`: empty or the status in digits if the answer has no body. `message`: in the server's words.
    """
    known = CODE_MEANINGS.get(code.removeprefix("KMS.")) or (ACCESS_DENIED if code in ("401", "403") else None)
    of_status = STATUS_MEANINGS.get(status, RETRY_LATER if status >= 500 else _INVALID)
    if known is not None and issubclass(known.kind, Unavailable):
        return known
    if status in _DECISIVE_STATUSES or (status >= 500 and status != 501):
        return of_status
    if "kms" in f"{code} {message}".lower():
        return _KMS
    if _CAP_EXCEEDED.search(message):  # Backblaze answers AccessDenied for it
        return _CAPPED
    return known or of_status


# Error codes from stores that do not know a condition, besides status 501.
_CONDITION_UNKNOWN = {"NotImplemented", "InvalidArgument", "InvalidRequest", "UnsupportedHeader", "400"}


def may_refuse_conditions(response: Mapping[str, Any]) -> bool:
    """True if this answer to a conditional put may mean that the store supports none; a plain put settles it."""
    status = status_of(response)
    return status == 501 or (status == 400 and code_of(response) in _CONDITION_UNKNOWN)


def code_of(response: Mapping[str, Any]) -> str:
    """Return S3's name of the error, or the HTTP status if the answer has no body."""
    return str(response.get("Error", {}).get("Code", ""))


def status_of(response: Mapping[str, Any]) -> int:
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def answer_error(verb: str, place: str, response: Mapping[str, Any]) -> FloeError:
    """Return the FloeError for an error answer, as if its outcome were known.

    `verb`: of the object store port. `place`: `s3://bucket/key`. `response`: of boto3's ClientError.
    """
    error, status, code = response.get("Error", {}), status_of(response), code_of(response)
    message = str(error.get("Message", ""))
    text = f"{verb} {place}: {code or f'HTTP {status}'}" + (f": {message[:300]}" if message else "")
    region = error.get("Region") or _headers_of(response).get("x-amz-bucket-region")
    meaning = WRONG_REGION if status == 301 and region else error_meaning(code, status, message)
    hint = meaning.hint
    if meaning is ACCESS_DENIED:
        hint = f"grant {PERMISSIONS[verb]}"
        if verb in ("get", "head"):
            hint += ", and s3:ListBucket: without it the store refuses requests for missing objects, too"
    elif meaning is WRONG_REGION:
        hint = f"set store.region: {region or 'the region of the bucket'}"
    return meaning.kind(text, hint=hint, code=meaning.code)


def is_conflict(response: Mapping[str, Any]) -> bool:
    """True if the answer reports a conflict with another write: nothing was done, and the same request may succeed."""
    return status_of(response) == 409 and error_meaning(code_of(response), 409) is RETRY_LATER


# Retries

S3_RETRY_PAUSES_S = (0.1, 0.4, 1.6)  # seconds before the next try of a request that boto3 itself does not retry
MAX_RETRY_AFTER_S = 30.0  # seconds; the longest pause because an answer names a time
_BOTO_RETRIED_STATUSES = {409, 429, 500, 502, 503, 504}  # by boto3; 409 by the caller that writes


def pause_before(attempt: int, response: Mapping[str, Any], max_pause_s: float) -> float | None:
    """Return seconds until a request is sent again after `response` to try number `attempt` (from 1); None: boto3
    decides.

    An answer that means "later" may name the time (`Retry-After`); at most `max_pause_s` seconds of it count.
    """
    status, message = status_of(response), str(response.get("Error", {}).get("Message", ""))
    if status in (307, 404) or error_meaning(code_of(response), status, message) is not RETRY_LATER:
        return None
    delay = _retry_after(_headers_of(response))
    if delay is not None and status != 409:
        return min(delay, max_pause_s, MAX_RETRY_AFTER_S)
    return None if status in _BOTO_RETRIED_STATUSES else S3_RETRY_PAUSES_S[min(attempt, len(S3_RETRY_PAUSES_S)) - 1]


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return seconds, 0 or more; None if the answer names no time. A date is compared with the answer's own date."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text)
    with suppress(ValueError, TypeError):
        until, now = parsedate_to_datetime(text), parsedate_to_datetime(headers.get("date", ""))
        return max(0.0, (until - now).total_seconds())
    return None


def _headers_of(response: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the headers, with names in lower case."""
    found: Mapping[str, str] = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return found


# No answer

_URL = re.compile(r"""(https?://)(?:[^/\s"'@]*@)?([^/\s"'?]+)[^\s"']*""")
_UNKNOWN_HOST = re.compile(r"failed to resolve|name or service not known|nodename nor servname|getaddrinfo", re.I)
_ERRNO = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")


def without_paths(text: str) -> str:
    """Return `text` with each address in it reduced to scheme, host and port."""
    return _URL.sub(r"\1\2", text)


def connection_problem(endpoint: str, cause: str) -> tuple[str, str]:
    """Return the reason why no connection to the address `endpoint` was made, and a hint. `cause`: boto3's text."""
    host = urlsplit(endpoint).hostname or endpoint
    where = f"store {without_paths(endpoint)}"
    if f"[Errno {int(socket.EAI_AGAIN)}]" in cause:
        hint = "check this host's resolver (/etc/resolv.conf), or set store.endpoint_url to an IP address"
        return f"{where}: the host {host} is not resolved: no answer from the resolver", hint
    if _UNKNOWN_HOST.search(cause):
        return f"{where}: the host {host} is not known", "check store.endpoint_url, and this host's resolver"
    if "refused" in cause.lower():
        hint = "check that the store runs, and its port in store.endpoint_url"
        return f"{where}: the port refuses connections", hint
    found = _ERRNO.search(cause)
    reason = found[1].strip().lower() if found else without_paths(cause)
    return f"{where}: cannot be reached: {reason}", "check store.endpoint_url, and the network path to it"


NO_ANSWER_HINT = "check store.endpoint_url, that the store answers others, and the network path to it"
CLOSED_HINT = "check store.endpoint_url: the port of an S3 server, https:// if it speaks TLS, else http://; see its log"


STORE_VERBS = ("list", "get", "download", "put", "put_if_absent", "put_if_match", "delete", "head")


class ObservedStore:
    """A wrapper of `objects`. After each call it calls `on_call`, in the same thread: True if the server answered.

    "There is no such object" is an answer, and so is a refusal, except that of the credential (E-S3-AUTH). The wrapper
    has only the verbs of the port.
    """

    def __init__(self, objects: ObjectStore, on_call: Callable[[bool], None]) -> None:
        self._objects, self._on_call = objects, on_call

    def __getattr__(self, verb: str) -> Any:
        if verb not in STORE_VERBS:
            raise AttributeError(verb)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                answer = getattr(self._objects, verb)(*args, **kwargs)
            except (Unavailable, OutcomeUnknown):
                self._on_call(False)
                raise
            except FloeError as error:
                self._on_call(error.code != "E-S3-AUTH")  # a store that refuses the credential serves nothing
                raise
            self._on_call(True)
            return answer

        return call
