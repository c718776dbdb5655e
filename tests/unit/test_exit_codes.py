"""Exit codes of faults that pass by themselves: never the one that keeps a service down (78)."""

import socket
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import SSLError
from click.testing import CliRunner

import floe
from common.errors import FloeError, Unavailable
from common.nats import credentials
from common.nats.protocol import ApiError
from common.objects.s3 import S3Account, S3Objects
from common.settings.ingress import TargetSettings
from common.settings.service import NatsSettings
from ingress import preflight

# OpenSSL's texts, and the exit code of a start that fails with them.
CERTIFICATES = [
    ("certificate has expired", 75),
    ("certificate is not yet valid", 75),
    ("self-signed certificate", 78),
    ("Hostname mismatch, certificate is not valid for 'store'.", 78),
]


def store_error(words: str, *, has_answered: bool = False) -> FloeError:
    objects = S3Objects("archive", S3Account("key", "secret", endpoint_url="https://store:9000"))
    objects._has_answered = has_answered
    text = f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {words}"
    return objects._no_answer_error("list", "data/", SSLError(endpoint_url="https://store:9000/", error=text), False)


@pytest.mark.parametrize(("words", "code"), CERTIFICATES)
def test_a_certificate_that_is_renewed_elsewhere_is_waited_for(words: str, code: int) -> None:
    found = store_error(words)
    assert (found.code, found.exit_code) == ("E-S3-TLS", code)
    error: Any = ssl.SSLError(1, "certificate verify failed")
    error.verify_message = words
    auth: Any = SimpleNamespace(label="the user")
    of_nats = credentials.connect_error(error, "tls://nats:4222", auth, NatsSettings())
    assert (of_nats.code, of_nats.exit_code) == ("E-NATS-TLS", code)
    # If the store has answered before, the configuration is not at fault.
    assert isinstance(store_error(words, has_answered=True), Unavailable)


@pytest.mark.parametrize(
    ("status", "err_code", "exit_code"),
    [(400, 10002, 1), (400, 10027, 1), (503, 10023, 1), (500, 10047, 1), (400, 10065, 78)],
)
async def test_a_target_that_an_account_has_no_room_for_now_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, status: int, err_code: int, exit_code: int
) -> None:
    async def no_stream(*_: object) -> None:
        return None

    async def refuse(*_: object) -> None:
        raise ApiError(status, err_code, "refused")

    monkeypatch.setattr(preflight, "ready_stream_info", no_stream)
    monkeypatch.setattr(preflight, "create_stream", refuse)
    source = {"site": "us-east", "feed": "NODES", "subject_prefix": "fleet"}
    settings = TargetSettings.model_validate({"stream": "FLEET", "sources": [source], "create": {}})
    with pytest.raises(FloeError) as caught:
        await preflight.ensure_target(None, settings)
    assert caught.value.exit_code == exit_code


def test_ingress_without_a_target_is_misconfigured_whoever_listens_at_its_address(tmp_path: Path) -> None:
    config = tmp_path / "site.yaml"
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        config.write_text(f"store: {{url: 'file://{tmp_path}/store'}}\ningress: {{monitor: {{listen: '{listen}'}}}}\n")
        done = CliRunner().invoke(floe.cli, ["ingress", "run", "-c", str(config)])
    assert (done.exit_code, "ingress.targets: expected at least one target" in done.stderr) == (78, True), done.output
