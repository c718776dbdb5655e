"""Servers and fixtures shared by a whole test run. Tests use unique stream and bucket names, so they do not collide."""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from botocore.loaders import JSONFileLoader, Loader
from hypothesis import HealthCheck, settings

from common import exits, logs
from common.errors import FloeError
from infra.local.nats import NatsCluster, NatsServer
from tests.sim import virtual
from tests.support import canaries, kinds
from tests.support.basics import SharedS3, problems_of, servers_line, shared_s3_server

if TYPE_CHECKING:
    from common.nats.client import FloeClient
    from tests.support.egress import Bench
    from tests.support.ingress import Archive, Centre
    from tests.support.replay import World

# A developer's credentials and proxies must not influence a test.
# Kept: the seed of a run, simulated time for all tests, other servers.
_KEPT = ("FLOE_SEED", "FLOE_SIMULATE", "FLOE_NATS_SERVER", "FLOE_TEST_S3", "FLOE_MINIO")
for _name in [n for n in os.environ if n.startswith(("AWS_", "NATS_", "FLOE_")) and not n.startswith(_KEPT)]:
    del os.environ[_name]
for _name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
    os.environ.pop(_name, None)

# For jobs of a few rows, Java need neither compile well nor verify the classes of Spark.
_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
os.environ |= {"SPARK_CONF_DIR": str(Path(__file__).parent / "support" / "spark_conf")}
os.environ |= dict.fromkeys(("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"), _JAVA)

