"""The monitor: answers from memory and threads, independent of its clients and the event loop."""

import asyncio
import base64
import http.client
import json
import math
import os
import re
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from common.clock import SystemClock
from common.errors import ConfigError, Unavailable
from common.nats.credentials import expiry_of
from common.observe import monitor as monitor_http
from common.observe.monitor import MAX_BEAT_AGE_S, Health, Monitor, Pages, fetch
from common.service.process import SystemdNotifier, on_hangup
from common.settings.egress import EgressMonitorSettings
from common.settings.service import MonitorTlsSettings
from common.tasks import Stop, unexpected
from tests.support.basics import PATIENCE, counted, eventually, metric_value, soon, unique
from tests.support.clock import ManualClock
from tests.support.identities import authority as make_authority
from tests.support.identities import certificate, make_certificates
from tests.support.notify import ServiceManager


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def health(clock: ManualClock) -> Health:
    return Health(clock)


@pytest.fixture
def monitor(health: Health) -> Iterator[Monitor]:
    monitor = Monitor("127.0.0.1:0", health)
    monitor.start()
    yield monitor
    monitor.close()


def get(monitor: Monitor, path: str, method: str = "GET", accept: str = "") -> tuple[int, str, str]:
    """Return status, content type and body."""
    with closing(http.client.HTTPConnection("127.0.0.1", monitor.port, timeout=10)) as connection:
        connection.request(method, path, headers={"Accept": accept})
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()


def test_a_process_is_ready_when_every_part_is_and_a_reason_forges_no_lines(health: Health, monitor: Monitor):
    assert get(monitor, "/readyz")[::2] == (503, "starting: no part has reported yet\n")
    health.set_ready("objects", True)
    health.set_ready("nats", False, "bad\nobjects: fine")
    health.set_ready("lease", False)
    assert get(monitor, "/readyz")[::2] == (503, "lease: not ready\nnats: bad\\nobjects: fine\n")
    health.set_ready("nats", True)
    health.remove("lease")
    assert (get(monitor, "/readyz")[::2], health.problems()) == ((200, "ready\n"), [])


def test_health_is_the_age_of_the_heartbeat(health: Health, monitor: Monitor, clock: ManualClock):
    assert get(monitor, "/healthz")[::2] == (200, "ok: the event loop last ran 0.0 s ago\n")
    clock.advance(31)
    assert get(monitor, "/healthz")[::2] == (503, "hangs: the event loop last ran 31.0 s ago\n")
    health.beat()
    assert get(monitor, "/healthz")[0] == 200


