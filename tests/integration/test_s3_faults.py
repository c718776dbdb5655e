"""S3Objects against bad networks, bad proxies and bad stores: writes that are done, not done, or unknown."""

import hashlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from urllib3.exceptions import SSLError
from urllib3.response import HTTPResponse

from common.errors import ConfigError, FloeError, OutcomeUnknown, Refused, Unavailable
from common.objects.open import open_objects
from common.objects.s3 import S3Account, S3Objects, S3Options
from common.objects.s3_errors import S3_RETRY_PAUSES_S, connection_problem
from common.settings.loader import read_secret
from common.settings.root import StoreSettings
from common.settings.types import FileSecret, reread_all_secrets
from infra.local.process import free_port
from tests.support import proxies
from tests.support.basics import SharedS3
from tests.support.clock import ManualClock
from tests.support.identities import authority, certificate
from tests.support.proxies import Answer, Exchange, FaultProxy, change_body, drop, drop_after_apply, html, raw, refuse
from tests.support.stores import raising

MIB = 1024 * 1024
OPTIONS = S3Options(attempts=2, read_timeout=20, multipart_bytes=6 * MIB, part_bytes=5 * MIB)


@pytest.fixture(autouse=True)
def _quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    # These tests are not about the pauses of boto3, up to a second for the second try.
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)


@pytest.fixture(scope="module")
def _proxy(s3: SharedS3) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(_proxy: FaultProxy) -> FaultProxy:
    _proxy.clear()
    return _proxy


@pytest.fixture(scope="module")
def bucket(s3: SharedS3) -> str:
    return s3.new_bucket()


@pytest.fixture(scope="module")
def _direct(s3: SharedS3, bucket: str) -> S3Objects:
    return open_s3(s3, s3.endpoint_url, bucket)


@pytest.fixture(autouse=True)
def direct(_direct: S3Objects) -> S3Objects:
    """The store without faults, empty at the start of each test."""
    for info in _direct.list(""):
        _direct.delete(info.key)
    return _direct


@pytest.fixture
def objects(s3: SharedS3, proxy: FaultProxy, bucket: str) -> S3Objects:
    return open_s3(s3, proxy.url, bucket)


class Far(NamedTuple):
    """The store behind the faults of a proxy, and without them."""

    objects: S3Objects
    direct: S3Objects
    proxy: FaultProxy


@pytest.fixture
def far(objects: S3Objects, direct: S3Objects, proxy: FaultProxy) -> Far:
    return Far(objects, direct, proxy)


def without(answer: Answer, name: str, *others: tuple[str, str]) -> Answer:
    return replace(answer, headers=[*[each for each in answer.headers if each[0].lower() != name], *others])


def open_s3(s3: SharedS3, url: str, bucket: str, *, secret: str = "", options: S3Options = OPTIONS) -> S3Objects:
    account = S3Account(s3.access_key, secret or s3.secret_key, endpoint_url=url)
    return S3Objects(bucket, account, options, ManualClock())


def fails(kind: type[FloeError], text: str, *calls: Callable[[], object]) -> list[str]:
    """Check that each of the calls fails so, and return their codes."""
    codes = []
    for call in calls:
        with pytest.raises(kind, match=text or None) as caught:
            call()
        codes.append(caught.value.code)
    return codes


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# F30, F31: a store that is busy or gone


@pytest.mark.parametrize(
    ("status", "code", "named", "pause"),
    [(429, "TooManyRequests", "900", OPTIONS.read_timeout), (400, "KMS.ThrottlingException", "", S3_RETRY_PAUSES_S[0])],
)
def test_answers_that_boto_does_not_retry_are_retried(
    far: Far, monkeypatch: pytest.MonkeyPatch, status: int, code: str, named: str, pause: float
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=waits.append))

    def busy(exchange: Exchange) -> Answer:
        return without(refuse(status, code)(exchange), "retry-after", *([("Retry-After", named)] if named else []))

    far.proxy.on("put", busy, times=1)
    far.objects.put("k", b"1")
    far.proxy.clear()
    far.proxy.on("put", busy)
    assert fails(Unavailable, "", lambda: far.objects.put("k", b"2")) == ["E-S3-LATER"]
    assert (far.proxy.count("put"), waits) == (OPTIONS.attempts, [pause, pause])