# A shell starts background processes with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example may be slow because the machine is busy.
settings.register_profile("floe", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("floe")

# Files that start many processes and servers, or compute, for minutes. They begin early and are spread between the
# other files, so that none begins last while the other processes wait for it.
_WORLDS = ("acceptance", "crash", "sim")
# One process runs these, with one Spark session; they and the demo take longest, so they begin first.
_SPARK = ("test_compaction_spark.py", "test_readers_agree.py", "test_spark_source.py")
_LONGEST = (*_SPARK, "test_demo.py")
# And one these, which look through all files of the product: it parses each once.
_SOURCES = tuple(f"test_{name}.py" for name in ("docs", "english", "hints", "house", "locks", "logs", "shipped_layout"))


# Each S3 client parses the same large files of botocore again, which is most of its cost.
_parsed = cache(partial(JSONFileLoader.load_file, JSONFileLoader()))
JSONFileLoader.load_file = lambda _, path: _parsed(path)  # type: ignore[method-assign]
# And each session searches its folders again for the services that exist.
_services = cache(partial(Loader.list_available_services, Loader()))
Loader.list_available_services = lambda _, type_name: _services(type_name)  # type: ignore[method-assign]

# No test stops the machine, so what it holds unwritten is never lost; thousands of small files are written.
os.fsync = lambda _: None
# The modules and the tests stay to the end: the collector need not traverse them over and over.
gc.disable()
atexit.register(gc.unfreeze)
canaries.watch()
asyncio.set_event_loop_policy(virtual.Policy())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Run a test that is marked `simulated` in simulated time."""
    with virtual.virtual() if kinds.in_simulated_time(item) else nullcontext():
        return (yield)


def pytest_report_header() -> str:
    return servers_line()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    """Fail a test if its captured output, its log included, holds a secret."""
    report = yield
    leaking = [title for title, text in report.sections if canaries.shows_secret(text)]
    report.sections = [(title, text) for title, text in report.sections if title not in leaking]
    if any(title.endswith(report.when) for title in leaking):
        report.outcome, report.longrepr = "failed", f"a secret is shown: {', '.join(leaking)}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if os.environ.get("FLOE_SIMULATE") and "nats_url" in kinds.fixtures_of(item):
            item.add_marker("simulated")
        item.add_marker(kinds.kind_of(item))
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    longest = [path for path in files if path.endswith(_LONGEST)]
    worlds = [path for path in files if path.split("/")[-2] in _WORLDS and path not in longest]
    worlds.sort(key=lambda path: path.split("/")[-2] != "sim")  # the longest of them
    others = [path for path in files if path not in {*worlds, *longest}]
    # The last third of the other files comes after the last world.
    each = max(1, len(others) * 2 // 3 // max(1, len(worlds)))
    order: list[str] = longest
    for index, path in enumerate(worlds):
        order += [path, *others[index * each : (index + 1) * each]]
    order += others[len(worlds) * each :]
    items[:] = [item for path in order for item in files[path]]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((str(files) for files in (_SPARK, _SOURCES) if file.endswith(files)), file)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_sessionstart(session: pytest.Session) -> None:
    if is_controller(session.config):
        kinds.FAILED.unlink(missing_ok=True)


def is_controller(config: pytest.Config) -> bool:
    """True if this process is not a worker of xdist."""
    return not hasattr(config, "workerinput")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        # A test that crashed a worker has no kind, and is not tried again.
        _failed[report.nodeid] = next((kind for kind in kinds.KINDS if kind in report.keywords), "pure")


_failed: dict[str, str] = {}


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.TESTS_FAILED and is_controller(session.config):
        kinds.write_failed(_failed)


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """Undo the effects of a command or a service that ran in the process of a test.

    These are the level of logs, the configuration that it read (later errors would name it in their commands), and
    ignored signals, which children inherit.
    """
    before = exits._source, exits._path, exits._context
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    logs.remove_handler()
    exits._source, exits._path, exits._context = before
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
def nats_url(request: pytest.FixtureRequest) -> str:
    """Return the simulated server if the test is `simulated`, else a real one that the tests of a worker share."""
    if kinds.in_simulated_time(request.node):
        return f"nats://127.0.0.1:{virtual.PORT}"
    server: NatsServer = request.getfixturevalue("nats_server")
    return server.url


@pytest.fixture(scope="session")
def s3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedS3]:
    own = tmp_path_factory.getbasetemp()
    with shared_s3_server(own if is_controller(request.config) else own.parent) as server:
        canaries.note(server.secret_key)
        canaries.note(getattr(server, "reader_secret_key", server.secret_key))
        yield SharedS3(server)


# Worlds of tests. Their modules are imported with the first of them: most unit tests need none of these.


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[FloeClient]:
    from tests.support.ingress import client_of

    async with client_of(nats_url) as client:
        yield client


@pytest.fixture
async def bench(nats_url: str, tmp_path: Path, client: FloeClient) -> Bench:
    """Egress of one site, over a folder."""
    from tests.support.egress import Bench

    return Bench(nats_url, tmp_path, client)


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[tuple[Bench, NatsServer]]:
    """Egress of one site, with a server of its own that a test may kill or roll back."""
    from tests.support.egress import Bench, connected

    with NatsServer() as server:
        client = await connected(server.url)
        yield Bench(server.url, tmp_path, client), server
        await client.aclose()


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    """A cluster of three servers."""
    from tests.support.servers import placing

    with NatsCluster(3) as servers:
        yield placing(servers)


@pytest.fixture
async def clustered(cluster: NatsCluster, tmp_path: Path) -> AsyncIterator[Bench]:
    """Egress of one site, over three servers."""
    from tests.support.egress import Bench, connected

    client = await connected(cluster.urls)
    yield Bench(cluster.urls, tmp_path, client)
    await client.aclose()


@pytest.fixture
async def far(nats_url: str, s3: SharedS3, tmp_path: Path, client: FloeClient) -> Bench:
    """Egress of one site, over S3."""
    from tests.support.egress import Bench

    return Bench(nats_url, tmp_path, client, s3=s3)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """An empty archive for ingress to carry."""
    from tests.support.ingress import Archive

    return Archive(tmp_path / "store")


@pytest.fixture
def centre(request: pytest.FixtureRequest, tmp_path: Path, archive: Archive, nats_url: str) -> Centre:
    """Ingress of one target over the archive; `TARGET` of the module: keys of the target."""
    from tests.support.ingress import Centre

    return Centre(tmp_path, archive, nats_url, **getattr(request.module, "TARGET", {}))


@pytest.fixture
def checking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ingress check its state and its progress, and a correction the target, several times a second."""
    monkeypatch.setattr("ingress.operator.correct.STILL_INTERVAL_S", 0.1)
    monkeypatch.setattr("ingress.delivery.STATE_CHECK_INTERVAL_S", 0.2)
    monkeypatch.setattr("ingress.delivery.PROGRESS_CHECK_INTERVAL_S", 0.2)


@pytest.fixture
async def world(nats_url: str, tmp_path: Path, client: FloeClient) -> World:
    """An archive, a server, and replays between them."""
    from tests.support.replay import World

    return World(tmp_path, nats_url, client)


@pytest.fixture(autouse=True)
def _hints_as_pasted() -> Iterator[None]:
    """Check that a shell accepts the commands of each hint that a test brings about, unchanged."""
    hints: set[str] = set()
    made = FloeError.__init__

    def noted(self: FloeError, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        hints.add(self.hint)

    FloeError.__init__ = noted  # type: ignore[method-assign]
    yield
    FloeError.__init__ = made  # type: ignore[method-assign]
    assert [problem for hint in hints for problem in problems_of(hint)] == []
