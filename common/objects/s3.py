"""The object store port over S3, by boto3.

Answers are not trusted: a listing must name its bucket and prefix, a body must be as long as announced, and a write is
`OutcomeUnknown` if its answer was lost, even if a later try of it was refused.
"""

from __future__ import annotations

import builtins
import copy
import io
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import boto3.session
from botocore import exceptions as boto
from botocore.config import Config
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from common.clock import Clock, SystemClock
from common.errors import (
    ConfigError,
    FloeError,
    OutcomeUnknown,
    Refused,
    StoreUnavailable,
    Unavailable,
    certificate_hint,
    is_out_of_date,
)
from common.logs import get_logger
from common.objects import s3_errors
from common.objects.port import (
    COPY_CHUNK_BYTES,
    Body,
    ConditionalPutRefused,
    LifecycleRule,
    ObjectInfo,
    body_size,
    check_key,
    check_prefix,
    measure_call,
)
from common.objects.s3_errors import S3_RETRY_PAUSES_S, code_of, is_conflict, status_of, without_paths
from common.objects.s3_transfer import (
    AnswerBody,
    BoundedSession,
    ByteRange,
    Listing,
    TruncatedBodyError,
    Upload,
    enabled_rules,
    parse_head,
)
from common.settings.types import FileSecret, regular_file

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class S3Options:
    """The options of requests to a store.

    `checksum`: the kind that the server checks on a put. `attempts`: per request, the first included.
    `connect_timeout`, `read_timeout`: seconds. Bodies above `multipart_bytes` are uploaded in parts of `part_bytes`.
    `conditional_puts`: `no` sends no condition, `auto` none after the first refusal: ConditionalPutRefused; with `yes`
    such a refusal is a configuration error.
    """

    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    checksum: Literal["sha256", "none"] = "sha256"
    storage_class: str = ""
    encryption: Literal["none", "sse-s3", "sse-kms"] = "none"
    kms_key_id: str = ""
    attempts: int = 5
    connect_timeout: float = 5.0
    read_timeout: float = 60.0
    multipart_bytes: int = 64 * 1024 * 1024
    part_bytes: int = 16 * 1024 * 1024
    conditional_puts: Literal["auto", "yes", "no"] = "auto"

    def put_fields(self) -> dict[str, Any]:
        fields = {
            "StorageClass": self.storage_class,
            "ServerSideEncryption": {"sse-s3": "AES256", "sse-kms": "aws:kms"}.get(self.encryption, ""),
            "SSEKMSKeyId": self.kms_key_id if self.encryption == "sse-kms" else "",
        }
        return {name: value for name, value in fields.items() if value}


# "Not implemented", "busy" and "full" mean that nothing was done; other failures may come after the work.
_NOT_DONE_STATUSES = {501, 503, 507}
_NOT_SENT_ERRORS = (boto.EndpointConnectionError, boto.ConnectTimeoutError)


class TryOutcomes(threading.local):
    """The tries of this thread's current request: one may have been done although its answer was lost.

    boto3 shows the outcome of the last try only. If a first try was done and its answer was lost, then `412` on the
    second means "it is there", perhaps because of this very request.
    """

    #: True if any try since the last reset may have been done; each request resets it to False when it begins.
    may_be_done = False

    def record(self, response: Any = None, caught_exception: Exception | None = None, **_: object) -> None:
        """Record the outcome of one try; boto3 calls this after each (its event `needs-retry`)."""
        if caught_exception is not None:
            self.may_be_done |= not isinstance(caught_exception, _NOT_SENT_ERRORS)
        elif response is not None:
            status = response[0].status_code
            self.may_be_done |= status >= 500 and status not in _NOT_DONE_STATUSES


__all__ = ["BotoCoreError", "ClientError", "S3Account", "make_client"]


@dataclass(frozen=True, slots=True)
class S3Account:
    """Credential and address.

    Without `access_key_id` the credential comes from the sources of AWS tools. `endpoint_url` None: the address that
    AWS tools use, so `AWS_ENDPOINT_URL_SQS` and similar variables apply. `region` None: theirs, otherwise us-east-1.
    `verify`: the trusted certificates, as boto3 takes them.
    """

    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    region: str | None = None
    endpoint_url: str | None = None
    verify: bool | str | None = None


def make_session(account: S3Account) -> boto3.session.Session:
    """Return a session with the credential. A file is read once; an expiring credential renews itself at its source."""
    return boto3.session.Session(account.access_key_id, account.secret_access_key)


