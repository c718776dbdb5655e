"""The credential sources of AWS tools, used if the configuration names no credential."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import boto3
import pytest
import yaml

from common.clock import format_time
from common.errors import Refused, Unavailable
from common.objects.open import open_objects
from common.objects.port import ObjectStore
from common.settings.root import StoreSettings
from infra.local.s3 import SeaweedFS
from tests.support import canaries
from tests.support.basics import SharedS3
from tests.support.commands import run_here
from tests.support.proxies import Answer, Exchange, FaultProxy, refuse
from tests.support.servers import CREDENTIALS, SqsServer

Pair = tuple[str, str]
ROLE = "arn:aws:iam::123456789012:role/floe"


class Signed(FaultProxy):
    """A proxy before the store. `shown`: the access key and session token of the last request."""

    shown = ("", "")
    refuses = ""  # an access key that is no longer accepted

    def answer(self, exchange: Exchange) -> Answer | None:
        headers = {name.lower(): value for name, value in exchange.headers}
        key = re.search(r"Credential=([^/]+)/", headers.get("authorization", ""))
        self.shown = (key[1] if key else "", headers.get("x-amz-security-token", ""))
        if key and key[1] == self.refuses:
            return refuse(403, "InvalidAccessKeyId", "deleted")(exchange)
        return exchange.forward()


@pytest.fixture
def proxy(s3: SharedS3) -> Iterator[Signed]:
    with Signed(s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def pairs(s3: SharedS3) -> list[Pair]:
    """Two pairs of keys that the store accepts: one may do everything, the other may read."""
    if not isinstance(s3.server, SeaweedFS):
        pytest.skip(f"{s3.server.name}: the second pair of keys is made on SeaweedFS only")
    pairs = [(s3.access_key, s3.secret_key), (s3.server.reader_access_key, s3.server.reader_secret_key)]
    canaries.note(*(secret for _, secret in pairs))
    return pairs


def objects_of(proxy: Signed, s3: SharedS3) -> ObjectStore:
    return open_objects(StoreSettings(url=f"s3://{s3.new_bucket()}", endpoint_url=proxy.url))


def test_a_session_token_is_shown_and_without_any_credential_the_store_is_refused_in_one_line(
    s3: SharedS3, proxy: Signed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Refused, match="a credential in the AWS credential chain") as caught:
        objects_of(proxy, s3).list("")
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (77, False)
    for name, value in (("ACCESS_KEY_ID", "AKSESSION"), ("SECRET_ACCESS_KEY", "x" * 20), ("SESSION_TOKEN", "token")):
        monkeypatch.setenv(f"AWS_{name}", value)
    proxy.refuses = "AKSESSION"
    with pytest.raises(Refused):
        objects_of(proxy, s3).list("")
    assert proxy.shown == ("AKSESSION", "token")


@contextmanager
def serving(answer: Callable[[str], str | dict[str, str]]) -> Iterator[str]:
    """The address of a service on loopback that answers by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answer(self.path)
            body = (found if isinstance(found, str) else json.dumps(found)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_role_signs_requests_to_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The role of a profile, by web identity, and of a machine, by version 2 of its metadata service."""

    def metadata(path: str) -> str | dict[str, str]:
        found = {"AccessKeyId": "AKIMDS", "SecretAccessKey": "s" * 20, "Token": "token-of-imds", "Code": "Success"}
        found["Expiration"] = "2999-01-01T00:00:00Z"
        return found if path.endswith("/floe-role") else "floe-role"

    keys = "[floe]\naws_access_key_id = AKPROFILE\naws_secret_access_key = secret-of-a-profile\n"
    (tmp_path / "credentials").write_text(keys)
    (tmp_path / "config").write_text(f"[profile role]\nrole_arn = {ROLE}\nsource_profile = floe\n")
    (tmp_path / "token").write_text("a.web.identity")
    with SqsServer() as aws, Signed(aws.url) as proxy, serving(metadata) as url:
        boto3.session.Session().client("s3", endpoint_url=aws.url, **CREDENTIALS).create_bucket(Bucket="some")
        sts = {"ENDPOINT_URL_STS": aws.url, "REGION": "us-east-1", "STS_REGIONAL_ENDPOINTS": "regional"}
        files = {"SHARED_CREDENTIALS_FILE": f"{tmp_path}/credentials", "CONFIG_FILE": f"{tmp_path}/config"}
        for way, key, token in (
            ({**sts, **files, "PROFILE": "role"}, r"ASIA\w+", r"\S{20,}"),
            ({**sts, "ROLE_ARN": ROLE, "WEB_IDENTITY_TOKEN_FILE": f"{tmp_path}/token"}, r"ASIA\w+", r"\S{20,}"),
            # By default botocore waits one second for this service, once.
            ({"EC2_METADATA_SERVICE_ENDPOINT": url, "METADATA_SERVICE_TIMEOUT": "60"}, "AKIMDS", "token-of-imds"),
        ):
            with monkeypatch.context() as patch:
                for name, value in way.items():
                    patch.setenv(f"AWS_{name}", value)
                assert open_objects(StoreSettings(url="s3://some", endpoint_url=proxy.url)).list("") == []
            assert re.fullmatch(key, proxy.shown[0]), proxy.shown
            assert re.fullmatch(token, proxy.shown[1]), "another session token"


def test_a_bucket_is_created_in_the_region_of_the_store(tmp_path: Path):
    with SqsServer() as aws:
        admin = boto3.session.Session().client("s3", endpoint_url=aws.url, **CREDENTIALS)
        for region in ("eu-west-1", "us-east-1"):
            store = {"url": f"s3://in-{region}", "endpoint_url": aws.url, "region": region}
            keys = {"access_key_id": "AKADMIN", "secret_access_key": "secret-of-an-admin"}
            (tmp_path / "c.yaml").write_text(yaml.safe_dump({"store": store | keys}))
            assert run_here("store", "create", "-c", f"{tmp_path}/c.yaml").out == f"s3://in-{region}: created\n"
            found = admin.get_bucket_location(Bucket=f"in-{region}")["LocationConstraint"]
            assert found == (None if region == "us-east-1" else region)


def test_credentials_are_renewed_early(s3: SharedS3, proxy: Signed, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch):
    """The role of a container; all roles renew themselves by the same code of botocore."""
    former, later = pairs
    handed, asked = (former, 60.0), list[str]()

    def answer(_: str) -> dict[str, str]:
        (key, secret), lasts = handed
        asked.append(key)
        expires = format_time(int((time.time() + lasts) * 1e9))
        return {"AccessKeyId": key, "SecretAccessKey": secret, "Token": "", "Expiration": expires}

    with serving(answer) as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/role")
        objects = objects_of(proxy, s3)
        objects.put("k", b"1")
        assert proxy.shown[0] == former[0]
        handed = later, 3600.0
        assert (objects.get("k"), proxy.shown[0]) == (b"1", later[0])
        count = len(asked)
        assert objects.get("k") == b"1"
        assert len(asked) == count, "asked again although it does not expire yet"


def test_the_file_of_a_profile_is_read_again_when_its_keys_are_refused(
    s3: SharedS3, proxy: Signed, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    former, later = pairs
    path = tmp_path / "rotated"

    def rotate(key: str, secret: str) -> None:
        path.write_text(f"[floe]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    rotate(*former)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_PROFILE", "floe")
    objects = objects_of(proxy, s3)
    objects.put("k", b"1")
    rotate(*later)
    assert objects.get("k") == b"1"
    assert proxy.shown[0] == former[0], "what works is not read again"
    rotate("AKNOBODY", "secret-of-nobody")
    proxy.refuses = former[0]
    with pytest.raises(Unavailable, match="read again from the AWS credential chain"):
        objects.get("k")
    with pytest.raises(Refused, match="InvalidAccessKeyId"):
        objects.get("k")
    rotate(*later)
    with pytest.raises(Unavailable, match="read again"):
        objects.get("k")
    assert (objects.get("k"), proxy.shown[0]) == (b"1", later[0])
