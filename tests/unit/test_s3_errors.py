"""Answers of an S3 store: the error of each, its code, the next step, and the wait before a retry."""

from typing import Any

import pytest

from common.errors import ConfigError, FloeError, Refused, Unavailable
from common.objects import s3_errors as errors
from common.objects.port import ChecksumMismatch

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
REDIRECTED = (Unavailable, "E-S3-LATER", "redirected, such as to https://; check store.endpoint_url")
UNABLE = (ConfigError, "E-S3-REQUEST", "unsupported here; see store.checksum and store.encryption")
SETTINGS = "check store: endpoint_url (http or https), addressing_style, checksum, encryption, storage_class"
OTHER_SECRET = "the secret key is not the one of this access key, or a proxy changes requests"

# Status and code as stores send them, by the resulting error. The status decides for codes that are not listed;
# digits are the code of an answer without a body.
ANSWERS: list[tuple[tuple[type[FloeError], str, str], str]] = [
    (
        LATER,
        "503 SlowDown, 429 SlowDown, 400 SlowDown, 503 SlowDownRead, 503 SlowDownWrite, "
        "503 ServiceUnavailable, 400 ServiceUnavailableException, 503 ServerBusy, 500 InternalError, "
        "400 Throttling, 400 ThrottlingException, 400 ThrottledException, 400 RequestThrottled, "
        "400 RequestThrottledException, 429 TooManyRequests, 400 TooManyRequestsException, "
        "400 RequestLimitExceeded, 400 LimitExceededException, 509 BandwidthLimitExceeded, "
        "400 PriorRequestNotComplete, 409 ConditionalRequestConflict, 409 OperationAborted, "
        "409 ConcurrentModification, 400 RequestTimeout, 403 RequestExpired, 400 IncompleteBody, "
        "400 InvalidPart, 307 TemporaryRedirect, 307 Redirect, 503 XMinioServerNotInitialized, "
        "400 KMS.ThrottlingException, 400 KMS.LimitExceededException, 400 KMS.RequestLimitExceeded, "
        "500 KMS.InternalException, 400 KMS.KMSInternalException, 400 KMS.DependencyTimeoutException, "
        "400 KMS.KeyUnavailableException, 400 InternalException, 400 KMSInternalException, "
        "400 DependencyTimeoutException, 400 KeyUnavailableException, 307 307, 404 Novel, 408 Novel, "
        "409 Novel, 423 Novel, 425 425, 429 429, 429 Novel, 429 AccessDenied, 429 InvalidAccessKeyId, "
        "500 Novel, 502 502, 503 AccessDenied, 504 504, 520 Novel",
    ),
    ((Unavailable, "E-S3-CLOCK", "set this host's clock: it differs from the store's"), "403 RequestTimeTooSkewed"),
    ((Unavailable, "E-S3-ARCHIVED", "the object is archived: restore it first"), "403 InvalidObjectState"),
    (FULL, "507 InsufficientStorage, 507 Insufficient Storage, 507 XMinioStorageFull, 507 Novel"),
    (
        CAPPED,
        "403 QuotaExceeded, 409 QuotaExceeded, 429 QuotaExceeded, 402 ServiceQuotaExceededException, "
        "400 XMinioAdminBucketQuotaExceeded",
    ),
    (DIGEST, "400 BadDigest, 400 InvalidDigest, 400 XAmzContentChecksumMismatch, 400 XAmzContentSHA256Mismatch"),
    ((Refused, "E-S3-AUTH", "the server does not know this access key"), "403 InvalidAccessKeyId"),
    ((Refused, "E-S3-AUTH", OTHER_SECRET), "403 SignatureDoesNotMatch"),
    (EXPIRED, "400 ExpiredToken, 403 ExpiredTokenException, 400 TokenRefreshRequired"),
    ((Refused, "E-S3-AUTH", "the session token is not valid; renew it"), "400 InvalidToken"),
    (
        (ConfigError, "E-S3-REQUEST", "the store has no such class; see store.storage_class and compaction.levels"),
        "400 InvalidStorageClass",
    ),
    ((Refused, "E-S3-AUTH", "the account has no S3"), "403 NotSignedUp"),
    ((Refused, "E-S3-AUTH", "check the credential"), "403 InvalidSecurity"),
    (SUSPENDED, "403 UserSuspended, 403 UserDisable, 403 AccountProblem, 403 AllAccessDisabled, 402 Novel"),
    (DENIED, "403 AccessDenied, 403 Forbidden, 401 Unauthorized, 403 403, 401 401"),
    ((ConfigError, "E-S3-BUCKET", "create the bucket, or correct store.url"), "404 NoSuchBucket"),
    (UNABLE, "501 NotImplemented, 501 501, 501 Novel"),
    (REGION, "301 PermanentRedirect, 400 AuthorizationHeaderMalformed, 400 IllegalLocationConstraintException"),
    (REDIRECTED, "301 301, 302 , 308 308"),
    (REFUSED, "401 Novel, 403 Novel"),
    ((ConfigError, "E-S3-REQUEST", SETTINGS), "400 Novel, 405 MethodNotAllowed, 413 413, 412 PreconditionFailed"),
    (KMS, "400 KMS.DisabledException, 400 KMS.NotFoundException"),
]
ROWS = {(int(given[:3]), given[4:]): answer for answer, several in ANSWERS for given in several.split(", ")}


