"""What an S3 server's refusals mean to the operator, and what it means that no answer came.

One line each, naming the operation and the key, and of an address scheme, host and port only.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from common.errors import ConfigError, FloeError, OutcomeUnknown, Refused, Unavailable
from common.objects.port import ChecksumMismatch, ObjectStore

PERMISSIONS = {
    "list": "s3:ListBucket",
    "list versions": "s3:ListBucketVersions",
    "get": "s3:GetObject",
    "head": "s3:GetObject",
    "put": "s3:PutObject",
    "delete": "s3:DeleteObject",
    "get versioning": "s3:GetBucketVersioning",
    "get lifecycle": "s3:GetLifecycleConfiguration",
}

_EXPIRED = "the credential has expired; renew it"
_CREDENTIALS = {
    "InvalidAccessKeyId": "the server does not know this access key",
    "SignatureDoesNotMatch": "the secret key is not the one of this access key, or a proxy changes requests",
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), _EXPIRED),
    "InvalidToken": "the session token is not valid; renew it",
    "NotSignedUp": "the account has no S3",
    "InvalidSecurity": "check the credential",
}
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden", "Unauthorized", "401", "403"}
_DIGEST = ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch")
_ELSEWHERE = {"PermanentRedirect", "TemporaryRedirect", "Redirect", "301", "307"} | {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
_FULL = ("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "ServiceQuotaExceededException", "507")
_LATER = {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequests", "429"}
MISSING_KEY = {"NoSuchKey", "NoSuchVersion"}
NOT_MET = {"PreconditionFailed", "412"}
IN_CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "409"}

# What a code means whatever the status and the verb: the error, its hint and its code.
_ALWAYS: Mapping[str, tuple[type[FloeError], str, str]] = {
    **{code: (Refused, hint, "E-S3-AUTH") for code, hint in _CREDENTIALS.items()},
    "NoSuchBucket": (ConfigError, "create the bucket, or correct store.url", "E-S3-BUCKET"),
    **dict.fromkeys(
        ("NotImplemented", "501"),
        (ConfigError, "this store cannot do it; see store.checksum and store.encryption", "E-S3-REQUEST"),
    ),
    **dict.fromkeys(_DIGEST, (ChecksumMismatch, "", "")),
    "RequestTimeTooSkewed": (Unavailable, "set this host's clock: it and the store's differ", "E-S3-CLOCK"),
    "InvalidObjectState": (Unavailable, "the object is archived: restore it first", "E-S3-ARCHIVED"),
    **dict.fromkeys(_FULL, (Unavailable, "make room in the store", "E-STORE-FULL")),
}


def code_of(response: Mapping[str, Any]) -> str:
    """S3's name of the error, or the HTTP status where the answer has no body."""
    return str(response.get("Error", {}).get("Code", ""))


def status_of(response: Mapping[str, Any]) -> int:
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def explain(verb: str, place: str, response: Mapping[str, Any]) -> FloeError:
    """The FloeError for an error answer, as if its outcome were known.

    `verb`: of the object store port. `place`: `s3://bucket/key`. `response`: what boto3's ClientError holds.
    """
    told, status, code = response.get("Error", {}), status_of(response), code_of(response)
    message = str(told.get("Message", ""))
    text = f"{verb} {place}: {code}" + (f": {message[:300]}" if message else "")
    if "kms" in f"{code} {message}".lower() and status < 500:
        return Refused(text, hint="grant kms:GenerateDataKey and kms:Decrypt on the key", code="E-S3-KMS")
    if code in _ALWAYS:
        kind, hint, name = _ALWAYS[code]
        return kind(text, hint=hint, code=name)
    if code in _DENIED:
        hint = f"grant {PERMISSIONS[verb]}"
        if verb in ("get", "head"):
            hint += ", and s3:ListBucket: without it a missing object is refused too, and is not taken as missing"
        return Refused(text, hint=hint, code="E-S3-DENIED")
    if code in _ELSEWHERE:
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = told.get("Region") or headers.get("x-amz-bucket-region") or "the bucket's region"
        return ConfigError(text, hint=f"set store.region: {region}", code="E-S3-REGION")
    if status >= 500 or status == 404 or code in _LATER | IN_CONFLICT:
        return Unavailable(text, code="E-S3-LATER")
    hint = "check store: endpoint_url, addressing_style, checksum, encryption, storage_class"
    return ConfigError(text, hint=hint, code="E-S3-REQUEST")


