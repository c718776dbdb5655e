"""Each answer of an S3 store: the error that it becomes, its code, the next step, and the wait before another try."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import ConfigError, FloeError, Refused, Unavailable
from common.objects.port import ChecksumMismatch
from common.objects.s3_errors import CODES, MOST_ASKED, PAUSES, STATUSES, explain, is_conflict, pause_before

KINDS = {Unavailable: 75, ChecksumMismatch: 75, Refused: 77, ConfigError: 78}
LATER = (Unavailable, "E-S3-LATER", "")
FULL = (Unavailable, "E-STORE-FULL", "make room in the store")
CAPPED = (Unavailable, "E-STORE-FULL", "make room, or raise the quota or cap of the bucket and the account")
DIGEST = (ChecksumMismatch, "E-STORE-DIGEST", "")
SUSPENDED = (Refused, "E-S3-AUTH", "the store has suspended the account; ask its provider")
EXPIRED = (Refused, "E-S3-AUTH", "the credential has expired; renew it")
DENIED = (Refused, "E-S3-DENIED", "grant s3:PutObject")
REFUSED = (Refused, "E-S3-DENIED", "check the credential, its rights, and the state of the account")
KMS = (Refused, "E-S3-KMS", "grant kms:GenerateDataKey and kms:Decrypt on the key")
REGION = (ConfigError, "E-S3-REGION", "set store.region: the region of the bucket")
REDIRECTED = (Unavailable, "E-S3-LATER", "something redirects, as to https://; check store.endpoint_url")
UNABLE = (ConfigError, "E-S3-REQUEST", "this store cannot do it; see store.checksum and store.encryption")
SETTINGS = "check store: endpoint_url, addressing_style, checksum, encryption, storage_class"
INVALID = (ConfigError, "E-S3-REQUEST", SETTINGS)

# Status and code as stores send them; the answer that they get.
ROWS: dict[tuple[int, str], tuple[type[FloeError], str, str]] = {
    (503, "SlowDown"): LATER,
    (429, "SlowDown"): LATER,
    (400, "SlowDown"): LATER,
    (503, "SlowDownRead"): LATER,
    (503, "SlowDownWrite"): LATER,
    (503, "ServiceUnavailable"): LATER,
    (400, "ServiceUnavailableException"): LATER,
    (503, "ServerBusy"): LATER,
    (500, "InternalError"): LATER,
    (400, "Throttling"): LATER,
    (400, "ThrottlingException"): LATER,
    (400, "ThrottledException"): LATER,
    (400, "RequestThrottled"): LATER,
    (400, "RequestThrottledException"): LATER,
    (429, "TooManyRequests"): LATER,
    (400, "TooManyRequestsException"): LATER,
    (400, "RequestLimitExceeded"): LATER,
    (400, "LimitExceededException"): LATER,
    (509, "BandwidthLimitExceeded"): LATER,
    (400, "PriorRequestNotComplete"): LATER,
    (409, "ConditionalRequestConflict"): LATER,
    (409, "OperationAborted"): LATER,
    (409, "ConcurrentModification"): LATER,
    (400, "RequestTimeout"): LATER,
    (403, "RequestExpired"): LATER,
    (400, "IncompleteBody"): LATER,
    (400, "InvalidPart"): LATER,
    (307, "TemporaryRedirect"): LATER,
    (307, "Redirect"): LATER,
    (503, "XMinioServerNotInitialized"): LATER,
    (400, "KMS.ThrottlingException"): LATER,
    (400, "KMS.LimitExceededException"): LATER,
    (400, "KMS.RequestLimitExceeded"): LATER,
    (500, "KMS.InternalException"): LATER,
    (400, "KMS.KMSInternalException"): LATER,
    (400, "KMS.DependencyTimeoutException"): LATER,
    (400, "KMS.KeyUnavailableException"): LATER,
    (400, "InternalException"): LATER,
    (400, "KMSInternalException"): LATER,
    (400, "DependencyTimeoutException"): LATER,
    (400, "KeyUnavailableException"): LATER,
    (403, "RequestTimeTooSkewed"): (Unavailable, "E-S3-CLOCK", "set this host's clock: it and the store's differ"),
    (403, "InvalidObjectState"): (Unavailable, "E-S3-ARCHIVED", "the object is archived: restore it first"),
    (507, "InsufficientStorage"): FULL,
    (507, "Insufficient Storage"): FULL,
    (507, "XMinioStorageFull"): FULL,
    (403, "QuotaExceeded"): CAPPED,
    (409, "QuotaExceeded"): CAPPED,
    (429, "QuotaExceeded"): CAPPED,
    (402, "ServiceQuotaExceededException"): CAPPED,
    (400, "XMinioAdminBucketQuotaExceeded"): CAPPED,
    (400, "BadDigest"): DIGEST,
    (400, "InvalidDigest"): DIGEST,
    (400, "XAmzContentChecksumMismatch"): DIGEST,
    (400, "XAmzContentSHA256Mismatch"): DIGEST,
    (403, "InvalidAccessKeyId"): (Refused, "E-S3-AUTH", "the server does not know this access key"),
    (403, "SignatureDoesNotMatch"): (
        Refused,
        "E-S3-AUTH",
        "the secret key is not the one of this access key, or a proxy changes requests",
    ),
    (400, "ExpiredToken"): EXPIRED,
    (403, "ExpiredTokenException"): EXPIRED,
    (400, "TokenRefreshRequired"): EXPIRED,
    (400, "InvalidToken"): (Refused, "E-S3-AUTH", "the session token is not valid; renew it"),
    (403, "NotSignedUp"): (Refused, "E-S3-AUTH", "the account has no S3"),
    (403, "InvalidSecurity"): (Refused, "E-S3-AUTH", "check the credential"),
    (403, "UserSuspended"): SUSPENDED,
    (403, "UserDisable"): SUSPENDED,
    (403, "AccountProblem"): SUSPENDED,
    (403, "AllAccessDisabled"): SUSPENDED,
    (403, "AccessDenied"): DENIED,
    (403, "Forbidden"): DENIED,
    (401, "Unauthorized"): DENIED,
    (404, "NoSuchBucket"): (ConfigError, "E-S3-BUCKET", "create the bucket, or correct store.url"),
    (501, "NotImplemented"): UNABLE,
    (301, "PermanentRedirect"): REGION,
    (400, "AuthorizationHeaderMalformed"): REGION,
    (400, "IllegalLocationConstraintException"): REGION,
    # Codes that nobody listed, by their status; digits are the code of an answer without a body.
    (301, "301"): REDIRECTED,
    (302, ""): REDIRECTED,
    (308, "308"): REDIRECTED,
    (307, "307"): LATER,
    (401, "Novel"): REFUSED,
    (402, "Novel"): SUSPENDED,
    (403, "Novel"): REFUSED,
    (403, "403"): DENIED,
    (401, "401"): DENIED,
    (404, "Novel"): LATER,
    (408, "Novel"): LATER,
    (409, "Novel"): LATER,
    (423, "Novel"): LATER,
    (425, "425"): LATER,
    (429, "429"): LATER,
    (429, "Novel"): LATER,
    (429, "AccessDenied"): LATER,
    (429, "InvalidAccessKeyId"): LATER,
    (500, "Novel"): LATER,
    (502, "502"): LATER,
    (503, "AccessDenied"): LATER,
    (504, "504"): LATER,
    (520, "Novel"): LATER,
    (501, "501"): UNABLE,
    (501, "Novel"): UNABLE,
    (507, "Novel"): FULL,
    (400, "Novel"): INVALID,
    (405, "MethodNotAllowed"): INVALID,
    (413, "413"): INVALID,
    (412, "PreconditionFailed"): INVALID,
    (400, "KMS.DisabledException"): KMS,
    (400, "KMS.NotFoundException"): KMS,
}


def answer(status: int, code: str, message: str = "", **headers: str) -> dict[str, Any]:
    found = {name.replace("_", "-"): value for name, value in headers.items()}
    return {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": found},
    }


@pytest.mark.parametrize(("given", "expected"), ROWS.items(), ids=[f"{status}-{code}" for status, code in ROWS])
def test_each_answer_has_its_error_its_code_and_its_next_step(
    given: tuple[int, str], expected: tuple[type[FloeError], str, str]
) -> None:
    found = explain("put", "s3://archive/k", answer(*given))
    assert (type(found), found.code, found.hint) == expected
    assert found.exit_code == KINDS[expected[0]]


def test_the_rows_hold_every_code_and_every_status_of_the_table() -> None:
    assert CODES.keys() <= {code.removeprefix("KMS.") for _, code in ROWS}
    assert STATUSES.keys() <= {status for status, _ in ROWS}


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("Cannot upload files, storage cap exceeded. See the Caps & Alerts page to increase your cap.", "AccessDenied"),
        ("Transaction cap exceeded, see the Caps & Alerts page to increase your cap.", "AccessDenied"),
        ("Your request was denied: the quota of the project is exceeded", "Novel"),
    ],
)
def test_a_cap_that_is_reached_is_no_missing_right(message: str, code: str) -> None:
    found = explain("put", "s3://archive/k", answer(403, code, message))
    assert (type(found), found.code, found.hint) == CAPPED


def test_a_key_that_may_not_be_used_is_told_from_a_key_that_is_busy() -> None:
    message = "User is not authorized to perform: kms:GenerateDataKey"
    assert explain("put", "s3://archive/k", answer(403, "AccessDenied", message)).code == "E-S3-KMS"
    assert explain("put", "s3://archive/k", answer(503, "SlowDown", "kms is busy")).code == "E-S3-LATER"


@pytest.mark.parametrize(
    ("code", "is_one"),
    [("ConcurrentModification", True), ("409", True), ("Novel", True), ("QuotaExceeded", False)],
)
def test_a_conflict_is_told_by_its_status(code: str, is_one: bool) -> None:
    assert is_conflict(answer(409, code)) is is_one
    assert not is_conflict(answer(503, code))


# The wait before another try


@pytest.mark.parametrize(
    ("status", "code", "headers", "expected"),
    [
        (429, "TooManyRequests", {"retry_after": "7"}, 7.0),
        (503, "SlowDown", {"retry_after": "0"}, 0.0),
        (503, "SlowDown", {"retry_after": "3600"}, MOST_ASKED),
        (
            503,
            "SlowDown",
            {"retry_after": "Thu, 26 Nov 2026 10:00:09 GMT", "date": "Thu, 26 Nov 2026 10:00:00 GMT"},
            9.0,
        ),
        (
            503,
            "SlowDown",
            {"retry_after": "Thu, 26 Nov 2026 09:00:00 GMT", "date": "Thu, 26 Nov 2026 10:00:00 GMT"},
            0.0,
        ),
        (408, "408", {"retry_after": "soon"}, PAUSES[0]),
        (408, "408", {}, PAUSES[0]),
        (425, "425", {}, PAUSES[0]),
        (400, "RequestExpired", {}, PAUSES[0]),
        (400, "KMS.ThrottlingException", {}, PAUSES[0]),
        # boto3 sends these again by itself, and who writes what is in conflict.
        (429, "TooManyRequests", {}, None),
        (503, "SlowDown", {}, None),
        (503, "SlowDown", {"retry_after": "Thu, 26 Nov 2026 10:00:09 GMT"}, None),
        (409, "ConcurrentModification", {"retry_after": "7"}, None),
        # Nothing to wait for.
        (200, "", {"retry_after": "7"}, None),
        (404, "404", {"retry_after": "7"}, None),
        (403, "AccessDenied", {"retry_after": "7"}, None),
        (507, "XMinioStorageFull", {"retry_after": "7"}, None),
        (501, "NotImplemented", {}, None),
    ],
)
def test_the_wait_is_the_one_that_the_answer_names(
    status: int, code: str, headers: dict[str, str], expected: float | None
) -> None:
    assert pause_before(1, answer(status, code, **headers), 60.0) == expected


def test_the_wait_grows_and_is_bounded_by_the_patience_of_who_asks() -> None:
    busy = answer(408, "408")
    assert [pause_before(attempt, busy, 60.0) for attempt in (1, 2, 3, 4)] == [*PAUSES, PAUSES[-1]]
    assert pause_before(1, answer(429, "429", retry_after="7"), 5.0) == 5.0