def answer(status: int, code: str, message: str = "", **headers: str) -> dict[str, Any]:
    found = {name.replace("_", "-"): value for name, value in headers.items()}
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": found}
    return {"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata}


@pytest.mark.parametrize(("given", "expected"), ROWS.items(), ids=[f"{status}-{code}" for status, code in ROWS])
def test_each_answer_has_its_error_its_code_and_its_next_step(given: tuple[int, str], expected: Any) -> None:
    found = errors.answer_error("put", "s3://archive/k", answer(*given))
    assert ((type(found), found.code, found.hint), found.exit_code) == (expected, KINDS[expected[0]])


def test_the_rows_hold_every_code_and_every_status_of_the_table() -> None:
    assert {code.removeprefix("KMS.") for _, code in ROWS} >= errors.CODE_MEANINGS.keys()
    assert {status for status, _ in ROWS} >= errors.STATUS_MEANINGS.keys()


def test_a_cap_that_is_reached_is_no_missing_right() -> None:
    for message, code in (
        ("Cannot upload files, storage cap exceeded. See the Caps & Alerts page to increase your cap.", "AccessDenied"),
        ("Transaction cap exceeded, see the Caps & Alerts page to increase your cap.", "AccessDenied"),
        ("Your request was denied: the quota of the project is exceeded", "Novel"),
    ):
        found = errors.answer_error("put", "s3://archive/k", answer(403, code, message))
        assert (type(found), found.code, found.hint) == CAPPED


def test_a_forbidden_key_and_a_busy_key_have_their_own_codes() -> None:
    message = "User is not authorized to perform: kms:GenerateDataKey"
    assert errors.answer_error("put", "s3://archive/k", answer(403, "AccessDenied", message)).code == "E-S3-KMS"
    assert errors.answer_error("put", "s3://archive/k", answer(503, "SlowDown", "kms is busy")).code == "E-S3-LATER"


def test_a_conflict_is_seen_by_its_status() -> None:
    for code, is_one in (("ConcurrentModification", True), ("409", True), ("Novel", True), ("QuotaExceeded", False)):
        assert errors.is_conflict(answer(409, code)) is is_one
        assert not errors.is_conflict(answer(503, code))


# The wait before a retry

DAY = "Thu, 26 Nov 2026"


def test_the_wait_is_the_one_that_the_answer_names() -> None:
    for status, code, headers, expected in (
        (429, "TooManyRequests", {"retry_after": "7"}, 7.0),
        (503, "SlowDown", {"retry_after": "3600"}, errors.MAX_RETRY_AFTER_S),
        (503, "SlowDown", {"retry_after": f"{DAY} 10:00:09 GMT", "date": f"{DAY} 10:00:00 GMT"}, 9.0),
        (503, "SlowDown", {"retry_after": f"{DAY} 09:00:00 GMT", "date": f"{DAY} 10:00:00 GMT"}, 0.0),
        (408, "408", {}, errors.S3_RETRY_PAUSES_S[0]),
        (400, "RequestExpired", {}, errors.S3_RETRY_PAUSES_S[0]),
        (400, "KMS.ThrottlingException", {}, errors.S3_RETRY_PAUSES_S[0]),
        # boto3 retries these by itself, and the writer resolves a conflict.
        (503, "SlowDown", {}, None),
        (503, "SlowDown", {"retry_after": f"{DAY} 10:00:09 GMT"}, None),
        (409, "ConcurrentModification", {"retry_after": "7"}, None),
        # No wait helps.
        (200, "", {"retry_after": "7"}, None),
        (404, "404", {"retry_after": "7"}, None),
        (507, "XMinioStorageFull", {"retry_after": "7"}, None),
    ):
        assert errors.pause_before(1, answer(status, code, **headers), 60.0) == expected


def test_the_wait_grows_and_is_bounded_by_the_patience_of_who_asks() -> None:
    busy = answer(408, "408")
    pauses = [errors.pause_before(attempt, busy, 60.0) for attempt in (1, 2, 3, 4)]
    assert pauses == [*errors.S3_RETRY_PAUSES_S, errors.S3_RETRY_PAUSES_S[-1]]
    assert errors.pause_before(1, answer(429, "429", retry_after="7"), 5.0) == 5.0