def test_an_address_that_redirects_is_named(objects: S3Objects, direct: S3Objects, proxy: FaultProxy) -> None:
    """Redirects from `http://` to `https://`, or a captive portal. boto3 asked it for the bucket's region for ever."""
    page = [("Location", "https://elsewhere.invalid/"), ("Content-Type", "text/html")]
    calls = (lambda: objects.put("k", b"1"), lambda: objects.head("k"), lambda: objects.list(""))
    for status in (301, 307):
        proxy.clear()
        for operation in ("put", "get", "head", "list"):
            proxy.on(operation, lambda _, status=status: Answer(status, page, b"<html>moved</html>", 18))  # type: ignore[misc]
        assert {*fails(Unavailable, rf"s3://.*: (HTTP )?{status}", *calls)} == {"E-S3-LATER"}
        assert proxy.count("put") <= OPTIONS.attempts
    assert direct.list("") == []


def test_a_proxy_of_the_environment_is_not_used(s3: SharedS3, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    objects = open_s3(s3, s3.endpoint_url, bucket)
    objects.put("k", b"1")
    assert objects.get("k") == b"1"


# F32, F42: writes that are done or not, with the answer lost or not


WRITES = {
    # name: (the refused or lost operation, the fault, bytes, error, its text, True if it is stored)
    "lost answer": ("put", drop_after_apply(), 1, OutcomeUnknown, "put s3://", True),
    "failed answer": ("put", proxies.fail_after_apply(500), 1, OutcomeUnknown, "put s3://", True),
    "lost request": ("put", drop(), 1, OutcomeUnknown, "", False),
    "web page": ("put", html(), 1, OutcomeUnknown, "not an S3 answer", False),
    "busy": ("put", refuse(503, "SlowDown"), 1, Unavailable, r"s3://.*/k: SlowDown", False),
    "conflict": ("put", refuse(409, "ConcurrentModification"), 1, Unavailable, "ConcurrentModification", False),
    "nothing at the first step": ("create_upload", raw(200, b""), 7 * MIB, OutcomeUnknown, "no UploadId", False),
    "nothing for a part": ("part", raw(200, b""), 7 * MIB, OutcomeUnknown, "not an S3 answer: no ETag", False),
    "lost part": ("part", drop(), 11 * MIB, Unavailable, "", False),
    "lost answer to the last step": ("complete", drop_after_apply(), 11 * MIB, OutcomeUnknown, "", True),
    "web page at the last step": ("complete", html(), 7 * MIB, OutcomeUnknown, "not an S3 answer", False),
    "conflict at the last step": ("complete", refuse(409, "Novel"), 7 * MIB, Unavailable, "Novel", False),
}


@pytest.mark.parametrize(("operation", "fault", "size", "kind", "text", "stored"), WRITES.values(), ids=WRITES)
def test_a_write_is_done_or_not_done_or_unknown(
    far: Far, operation: str, fault: Any, size: int, kind: type[FloeError], text: str, stored: bool
) -> None:
    far.proxy.on(operation, fault)
    fails(kind, text, lambda: far.objects.put_if_absent("k", bytes(size), sha256=sha256(bytes(size))))
    head = far.direct.head("k")
    assert (head is not None) is stored
    assert head is None or head.size == size
    assert kind is OutcomeUnknown or far.proxy.count("abort") == far.proxy.count("create_upload"), "known not done"
    if operation == "put" and stored:
        far.proxy.on("delete", fault)
        fails(OutcomeUnknown, "delete s3://", lambda: far.objects.delete("k"))
        assert far.direct.head("k") is None
    if operation == "put" and not text.startswith("not an"):
        far.proxy.clear()
        far.proxy.on("put", fault, times=1)
        far.objects.put("k", b"2")
        assert (far.objects.get("k"), far.proxy.count("put")) == (b"2", 2), "one that is lost is sent again"


def test_a_condition_refused_after_a_lost_answer_is_unknown(far: Far) -> None:
    far.direct.put("there", b"0")
    etag, text = far.direct.list("there")[0].etag, r"put s3://.*/(new|there|large): refused, perhaps"
    for operation, key in (("put", "new"), ("put", "there"), ("complete", "large")):
        far.proxy.on(operation, drop_after_apply(), key=key, times=1)
    calls = (
        lambda: far.objects.put_if_absent("new", b"1"),
        lambda: far.objects.put_if_match("there", b"1", etag),
        lambda: far.objects.put_if_absent("large", bytes(7 * MIB)),
    )
    fails(OutcomeUnknown, text, *calls)
    assert (far.direct.get("new"), far.direct.get("there"), far.direct.get("large")) == (b"1", b"1", bytes(7 * MIB))
    far.proxy.on("put", refuse(503, "SlowDown"), times=1)
    assert not far.objects.put_if_absent("there", b"2"), "after a busy one it is refused"
    assert far.direct.get("there") == b"1"


# F34, F35, F36: bodies


def ranged(value: str) -> Callable[[Exchange], Answer]:
    return lambda exchange: without(exchange.forward(), "content-range", ("Content-Range", value))


def longer(exchange: Exchange) -> Answer:
    return replace(without(exchange.forward(), "content-length"), body=bytes(3 * MIB), length=None)


OTHER_RANGE, LONG = "expected bytes=10-19, found", "expected 1000 bytes, found 1001 or more"
GETS = {
    "cut short": (proxies.truncate(5), Unavailable, "get s3://.*/k: "),
    "cut short without a length": (proxies.truncate(5, announced=False), Unavailable, "get s3://.*/k: "),
    **{
        value or "no range": (ranged(value), Unavailable, OTHER_RANGE)
        for value in ("bytes 10-18/1000", "bytes 10-19/*", "")
    },
    "longer": (longer, Unavailable, LONG),
    "404 of a web page": (raw(404, b"<html>no such page</html>"), Unavailable, ""),
    "busy": (refuse(503, "SlowDown"), Unavailable, "get s3://.*/k: SlowDown"),
    "refused": (refuse(403, "AccessDenied"), Refused, "grant s3:GetObject, and s3:ListBucket"),
}


@pytest.mark.parametrize(("fault", "kind", "text"), GETS.values(), ids=GETS)
def test_a_wrong_body_is_never_returned(far: Far, fault: Any, kind: type[FloeError], text: str, tmp_path: Path) -> None:
    content, copy = bytes(range(250)) * 4, tmp_path / "copy"
    far.direct.put("k", content)
    far.proxy.on("get", fault)
    whole = (lambda: far.objects.get("k"), lambda: far.objects.download("k", copy))
    part = () if text == LONG else (lambda: far.objects.get("k", first=10, length=10),)
    codes = fails(kind, text, *part, *(() if text == OTHER_RANGE else whole))
    if "cut" in str(codes).lower():
        assert {*codes} == {"E-S3-CUT"}
        for read in (*whole[:1], *part):
            far.proxy.clear()
            far.proxy.on("get", fault, times=1)
            assert read() in (content, content[10:20]), "read again"
    assert text != LONG or copy.stat().st_size == 1001, "a copy ends behind its length"


def test_a_body_with_a_bad_record_of_tls_is_read_again(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    far.direct.put("k", b"1")
    read, faults = HTTPResponse.read, iter([raising(SSLError("bad record mac"))])
    monkeypatch.setattr(HTTPResponse, "read", lambda *args, **options: next(faults, read)(*args, **options))
    assert far.objects.get("k") == b"1"


def test_a_head_that_is_refused_or_of_a_web_page_is_no_missing_object(far: Far) -> None:
    for head, get, kind, text in (
        (raw(403, b""), refuse(403, "AccessDenied"), Refused, "grant s3:GetObject, and s3:ListBucket"),
        (raw(404, b""), raw(404, b"<html>no such page</html>"), Unavailable, ""),
        (html(), html(), Unavailable, "no size or time"),
    ):
        far.proxy.clear()
        far.proxy.on("head", head).on("get", get)
        fails(kind, text, lambda: far.objects.head("k"))


def test_a_server_that_does_not_answer_in_time_is_tried_again(s3: SharedS3, far: Far, bucket: str) -> None:
    far.objects.put("k", b"1")
    far.proxy.on("get", proxies.delay(3), times=1)
    hasty = open_s3(s3, far.proxy.url, bucket, options=replace(OPTIONS, attempts=9, read_timeout=2))
    assert hasty.get("k") == b"1"


# F38, B65: listings


NOT_LISTINGS = {
    "html": html(),
    "html that is XML": raw(200, b"<html><body><p>sign in</p></body></html>"),
    "nothing": raw(200, b"", "application/xml"),
    "an empty document": raw(200, b"<ListBucketResult/>", "application/xml"),
    "an entity bomb": raw(
        200,
        b'<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
        b"<ListBucketResult><Name>&b;</Name></ListBucketResult>",
        "application/xml",
    ),
    "no KeyCount": change_body(lambda xml: xml.replace(b"<KeyCount>", b"<X>").replace(b"</KeyCount>", b"</X>")),
    "another KeyCount": change_body(lambda xml: xml.replace(b"<KeyCount>3<", b"<KeyCount>4<")),
    "another bucket": change_body(lambda xml: xml.replace(b"<Name>", b"<Name>x")),
    "another prefix": change_body(lambda xml: xml.replace(b"<Prefix>p/<", b"<Prefix><")),
    "keys outside the prefix": change_body(lambda xml: xml.replace(b"<Key>p/2<", b"<Key>q/2<")),
    "a key twice": change_body(lambda xml: xml.replace(b"<Key>p/2<", b"<Key>p/1<")),
    "no sizes": change_body(lambda xml: xml.replace(b"Size>", b"Sighs>")),
    "no end": change_body(lambda xml: xml.replace(b"IsTruncated>", b"X>")),
    "more without a token": change_body(lambda xml: xml.replace(b"<IsTruncated>false", b"<IsTruncated>true")),
}


@pytest.mark.parametrize("fault", NOT_LISTINGS.values(), ids=NOT_LISTINGS.keys())
def test_an_invalid_listing_is_never_empty(far: Far, fault: Any) -> None:
    for name in ("p/1", "p/2", "p/3"):
        far.direct.put(name, b"")
    far.proxy.on("list", fault)
    assert fails(Unavailable, r"list s3://.*/p/", lambda: far.objects.list("p/")) == ["E-LIST-INVALID"]


def test_a_listing_without_progress_ends(objects: S3Objects, direct: S3Objects, proxy: FaultProxy) -> None:
    for name in ("p/1", "p/2", "p/3"):
        direct.put(name, b"")
    pages: list[Answer] = []
    proxy.on("list", lambda exchange: pages.append(exchange.forward()) or pages[0], times=1)  # type: ignore[func-returns-value]
    objects.list("p/")
    more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>"
    first = pages[0].with_body(pages[0].body.replace(b"<IsTruncated>false</IsTruncated>", more))
    proxy.clear()
    proxy.on("list", lambda _: first)
    assert fails(Unavailable, "a new key", lambda: objects.list("p/", start_after="p/4")) == ["E-LIST-INVALID"]
    assert proxy.count("list") == 2


def empty_page(token: str) -> Callable[[bytes], bytes]:
    """A page without keys that continues at `token`."""
    end = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>".encode()

    def change(xml: bytes) -> bytes:
        xml = re.sub(rb"<Contents>.*</Contents>", b"", xml, flags=re.DOTALL)
        xml = re.sub(rb"<KeyCount>\d+<", b"<KeyCount>0<", xml)
        return xml.replace(b"<IsTruncated>false</IsTruncated>", end)

    return change


def test_a_page_without_keys_is_not_the_end(objects: S3Objects, direct: S3Objects, proxy: FaultProxy) -> None:
    for name in ("p/1", "p/2"):
        direct.put(name, b"")
    whole: list[Answer] = []

    def first_empty(exchange: Exchange) -> Answer:
        whole.append(exchange.forward())
        return whole[-1].with_body(empty_page("a")(whole[-1].body))

    for listed in (lambda: objects.list("p/"), lambda: [info for page in objects.pages("p/") for info in page]):
        proxy.clear()
        proxy.on("list", first_empty, nth=1, times=1)
        proxy.on("list", lambda _: whole[-1].with_body(empty_page("b")(whole[-1].body)), nth=2, times=1)
        proxy.on("list", lambda _: whole[-1], nth=3)
        assert ([info.key for info in listed()], proxy.count("list")) == (["p/1", "p/2"], 3)


@pytest.mark.parametrize("is_new", [True, False], ids=["new tokens", "one token"])
def test_pages_without_keys_end(
    objects: S3Objects, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    monkeypatch.setattr("common.objects.s3_transfer.MAX_EMPTY_PAGES", 5)
    tokens, whole = iter(range(100)), list[Answer]()

    def empty(exchange: Exchange) -> Answer:
        if not whole:
            whole.append(exchange.forward())
        return whole[0].with_body(empty_page(f"t{next(tokens) if is_new else 0}")(whole[0].body))

    proxy.on("list", empty)
    for call in (lambda: objects.list("p/"), lambda: [*objects.pages("p/")]):
        proxy.calls.clear()
        assert fails(Unavailable, "the end: expected", call) == ["E-LIST-INVALID"]
        assert proxy.count("list") == (6 if is_new else 2)


@contextmanager
def endless(head: bytes) -> Iterator[tuple[str, list[int]]]:
    """The address of an HTTP server with endless answers, and the bytes of the one under way."""
    sent, chunk = [0], b"10000\r\n" + bytes(65536) + b"\r\n"

    def answer(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            sent[0] = 0
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 " + head + b"\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                connection.sendall(chunk)
                sent[0] += 65536

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", sent


def test_an_answer_without_end_is_aborted(s3: SharedS3) -> None:
    text, xml = "expected at most 16777216 bytes", b"\r\nContent-Type: application/xml"
    for head, text_of in (
        (b"200 OK" + xml, {"list": text, "put": text}),
        (b"403 Forbidden" + xml, {"list": text, "put": text, "get": text}),
        (b"206 Partial Content\r\nContent-Range: bytes 0-99/1000", {"get": "expected 100 bytes, found 101 or more"}),
    ):
        with endless(head) as (url, sent):
            objects = open_s3(s3, url, "archive")
            calls = {"put": partial(objects.put, "k", b"1"), "get": partial(objects.get, "k", length=100)}
            calls["list"] = partial(objects.list, "p/")
            for verb, expected in text_of.items():
                with pytest.raises((Unavailable, OutcomeUnknown), match=expected):
                    calls[verb]()
                assert sent[0] <= 16 * MIB + 16 * MIB, "beside what the buffers of the connection hold"


SECOND_PAGES = {
    "html": html(),
    "busy": refuse(503, "SlowDown"),
    "half": change_body(lambda xml: xml[: len(xml) // 2]),
    "the first again": change_body(lambda xml: xml.replace(b"<Key>p/2<", b"<Key>p/1<")),
}


@pytest.mark.parametrize("fault", SECOND_PAGES.values(), ids=SECOND_PAGES.keys())
def test_a_second_page_that_fails_is_asked_for_again_or_discards_the_first(
    objects: S3Objects, direct: S3Objects, proxy: FaultProxy, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.objects.s3.KEYS_PER_PAGE", 2)
    for n in range(5):
        direct.put(f"p/{n}", b"")
    assert len(objects.list("p/")) == 5
    proxy.on("list", fault, nth=2)
    fails(Unavailable, "", lambda: objects.list("p/"))
    proxy.clear()
    if fault in (SECOND_PAGES["busy"], SECOND_PAGES["half"]):
        proxy.on("list", fault, nth=2, times=1)
        assert len(objects.list("p/")) == 5


# F41, B69: refusals and wrong settings


def test_wrong_keys_are_refused_and_no_error_shows_the_secret(s3: SharedS3, bucket: str, direct: S3Objects) -> None:
    direct.put("k", b"1")
    wrong = open_s3(s3, s3.endpoint_url, bucket, secret="canary-secret")
    calls = (lambda: wrong.get("k"), lambda: wrong.head("k"), lambda: wrong.list(""))
    fails(Refused, "SignatureDoesNotMatch", *calls)
    with pytest.raises(Refused, match="SignatureDoesNotMatch") as caught:
        wrong.put("k", b"")
    assert "canary-secret" not in f"{caught.value!r} {caught.value.__cause__!r} {vars(wrong)}"
    assert direct.get("k") == b"1"


def test_a_changed_secret_is_read_when_the_former_is_refused(s3: SharedS3, bucket: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("former")
    file = FileSecret("former", str(path), read_secret)
    account = S3Account(s3.access_key, "former", endpoint_url=s3.endpoint_url)
    objects = S3Objects(bucket, account, OPTIONS, secret_file=file)
    fails(Refused, "", lambda: objects.list(""))
    path.write_text(s3.secret_key)
    fails(Unavailable, "the secret was read again from", lambda: objects.put("k", b"1"))
    objects.put("k", b"1")
    assert objects.get("k") == b"1"
    # Read again as by SIGHUP, before anything was refused.
    path.write_text("later")
    reread_all_secrets()
    fails(Refused, "", lambda: objects.get("k"))


def test_a_bucket_of_another_region_is_named_with_it(objects: S3Objects, proxy: FaultProxy) -> None:
    proxy.on("get", refuse(400, "AuthorizationHeaderMalformed", "wrong region", "<Region>eu-west-3</Region>"))
    assert fails(ConfigError, r"set store\.region: eu-west-3", lambda: objects.get("k")) == ["E-S3-REGION"]
    fails(ConfigError, "store s3://b: ", lambda: S3Objects("b", S3Account(endpoint_url="not a url")))


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority and a server's certificate of 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    authority(folder)
    certificate(folder, "server", "IP:127.0.0.1")
    return folder


@pytest.fixture
def tls_proxy(s3: SharedS3, certificates: Path) -> Iterator[FaultProxy]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    with FaultProxy(s3.endpoint_url, tls=context) as proxy:
        yield proxy


def settings_of(s3: SharedS3, url: str, bucket: str, tls: dict[str, object]) -> StoreSettings:
    return StoreSettings.model_validate({**s3.store(bucket), "endpoint_url": url, "tls": tls})


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_a_certificate_is_trusted_by_name_or_not_checked_if_configured_and_refused_else(
    s3: SharedS3, tls_proxy: FaultProxy, bucket: str, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trusted: dict[str, object] = {"ca": str(certificates / "ca.pem")}
    for tls in (trusted, {"insecure": True}):
        objects = open_objects(settings_of(s3, tls_proxy.url, bucket, tls))
        objects.put("k", b"1", sha256=sha256(b"1"))
        assert objects.get("k") == b"1"
    text, plain = r"CERTIFICATE_VERIFY_FAILED.*set store\.tls\.ca to the CA", open_s3(s3, tls_proxy.url, bucket)
    assert fails(ConfigError, text, lambda: plain.put("k", b"1")) == ["E-S3-TLS"]
    caplog.clear()
    objects = open_objects(settings_of(s3, tls_proxy.url.replace("127.0.0.1", "localhost"), bucket, trusted))
    text = r"set store\.endpoint_url to a name of the store in its certificate"
    assert fails(ConfigError, text, lambda: objects.list("k")) == ["E-S3-TLS"]
    assert [each for each in caplog.records if each.name.startswith("urllib3")] == [], "one line"


def test_a_resolver_without_an_answer_differs_from_an_unknown_host() -> None:
    for cause, text in (
        ("[Errno -3] Temporary failure in name resolution", "is not resolved: no answer from the resolver"),
        ("[Errno -2] Name or service not known", "is not known"),
    ):
        shown, _ = connection_problem("https://s3.example.org", f"Failed to resolve 's3.example.org' ({cause})")
        assert shown == f"store https://s3.example.org: the host s3.example.org {text}"


def test_each_wrong_address_is_named(s3: SharedS3, proxy: FaultProxy, tls_proxy: FaultProxy, bucket: str) -> None:
    for url, code, text in (
        ("http://no-such-host.invalid:8333", 75, "host no-such-host.invalid is not known"),
        (f"http://127.0.0.1:{free_port()}", 75, "refuses connections"),
        (proxy.url.replace("http:", "https:"), 75, "https:// if it speaks TLS, else http://"),
        (tls_proxy.url.replace("https:", "http:"), 75, "https:// if it speaks TLS, else http://"),
    ):
        with pytest.raises(FloeError) as caught:
            open_s3(s3, url, bucket).list("data/_floe/tails/")
        assert re.search(r"prefix=|%2F|list-type", str(caught.value)) is None, "an address with its path"
        assert url in str(caught.value)
        assert (caught.value.exit_code, text in str(caught.value)) == (code, True), caught.value


def test_a_store_that_has_answered_is_down_and_not_misconfigured(objects: S3Objects, proxy: FaultProxy) -> None:
    objects.list("")
    proxy.on("list", drop(), times=9)
    with pytest.raises(Unavailable) as caught:
        objects.list("data/_floe/tails/")
    assert proxy.url in str(caught.value)
    assert "prefix=" not in str(caught.value)


# Requests


def test_requests_carry_checksum_class_and_encryption(s3: SharedS3, proxy: FaultProxy, bucket: str) -> None:
    sent: dict[str, str] = {}

    def look(exchange: Exchange) -> Answer | None:
        sent.update({name.lower(): value for name, value in exchange.headers})
        return refuse(403, "AccessDenied")(exchange)

    options = S3Options(storage_class="OTHER", encryption="sse-kms", kms_key_id="key-1")
    proxy.on("put", look)
    store = open_s3(s3, proxy.url, bucket, options=options).with_storage_class("STANDARD_IA")
    fails(Refused, "", lambda: store.put("k", b"1", metadata={"tip": "1"}))
    expected = {
        "x-amz-storage-class": "STANDARD_IA",
        "x-amz-server-side-encryption": "aws:kms",
        "x-amz-server-side-encryption-aws-kms-key-id": "key-1",
        "x-amz-checksum-sha256": "a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s=",
        "x-amz-meta-tip": "1",
    }
    assert sent.items() >= expected.items()
    assert "app/floe" in sent["user-agent"]
    assert "x-amz-trailer" not in sent