def make_client(
    service: str, account: S3Account, place: str, session: boto3.session.Session | None = None, **config: Any
) -> Any:
    """Return a client of `service`, `s3` or `sqs`; sends no request to it yet. `config`: as botocore's Config takes it.

    Raises ConfigError, which names `place`, if the address or the region is invalid; also if the file of trusted
    certificates cannot be read.
    """
    if isinstance(account.verify, str):
        try:
            regular_file(account.verify)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"store.tls.ca {account.verify}: {reason}", code="E-S3-TLS") from None
    logging.getLogger("urllib3.connection").setLevel(logging.ERROR)  # the error reports a bad certificate itself
    session = session or make_session(account)
    client: Any = session.client  # one signature for all services; the stubs have one for each
    try:
        made = client(
            service,
            endpoint_url=account.endpoint_url,
            region_name=account.region or session.region_name or "us-east-1",
            verify=account.verify,
            config=Config(
                tcp_keepalive=True,
                proxies={},  # no proxy from the environment, which could send the data elsewhere
                user_agent_appid="floe",  # type: ignore[call-arg]  # the stubs do not know it
                **config,
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"{place}: {error}", code="E-S3-REQUEST") from error
    endpoint = made._endpoint
    endpoint.http_session = BoundedSession(endpoint.http_session, ResponseParserError, boto.HTTPClientError)
    return made


def _disable_redirects(context: dict[str, Any], **_: object) -> None:
    context["s3_redirect"]["redirected"] = True


KEYS_PER_PAGE = 1000
KEPT_CONNECTIONS = 32  # kept open, as many as threads use the store
CONDITIONS_HINT = "concurrent writes are claimed in the state bucket; retention needs a store with conditions"

T = TypeVar("T")


class S3Objects:
    """One bucket.

    `secret_file`: the file with the secret, if there is one. It is read again when the secret was refused, or on
    SIGHUP, and its new content is then used. After a refusal, so is another credential in the files of AWS tools.
    Raises ConfigError if the address or the region is invalid.
    """

    def __init__(
        self,
        bucket: str,
        account: S3Account,
        options: S3Options | None = None,
        clock: Clock | None = None,
        secret_file: FileSecret | None = None,
    ) -> None:
        self._bucket, self._account = bucket, account
        self._options, self._clock = options or S3Options(), clock or SystemClock()
        self._outcomes = TryOutcomes()
        self._secret_file, self._credential_lock = secret_file, threading.Lock()
        self._client = self._make_client()
        # Before the first answer the address may be wrong; later the same errors mean a network problem.
        self._has_answered = False
        self._refuses_conditions = self._options.conditional_puts == "no"

    def with_storage_class(self, name: str) -> S3Objects:
        view = copy.copy(self)
        view._options = replace(self._options, storage_class=name)
        return view

    def _make_client(self) -> S3Client:
        options, session = self._options, make_session(self._account)
        # A self-hosted server seldom has a host name for each bucket.
        is_path = self._account.endpoint_url and options.addressing_style == "auto"
        client: S3Client = make_client(
            "s3",
            self._account,
            f"store s3://{self._bucket}",
            session,
            retries={"mode": "standard", "total_max_attempts": options.attempts},
            max_pool_connections=KEPT_CONNECTIONS,
            connect_timeout=options.connect_timeout,
            read_timeout=options.read_timeout,
            s3={"addressing_style": "path" if is_path else options.addressing_style},
            # Checksums are set by this module: boto3's own come as trailers, which many stores refuse.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        pause_before: Any = self._pause_before  # the stubs have no handler that returns a value
        client.meta.events.register_first("needs-retry.s3", pause_before)
        client.meta.events.register("needs-retry.s3", self._outcomes.record)
        if self._account.endpoint_url:  # such a server's redirect names no region: boto3 would retry for ever
            client.meta.events.register("before-parameter-build.s3", _disable_redirects)
        self._credential = session.get_credentials()  # the client's own: searched for once
        return client

    def _pause_before(self, attempts: int, response: Any = None, **_: object) -> float | None:
        """Return seconds until boto3 sends the request again; None leaves it to boto3's own handler, called next."""
        if response is None or attempts >= self._options.attempts:
            return None
        return s3_errors.pause_before(attempts, response[1], self._options.read_timeout)

    def _use_new_secret(self) -> None:
        """Use the new content of the secret's file, if there is one, from now on."""
        if self._secret_file is not None:
            with self._credential_lock:
                if (secret := self._secret_file.get_secret_value()) != self._account.secret_access_key:
                    self._account = replace(self._account, secret_access_key=secret)
                    self._client = self._make_client()

    def _reread_credential(self, refused: S3Client) -> str:
        """Use another credential than that of `refused` from now on, if there is one; return its source, or an empty
        text.
        """
        if self._secret_file is not None:
            self._secret_file.reread()
            self._use_new_secret()
            return self._secret_file.path if self._client is not refused else ""
        if self._account.access_key_id or isinstance(self._credential, RefreshableCredentials):
            return ""
        with self._credential_lock:
            if self._client is refused:
                before = self._credential
                with suppress(ConfigError):  # the file may be incomplete
                    client = self._make_client()
                    if self._credential is not None and _key_parts(before) != _key_parts(self._credential):
                        self._client = client
                        log.info("credential reread", action="credential_reread")
                if self._client is refused:
                    self._credential = before
                    return ""
        return "the AWS credential chain"

    @measure_call("list")
    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> builtins.list[ObjectInfo]:
        """List as the port requires. SeaweedFS begins in the wrong place if `start_after` is among folders, but not if
        it is among the objects of one folder, as in Floe.
        """
        check_prefix(prefix)
        listing = Listing(self._bucket, prefix, start_after, limit)
        more: dict[str, Any] = {"StartAfter": start_after} if start_after else {}
        while not listing.is_full():
            with self._translate_errors("list", prefix):
                answer = self._client.list_objects_v2(
                    Bucket=self._bucket, Prefix=prefix, MaxKeys=min(limit or KEYS_PER_PAGE, KEYS_PER_PAGE), **more
                )
            if (token := listing.add(answer)) is None:
                break
            more["ContinuationToken"] = token
        return listing.sorted_objects()

    def pages(self, prefix: str) -> Iterator[builtins.list[ObjectInfo]]:
        """Yield the pages. Raises Unavailable (E-LIST-INVALID) if two successive pages have the same token."""
        check_prefix(prefix)
        listing, more = Listing(self._bucket, prefix, "", None), dict[str, Any]()
        while True:
            with measure_call("list"), self._translate_errors("list", prefix):
                answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=KEYS_PER_PAGE, **more)
            token = listing.add(answer)
            yield listing.take_objects()
            if token is None:
                return
            more["ContinuationToken"] = token

    def versioning(self) -> str:
        with self._translate_errors("get versioning", ""):
            return str(self._client.get_bucket_versioning(Bucket=self._bucket).get("Status", ""))

    def lifecycle(self) -> builtins.list[LifecycleRule]:
        with self._translate_errors("get lifecycle", ""):
            try:
                answer = self._client.get_bucket_lifecycle_configuration(Bucket=self._bucket)
            except ClientError as error:
                if code_of(error.response) == "NoSuchLifecycleConfiguration":
                    return []
                raise
        return enabled_rules(answer)

    def create_bucket(self) -> None:
        """Create the bucket in the region of the account; the default region must not be named."""
        region = self._client.meta.region_name
        place: Any = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        with self._translate_errors("create", ""):
            self._client.create_bucket(Bucket=self._bucket, **place)

    @measure_call("get")
    def get(self, key: str, *, first: int = 0, length: int | None = None) -> bytes | None:
        check_key(key)
        if length == 0:
            return None if self.head(key) is None else b""
        wanted = None if first == 0 and length is None else ByteRange(first, length)
        return self._read(key, wanted, lambda body: b"".join(body.chunks()))

    @measure_call("get")
    def download(self, key: str, path: Path) -> bool:
        check_key(key)

        def store(body: AnswerBody) -> bool:
            with path.open("wb") as file:
                file.writelines(body.chunks(COPY_CHUNK_BYTES))
            return True

        return self._read(key, None, store) is not None

    @measure_call("put")
    def put(
        self, key: str, body: Body, *, sha256: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> None:
        self._write(key, body, sha256, metadata, {})

    @measure_call("put")
    def put_if_absent(
        self, key: str, body: Body, *, sha256: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> bool:
        return self._write(key, body, sha256, metadata, {"IfNoneMatch": "*"})

    @measure_call("put")
    def put_if_match(self, key: str, body: Body, etag: str) -> bool:
        return self._write(key, body, None, None, {"IfMatch": f'"{etag}"'})

    @measure_call("delete")
    def delete(self, key: str) -> None:
        check_key(key)
        with self._translate_errors("delete", key, writes=True):
            try:
                self._client.delete_object(Bucket=self._bucket, Key=key)
            except ClientError as error:
                if code_of(error.response) not in s3_errors.MISSING_KEY:
                    raise

    @measure_call("head")
    def head(self, key: str) -> ObjectInfo | None:
        check_key(key)
        mode: dict[str, Any] = {"ChecksumMode": "ENABLED"} if self._options.checksum == "sha256" else {}
        with self._translate_errors("head", key):
            try:
                answer = self._client.head_object(Bucket=self._bucket, Key=key, **mode)
            except ClientError as error:
                # The answer to a HEAD has no body: it names neither the missing thing nor the reason of a refusal.
                if status_of(error.response) < 500 and not self._exists(key):
                    return None
                raise
        if (info := parse_head(key, answer)) is None:
            raise Unavailable(f"head {self._url(key)}: no size or time in the answer", code="E-S3-INVALID")
        return info

    # Reading

    def _read(self, key: str, wanted: ByteRange | None, use: Callable[[AnswerBody], T]) -> T | None:
        for pause in (*S3_RETRY_PAUSES_S[: self._options.attempts - 1], None):
            try:
                if (body := self._open(key, wanted)) is None:
                    return None
                with closing(body):
                    return use(body)
            except (BotoCoreError, HTTPError, TruncatedBodyError) as error:
                cut = TruncatedBodyError(f"get {self._url(key)}: {without_paths(str(error))}")
                if pause is None:
                    raise cut from error
            log.warning("object body truncated", action="body_truncated", key=key, error=str(cut))
            self._clock.block(pause)
        raise AssertionError("unreachable")

    def _open(self, key: str, wanted: ByteRange | None) -> AnswerBody | None:
        ranged: dict[str, Any] = {"Range": wanted.header()} if wanted else {}
        with self._translate_errors("get", key):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=key, **ranged)
            except ClientError as error:
                if code_of(error.response) in s3_errors.MISSING_KEY:
                    return None
                if status_of(error.response) == 416:  # the object ends before the range begins
                    return AnswerBody(io.BytesIO(), 0)
                raise
        return AnswerBody.open(answer, wanted, lambda: info.size if (info := self.head(key)) else None)

    def _exists(self, key: str) -> bool:
        if body := self._open(key, ByteRange(0, 1)):
            body.close()
        return body is not None

    # Writing

    def _write(
        self, key: str, body: Body, sha256: str | None, metadata: Mapping[str, str] | None, condition: Mapping[str, str]
    ) -> bool:
        check_key(key)
        if condition and self._refuses_conditions:
            is_off = self._options.conditional_puts == "no"
            reason = "store.conditional_puts is no" if is_off else "one was refused before"
            raise ConditionalPutRefused(f"put {self._url(key)}: no condition is sent: {reason}", hint=CONDITIONS_HINT)
        self._use_new_secret()
        target = {"Bucket": self._bucket, "Key": key}
        fields = {"Metadata": dict(metadata or {}), **self._options.put_fields()}
        upload = Upload(self._client, target, body, sha256, self._options.checksum, fields)
        with self._translate_errors("put", key, writes=True):
            for pause in S3_RETRY_PAUSES_S:
                try:
                    return self._send(upload, condition)
                except ClientError as error:
                    if not is_conflict(error.response) or self._outcomes.may_be_done:
                        raise
                self._clock.block(pause)
            return self._send(upload, condition)

    def _send(self, upload: Upload, condition: Mapping[str, str]) -> bool:
        """Send the upload; return True if the condition was met."""
        try:
            if body_size(upload.body) <= self._options.multipart_bytes:
                upload.put_whole(condition)
            else:
                self._send_parts(upload, condition)
        except ClientError as error:
            is_missing = "IfMatch" in condition and code_of(error.response) in s3_errors.MISSING_KEY
            if condition and s3_errors.may_refuse_conditions(error.response):
                raise self._conditions_error(upload.place, error) from error
            if not is_missing and not (condition and status_of(error.response) == 412):
                raise
            if self._outcomes.may_be_done:
                text = f"put {upload.place}: refused, perhaps because an earlier try of the same put succeeded"
                raise OutcomeUnknown(text) from error
            return False
        return True

    def _send_parts(self, upload: Upload, condition: Mapping[str, str]) -> None:
        try:
            try:
                parts = upload.send_parts(self._options.part_bytes)
            finally:
                self._outcomes.may_be_done = False  # with or without the parts, no object has changed
            upload.commit(parts, condition)
        finally:
            may_be_done = self._outcomes.may_be_done
            try:
                upload.abort()
            except (BotoCoreError, ClientError) as error:
                # The upload only takes space until the bucket's rule for incomplete uploads removes it.
                log.warning("upload abort failed", action="upload_abort_failed", error=without_paths(str(error)))
            self._outcomes.may_be_done = may_be_done

    def _conditions_error(self, place: str, error: ClientError) -> ConfigError:
        text = s3_errors.answer_error("put", place, error.response).message
        if self._options.conditional_puts == "yes":
            return ConfigError(text, hint="set store.conditional_puts: auto", code="E-STORE-CONDITIONS")
        if not self._refuses_conditions:
            log.warning("conditional put refused", action="conditions_refused", error=text)
        self._refuses_conditions = True
        return ConditionalPutRefused(f"{text}: the store refuses conditions", hint=CONDITIONS_HINT)

    # Errors

    @contextmanager
    def _translate_errors(self, verb: str, key: str, *, writes: bool = False) -> Iterator[None]:
        self._use_new_secret()
        self._outcomes.may_be_done, used = False, self._client
        try:
            yield
            self._has_answered = True
        except ClientError as error:
            raise self._answer_error(verb, key, error, writes, used) from error
        except ResponseParserError as error:
            kind: type[FloeError] = OutcomeUnknown if writes else Unavailable
            text = f"{verb} {self._url(key)}: not an S3 answer: {without_paths(str(error)):.200}"
            code = "E-LIST-INVALID" if verb == "list" else "E-S3-INVALID"
            raise kind(text, hint=s3_errors.CLOSED_HINT, code=code) from error
        except BotoCoreError as error:
            raise self._no_answer_error(verb, key, error, writes) from error

    def _answer_error(self, verb: str, key: str, error: ClientError, writes: bool, used: S3Client) -> FloeError:
        self._has_answered = True
        found = s3_errors.answer_error(verb, self._url(key), error.response)
        if isinstance(found, Refused) and (place := self._reread_credential(used)):
            hint = f"the secret was read again from {place}"
            found = Unavailable(found.message, hint=hint, code="E-S3-LATER")
        if writes and self._outcomes.may_be_done and isinstance(found, Unavailable):
            return OutcomeUnknown(found.message, hint=found.hint)
        return found

    def _no_answer_error(self, verb: str, key: str, error: BotoCoreError, writes: bool) -> FloeError:
        detail = without_paths(str(error))
        text = f"{verb} {self._url(key)}: {detail}"
        away: type[FloeError] = OutcomeUnknown if writes and self._outcomes.may_be_done else StoreUnavailable
        if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
            hint = "set store.access_key_id and store.secret_access_key, or a credential in the AWS credential chain"
            return Refused(text, hint=hint, code="E-S3-AUTH")
        if isinstance(error, boto.ParamValidationError):
            return ConfigError(text, code="E-S3-REQUEST")
        if isinstance(error, boto.SSLError):
            hint = certificate_hint(detail, "store.endpoint_url", "store")
            if hint or "CERTIFICATE_VERIFY_FAILED" in detail:
                # If this store's certificate was accepted before, the configuration is not at fault.
                kind = away if is_out_of_date(detail) or self._has_answered else ConfigError
                return kind(text, hint=hint or "set store.tls.ca to the CA of the store", code="E-S3-TLS")
        if isinstance(error, boto.EndpointConnectionError):
            url, cause = error.kwargs.get("endpoint_url", self._endpoint), error.kwargs.get("error", error)
            reason, hint = s3_errors.connection_problem(str(url), str(cause))
            return away(f"{verb} {self._url(key)}: {reason}", hint=hint)
        if is_timeout := isinstance(error, boto.ReadTimeoutError | boto.ConnectTimeoutError):
            text = f"{verb} {self._url(key)}: store {without_paths(self._endpoint)}: {self._timeout_text(error)}"
        if writes and self._outcomes.may_be_done:
            return OutcomeUnknown(text)
        return StoreUnavailable(text, hint=s3_errors.NO_ANSWER_HINT if is_timeout else s3_errors.CLOSED_HINT)

    def _timeout_text(self, error: BotoCoreError) -> str:
        options = self._options
        if isinstance(error, boto.ConnectTimeoutError):
            return f"no connection within {options.connect_timeout:g} s, tried {options.attempts} times"
        return f"no answer within {options.read_timeout:g} s, asked {options.attempts} times"

    @property
    def _endpoint(self) -> str:
        return str(self._client.meta.endpoint_url)

    def _url(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"


def _key_parts(credential: Any) -> tuple[str | None, ...]:
    """Return key, secret and session token; an empty tuple if there is no credential."""
    return () if credential is None else tuple(credential.get_frozen_credentials())
