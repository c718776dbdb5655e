"""The ways by which AWS tools find a credential, where the configuration names none."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import boto3
import pytest

from common.clock import format_time
from common.errors import Refused, Unavailable
from common.objects.open import open_objects
from common.settings.root import StoreSettings
from infra.local.seaweedfs import SeaweedFS
from tests.support import canaries
from tests.support.basics import SharedS3, unique
from tests.support.proxies import Answer, Exchange, FaultProxy, refuse
from tests.support.servers import CREDENTIALS, SqsServer

ROLE = "arn:aws:iam::123456789012:role/floe"


class Signed(FaultProxy):
    """Before the store: the access key and session token of the last request."""

    shown = ("", "")
    refuses = ""  # an access key that is not taken any more

    def answer(self, exchange: Exchange) -> Answer | None:
        headers = {name.lower(): value for name, value in exchange.headers}
        key = re.search(r"Credential=([^/]+)/", headers.get("authorization", ""))
        self.shown = (key[1] if key else "", headers.get("x-amz-security-token", ""))
        if key and key[1] == self.refuses:
            return refuse(403, "InvalidAccessKeyId", "deleted")(exchange)
        return exchange.forward()


class _Metadata(BaseHTTPRequestHandler):
    """The instance metadata service, version 2, of a machine with a role."""

    def do_PUT(self) -> None:
        self._say("metadata-token")

    def do_GET(self) -> None:
        secret = {"AccessKeyId": "AKIMDS", "SecretAccessKey": "s" * 20, "Token": "token-of-imds", "Code": "Success"}
        is_role = self.path.endswith("/floe-role")
        self._say(json.dumps({**secret, "Expiration": "2999-01-01T00:00:00Z"}) if is_role else "floe-role")

    def _say(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def aws() -> Iterator[SqsServer]:
    """Moto's server: S3 and STS."""
    with SqsServer() as server:
        yield server


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a service on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def metadata() -> Iterator[str]:
    with serving(_Metadata) as url:
        yield url


@pytest.fixture(autouse=True)
def environment(aws: SqsServer, metadata: str, tmp_path: Path) -> dict[str, dict[str, str]]:
    """The variables of each way."""
    files = {
        "credentials": "[default]\naws_access_key_id = AKDEFAULT\naws_secret_access_key = x\n"
        "[floe]\naws_access_key_id = AKPROFILE\naws_secret_access_key = secret-of-a-profile\n",
        "token": "a.web.identity",
        "config": f"[profile role]\nrole_arn = {ROLE}\nsource_profile = floe\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    profile = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials")}
    sts = {"AWS_ENDPOINT_URL_STS": aws.url, "AWS_REGION": "us-east-1", "AWS_STS_REGIONAL_ENDPOINTS": "regional"}
    return {
        "profile": {**profile, "AWS_PROFILE": "floe"},
        "session token": {
            "AWS_ACCESS_KEY_ID": "AKSESSION",
            "AWS_SECRET_ACCESS_KEY": "secret-of-a-session",
            "AWS_SESSION_TOKEN": "token-of-a-session",
        },
        "role of a profile": {**profile, **sts, "AWS_PROFILE": "role", "AWS_CONFIG_FILE": str(tmp_path / "config")},
        "web identity": {**sts, "AWS_ROLE_ARN": ROLE, "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token")},
        "instance metadata": {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata},
    }


@pytest.mark.parametrize(
    ("way", "key", "token"),
    [
        ("profile", "AKPROFILE", ""),
        ("session token", "AKSESSION", "token-of-a-session"),
        ("role of a profile", r"ASIA\w+", r"\S{20,}"),
        ("web identity", r"ASIA\w+", r"\S{20,}"),
        ("instance metadata", "AKIMDS", "token-of-imds"),
    ],
)
def test_a_credential_of_the_chain_signs_what_the_store_is_asked(
    environment: dict[str, dict[str, str]],
    aws: SqsServer,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    key: str,
    token: str,
):
    bucket = unique("b").replace("_", "-")
    boto3.session.Session().client("s3", endpoint_url=aws.url, **CREDENTIALS).create_bucket(Bucket=bucket)
    for name, value in environment[way].items():
        monkeypatch.setenv(name, value)
    with Signed(aws.url) as proxy:
        objects = open_objects(StoreSettings(url=f"s3://{bucket}", endpoint_url=proxy.url))
        assert list(objects.list("")) == []
        assert re.fullmatch(key, proxy.shown[0]), proxy.shown[0]
        assert re.fullmatch(token, proxy.shown[1]), "another session token"


def test_without_any_credential_the_store_is_refused_in_one_line(
    aws: SqsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Refused, match="a credential as AWS tools find it") as caught:
        list(open_objects(StoreSettings(url="s3://some", endpoint_url=aws.url)).list(""))
    assert caught.value.exit_code == 77
    assert "\n" not in str(caught.value)


def keys_of(s3: SharedS3) -> list[tuple[str, str]]:
    """Two pairs of keys that the store takes: of one that may do everything, and of one that may read."""
    if not isinstance(s3.server, SeaweedFS):
        pytest.skip(f"{s3.server.name}: the second pair of keys is made on SeaweedFS only")
    pairs = [(s3.access_key, s3.secret_key), (s3.server.reader_access_key, s3.server.reader_secret_key)]
    canaries.note(*(secret for _, secret in pairs))
    return pairs


def test_what_expires_is_renewed_before_that_without_a_restart(s3: SharedS3, monkeypatch: pytest.MonkeyPatch):
    """As a container's role does; the roles above renew themselves by the same code of botocore."""
    former, later = keys_of(s3)
    handed, asked = (former, 60.0), list[str]()

    class Container(_Metadata):
        def do_GET(self) -> None:
            (key, secret), lasts = handed
            expires = format_time(int((time.time() + lasts) * 1e9))
            asked.append(key)
            document = {"AccessKeyId": key, "SecretAccessKey": secret, "Token": "", "Expiration": expires}
            self._say(json.dumps(document))

    with serving(Container) as url, Signed(s3.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/role")
        objects = open_objects(StoreSettings(url=f"s3://{s3.new_bucket()}", endpoint_url=proxy.url))
        objects.put("k", b"1")
        assert proxy.shown[0] == former[0]
        handed = later, 3600.0
        assert objects.get("k") == b"1"
        assert proxy.shown[0] == later[0]
        count = len(asked)
        assert objects.get("k") == b"1"
        assert len(asked) == count, "asked again although it does not expire yet"


def test_the_file_of_a_profile_is_read_again_when_its_keys_are_refused(
    s3: SharedS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    former, later = keys_of(s3)
    path = tmp_path / "rotated"

    def rotate(key: str, secret: str) -> None:
        path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    rotate(*former)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    with Signed(s3.endpoint_url) as proxy:
        objects = open_objects(StoreSettings(url=f"s3://{s3.new_bucket()}", endpoint_url=proxy.url))
        objects.put("k", b"1")
        rotate(*later)
        assert objects.get("k") == b"1"
        assert proxy.shown[0] == former[0], "what works is not read again"
        rotate("AKNOBODY", "secret-of-nobody")
        proxy.refuses = former[0]
        with pytest.raises(Unavailable, match="read again from where AWS tools find it"):
            objects.get("k")
        with pytest.raises(Refused, match="InvalidAccessKeyId"):
            objects.get("k")
        rotate(*later)
        with pytest.raises(Unavailable, match="read again"):
            objects.get("k")
        assert objects.get("k") == b"1"
        assert proxy.shown[0] == later[0]