def test_status_is_json_and_the_page_escapes_what_it_shows(health: Health, monitor: Monitor):
    health.set_status("chain us-east/A/0000/0", {"position": 7, "name": "<script>"})
    status, kind, body = get(monitor, "/status")
    assert (status, kind) == (200, "application/json")
    document = json.loads(body)
    assert document["parts"] == {"chain us-east/A/0000/0": {"position": 7, "name": "<script>"}}
    assert (document["ready"], document["problems"]) == (False, ["starting: no part has reported yet"])
    assert document["version"]
    status, kind, body = get(monitor, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert ["&lt;script&gt;" in body, "<script>" in body] == [True, False]


def test_only_requests_of_the_page_count_as_readers(health: Health, monitor: Monitor, clock: ManualClock):
    """Count readers of the page only: for them, coverage is read with requests to the store."""
    for path in ("/status", "/metrics", "/readyz"):
        get(monitor, path)
    assert health.seconds_since_read() == float("inf")
    for path in ("/", "/status?coverage"):
        clock.advance(5)
        get(monitor, path)
        assert health.seconds_since_read() == 0


def test_metrics_are_those_of_the_process(monitor: Monitor):
    status, kind, body = get(monitor, "/metrics")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert all(each in body for each in ('floe_build_info{python="', "process_resident_memory_bytes"))
    assert not re.search(r"_created[ {]", body)
    assert get(monitor, "/metrics", accept="application/openmetrics-text; version=1.0.0")[2].endswith("# EOF\n")
    assert get(monitor, "/metrics", accept="text/plain; version=abc")[:2] == (200, kind)


def test_unknown_paths_and_methods_are_refused_and_head_is_answered_without_a_body(monitor: Monitor):
    assert get(monitor, "/nothing")[::2] == (404, "expected one of / /metrics /healthz /readyz /status\n")
    assert (get(monitor, "/status?verbose=1")[0], get(monitor, "/status", "POST")[0]) == (200, 501)
    assert get(monitor, "/status", "HEAD")[::2] == (200, "")


def test_a_port_in_use_and_an_address_that_the_host_does_not_have_may_come_later(health: Health, monitor: Monitor):
    """Exit with 75: a restart may overlap with the former process; after boot an interface may get its address late."""
    taken, missing = f"127.0.0.1:{monitor.port}", "192.0.2.1:1"
    free = '; choose another address, or "" for no monitor'
    with closing(Monitor("", health)) as none:
        none.start()
        assert none.port == 0
    for address, why in ((taken, f"another process listens there{free}"), (missing, "this host has no such address")):
        second = Monitor(address, health)
        with pytest.raises(Unavailable) as caught:
            second.start()
        assert (caught.value.code, caught.value.exit_code, second.port) == ("E-LISTEN", 75, 0)
        assert str(caught.value).startswith(f"monitor.listen: cannot listen on {address}: {why}")


def connected(monitor: Monitor) -> socket.socket:
    return socket.create_connection(("127.0.0.1", monitor.port), PATIENCE)


def test_clients_that_send_nothing_or_too_much_are_dropped(monitor: Monitor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(monitor_http, "REQUEST_TIMEOUT_S", 0.3)
    with connected(monitor) as silent:
        assert silent.recv(1) == b""
    with connected(monitor) as slow, pytest.raises(OSError):
        for _ in range(4000):
            slow.sendall(b"x")
            time.sleep(0.05)
    with connected(monitor) as long:
        long.sendall(b"GET /status HTTP/1.1\r\nX: " + b"x" * 8000 + b"\r\n" + b"y" * 4000)
        with suppress(ConnectionError):
            assert not long.recv(100)
    assert get(monitor, "/healthz")[0] == 200


def test_a_scraper_that_never_reads_holds_neither_others_nor_the_shutdown(health: Health, clock: ManualClock):
    registry = CollectorRegistry()
    counter = Counter("big", "x" * 1000, ["n"], registry=registry)
    for n in range(20_000):
        counter.labels(str(n)).inc()
    monitor = Monitor("127.0.0.1:0", health, registry)
    monitor.start()
    with connected(monitor) as scraper:
        scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert get(monitor, "/healthz")[0] == 200
        started = time.monotonic()
        monitor.close()
        assert time.monotonic() - started < PATIENCE, "it waits for no part of the answer to be taken"


IDLE = 64  # connections, several times the limit


@contextmanager
def idle(monitor: Monitor, sent: bytes = b"") -> Iterator[None]:
    """Hold connections of other clients open, which send only `sent`."""
    with ExitStack() as stack:
        for _ in range(IDLE):
            client = stack.enter_context(connected(monitor))
            with suppress(OSError):  # the monitor has closed it already for another
                client.sendall(sent)
        yield


def test_an_idle_connection_takes_one_of_few_places_and_turns_nobody_away(health, monitor, monkeypatch):
    monkeypatch.setattr(monitor_http, "REQUEST_TIMEOUT_S", 10 * PATIENCE)
    health.set_ready("objects", True)
    before = set(threading.enumerate())  # one of them may end meanwhile
    with idle(monitor, b"GET /healthz HTTP/1.1\r\n"):
        eventually(lambda: len(set(threading.enumerate()) - before) == monitor_http.MAX_PARALLEL_REQUESTS)
        for path in ("/healthz", "/readyz", "/metrics", "/status"):
            assert get(monitor, path)[0] == 200


def test_a_page_that_fails_is_logged_and_the_next_one_is_served(health: Health):
    class Broken(Pages):
        def document(self) -> dict[str, Any]:
            raise KeyError("nobody foresaw this")

    count = counted(unexpected.labels("monitor"))
    monitor = Monitor("127.0.0.1:0", health, pages=Broken(health, CollectorRegistry()))
    monitor.start()
    with closing(monitor):
        status, _, body = get(monitor, "/status")
        assert (status, "E-UNEXPECTED" in body, get(monitor, "/healthz")[0]) == (500, True, 200)
    assert counted(unexpected.labels("monitor")) == count + 1


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def tls_of(folder: Path, name: str, **more: str) -> MonitorTlsSettings:
    return MonitorTlsSettings(cert=str(folder / f"{name}.pem"), key=str(folder / f"{name}.key"), **more)


@contextmanager
def served(health: Health, folder: Path, **more: str) -> Iterator[Monitor]:
    monitor = Monitor("127.0.0.1:0", health, tls=tls_of(folder, "server", **more))
    monitor.start()
    with closing(monitor):
        yield monitor


def fetched(monitor: Monitor, folder: Path, client: str = "", ca: str = "ca") -> int:
    """Return the status of /healthz for a client that checks the server and shows a certificate, if any."""
    context = ssl.create_default_context(cafile=str(folder / f"{ca}.pem"))
    if client:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    connection = http.client.HTTPSConnection("127.0.0.1", monitor.port, timeout=PATIENCE, context=context)
    with closing(connection):
        connection.request("GET", "/healthz")
        return connection.getresponse().status


def test_pages_are_served_over_tls_only_and_who_begins_no_handshake_turns_nobody_away(
    health, certificates, monkeypatch
):
    monkeypatch.setattr(monitor_http, "REQUEST_TIMEOUT_S", 10 * PATIENCE)
    with served(health, certificates) as monitor, idle(monitor, b"\x16\x03"):
        assert fetched(monitor, certificates) == 200
        with pytest.raises(ssl.SSLError):
            fetched(monitor, certificates, ca="other")
        with pytest.raises((OSError, http.client.HTTPException)):
            get(monitor, "/healthz")


def test_clients_need_a_certificate_where_one_is_asked_for(health: Health, certificates: Path):
    with served(health, certificates, client_ca=str(certificates / "ca.pem")) as monitor:
        assert fetched(monitor, certificates, client="client") == 200
        for client in ("", "stranger"):
            with pytest.raises((OSError, http.client.HTTPException)):
                fetched(monitor, certificates, client=client)
        assert fetched(monitor, certificates, client="client") == 200


def test_commands_ask_a_monitor_with_tls_and_believe_its_own_certificate_only(health: Health, certificates: Path):
    for files in ({}, {"client_ca": str(certificates / "ca.pem")}):
        with served(health, certificates, **files) as monitor:
            listen = f"127.0.0.1:{monitor.port}"
            own, another = (tls_of(certificates, name, **files) for name in ("server", "client"))
            assert "problems" in json.loads(fetch(EgressMonitorSettings(listen=listen, tls=own), "/status"))
            for more in ({"tls": another}, {}):
                with pytest.raises(Unavailable):
                    fetch(EgressMonitorSettings(listen=listen, **more), "/status")


def test_a_client_that_sends_its_handshake_slowly_is_cut_off(health: Health, certificates: Path, monkeypatch: Any):
    monkeypatch.setattr(monitor_http, "REQUEST_TIMEOUT_S", 0.3)
    with served(health, certificates) as monitor, connected(monitor) as slow:
        slow.sendall(b"\x16\x03\x01\x10\x00")  # a record of 4,096 bytes
        with pytest.raises(OSError):
            for _ in range(4000):
                slow.sendall(b"\x01")
                time.sleep(0.02)


def test_a_certificate_that_was_replaced_is_used_without_a_restart(health, certificates, tmp_path: Path, caplog):
    for name in ("server.pem", "server.key"):
        shutil.copy(certificates / name, tmp_path)
    make_authority(tmp_path, "later")
    shutil.copy(certificates / "ca.pem", tmp_path)
    with served(health, tmp_path) as monitor:
        assert fetched(monitor, tmp_path) == 200
        (tmp_path / "server.pem").write_text("no certificate yet")
        assert (fetched(monitor, tmp_path), caplog.text.count("certificate reload failed")) == (200, 1)
        certificate(tmp_path, "server", "IP:127.0.0.1", "later")
        assert fetched(monitor, tmp_path, ca="later") == 200


def test_a_metric_has_the_end_of_the_certificate_or_jwt_that_is_in_the_file_now(health, certificates, tmp_path: Path):
    def scraped() -> float:
        return metric_value("floe_credential_expiry_timestamp_seconds", {"key": "monitor.tls.cert"}) or 0.0

    for name in ("server.pem", "server.key"):
        shutil.copy(certificates / name, tmp_path)
    with served(health, tmp_path):
        assert 86_400 < scraped() - time.time() <= 2 * 86_400
        later = ssl.DER_cert_to_PEM_cert(b"\x17\r250101000000Z\x18\x0f20600101000000Z")
        (file := tmp_path / "server.pem").write_text(later)
        assert scraped() == 2_840_140_800
        file.unlink()
        assert scraped() == 0
    for claims, end in (({"exp": 1000}, 1000.0), ({}, math.inf), ([], 0.0)):
        body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
        file.write_text(f"-----BEGIN NATS USER JWT-----\ne30.{body}.x\n------END NATS USER JWT------\n")
        assert expiry_of(str(file)) == end


def test_unusable_files_are_named_at_the_start(health: Health, certificates: Path):
    for files, error in (
        ({"cert": "/no.pem", "key": "/no.key"}, "monitor.tls.cert /no.pem with key /no.key: no such file or directory"),
        ({"cert": "server.pem", "key": "client.key"}, "key values mismatch"),
        ({"cert": "server.pem", "key": "server.key", "client_ca": "/no.pem"}, "monitor.tls.client_ca /no.pem: no such"),
    ):
        tls = MonitorTlsSettings(**{key: str(certificates / name) for key, name in files.items()})
        with pytest.raises(ConfigError, match=re.escape(error)):
            Monitor("127.0.0.1:0", health, tls=tls).start()
    with pytest.raises(ValueError, match="expected cert and key with it"):
        MonitorTlsSettings(client_ca="/ca.pem")


# The service manager


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(str(tmp_path / "notify") if request.param == "path" else f"@{unique('notify')}") as manager:
        yield manager


def notifier(manager: Any, health: Health, **environment: str) -> SystemdNotifier:
    return SystemdNotifier(
        Monitor("", health).page_text, SystemClock(), {"NOTIFY_SOCKET": manager.address, **environment}
    )


async def test_it_is_ready_at_once_and_stopping_when_asked_to_and_feeds_no_other_watchdog(
    manager: ServiceManager, health: Health
):
    stop = Stop()
    others = {"WATCHDOG_USEC": "40000", "WATCHDOG_PID": str(os.getppid())}
    async with notifier(manager, health, **others).while_running(stop):
        assert manager.lines() == ["READY=1", f"MAINPID={os.getpid()}"]
        await soon(lambda: "STATUS=starting: no part has reported yet" in manager.lines())
        await asyncio.sleep(0.1)
        stop.set()
        await soon(lambda: manager.lines()[-2:] == ["STOPPING=1", "STATUS=draining"])

    assert manager.lines().count("STOPPING=1") == 1
    assert "WATCHDOG=1" not in manager.lines()


async def test_the_watchdog_is_fed_while_healthz_shows_a_live_loop(manager, health: Health, clock: ManualClock):
    stop = Stop()
    async with notifier(manager, health, WATCHDOG_USEC="40000").while_running(stop):
        await soon(lambda: manager.lines().count("WATCHDOG=1") > 3)
        clock.advance(MAX_BEAT_AGE_S + 1)  # no heartbeat: the serving loop hangs
        await asyncio.sleep(0.1)  # for notifications that are on their way
        manager.forget()
        await asyncio.sleep(0.2)
        assert manager.lines() == []
        health.beat()
        await soon(lambda: "WATCHDOG=1" in manager.lines())
        stop.set()
        manager.forget()
        await soon(lambda: "WATCHDOG=1" in manager.lines())  # draining is work too


async def test_a_status_is_one_line_and_cannot_forge_others(manager: ServiceManager, health: Health):
    health.set_ready("nats", False, "no\nWATCHDOG=trigger\x1b")
    health.set_ready("objects", False, "x" * 1000)
    async with notifier(manager, health).while_running(Stop()):
        await soon(lambda: any(line.startswith("STATUS=") for line in manager.lines()))

    [status] = [line for line in manager.lines() if line.startswith("STATUS=")]
    assert status.startswith(r"STATUS=nats: no\nWATCHDOG=trigger\x1b; objects: xxx")
    assert len(status) < 400


async def test_a_hangup_is_a_reload(manager: ServiceManager, health: Health):
    before = list(on_hangup)
    async with notifier(manager, health).while_running(Stop()):
        manager.forget()
        for call in on_hangup:
            call()
        lines = [line for line in manager.lines() if not line.startswith("STATUS=")]

    assert [line.partition("=")[0] for line in lines] == ["RELOADING", "MONOTONIC_USEC", "READY", "MAINPID"]
    assert int(lines[1].partition("=")[2]) > 0
    assert on_hangup == before


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "relative", "/nowhere/notify"])
async def test_without_a_service_manager_nothing_happens(address: str, health: Health):
    stop = Stop()
    async with notifier(SimpleNamespace(address=address), health, WATCHDOG_USEC="spoiled").while_running(stop):
        stop.set()
        await asyncio.sleep(0)