# No answer

_URL = re.compile(r"""(https?://)(?:[^/\s"'@]*@)?([^/\s"'?]+)[^\s"']*""")
_UNKNOWN_HOST = re.compile(r"failed to resolve|name or service not known|nodename nor servname|getaddrinfo", re.I)
# What a server that does not speak TLS makes of a handshake, by the versions of OpenSSL.
_NOT_TLS = re.compile(r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|record layer failure|UNKNOWN_PROTOCOL|HTTP_REQUEST")
_ERRNO = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")
PROBE_TIMEOUT = 3.0  # seconds


def without_paths(text: str) -> str:
    """`text` with each address in it reduced to scheme, host and port."""
    return _URL.sub(r"\1\2", text)


def why_not_connected(endpoint: str, cause: str) -> tuple[str, str]:
    """Why no connection to the address `endpoint` was made, and what to do. `cause`: boto3's text."""
    host = urlsplit(endpoint).hostname or endpoint
    where = f"store {without_paths(endpoint)}"
    if f"[Errno {int(socket.EAI_AGAIN)}]" in cause:
        hint = "look at this host's resolver (/etc/resolv.conf), or have store.endpoint_url name an address"
        return f"{where}: the host {host} is not resolved, the resolver gives no answer", hint
    if _UNKNOWN_HOST.search(cause):
        return f"{where}: the host {host} is not known", "check store.endpoint_url, and this host's resolver"
    if "refused" in cause.lower():
        hint = "is the store running, and is this its port? check store.endpoint_url"
        return f"{where}: the port refuses connections", hint
    found = _ERRNO.search(cause)
    why = found[1].strip().lower() if found else without_paths(cause)
    return f"{where}: cannot be reached: {why}", "check store.endpoint_url, and the network on the way"


SILENT = "does it answer others? look at the store and at what is on the way; check store.endpoint_url"
CLOSED = "is it the port of an S3 server? look at the store's log; check store.endpoint_url"


def is_not_tls(cause: str) -> bool:
    return _NOT_TLS.search(cause) is not None


def speaks_tls(endpoint: str) -> bool:
    """Whether the server at the address answers a TLS handshake, with any certificate. Blocking."""
    address = urlsplit(endpoint)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((address.hostname or "", address.port or 80), PROBE_TIMEOUT) as line,
            context.wrap_socket(line, server_hostname=address.hostname),
        ):
            return True
    except ssl.SSLError as error:
        return "ALERT" in str(error).upper()
    except (OSError, ValueError):
        return False


def wrong_scheme(text: str, endpoint: str) -> ConfigError:
    found, expected = ("https", "http") if endpoint.startswith("https") else ("http", "https")
    what = "the port does not speak TLS" if found == "https" else "the port speaks TLS"
    address = without_paths(endpoint)
    hint = f"set store.endpoint_url: {expected}{address.removeprefix(found)}, or the port that speaks {found}"
    return ConfigError(f"{text}: store {address}: {what}", hint=hint, code="E-S3-TLS")


VERBS = ("list", "get", "download", "put", "put_if_absent", "put_if_match", "delete", "head")


class AnsweringStore:
    """`objects`; after each call it calls `told`, in the same thread, with whether the server gave an answer.

    A refusal is an answer, and so is "there is no such object". It has only the verbs of the port.
    """

    def __init__(self, objects: ObjectStore, told: Callable[[bool], None]) -> None:
        self._objects, self._told = objects, told

    def __getattr__(self, verb: str) -> Any:
        if verb not in VERBS:
            raise AttributeError(verb)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                answer = getattr(self._objects, verb)(*args, **kwargs)
            except (Unavailable, OutcomeUnknown):
                self._told(False)
                raise
            except FloeError:
                self._told(True)
                raise
            self._told(True)
            return answer

        return call
