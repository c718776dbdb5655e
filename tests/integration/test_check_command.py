"""`floe check` beside running services and real archives: each of the four exit codes."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from common.archive.documents import ChainDocument, ChainStore, CompactionRun
from common.archive.heartbeats import ChainHeartbeat, HeartbeatObject
from common.chain import Chain
from common.errors import Refused
from common.nats.client import FloeClient
from common.observe.monitor import Health
from egress import metrics
from infra.local.process import free_ports
from tests.integration.test_status_views import served
from tests.support.basics import PATIENCE, soon
from tests.support.commands import floe, ran, spawned
from tests.support.compaction import CHAIN as COMPACTED
from tests.support.compaction import Archive as Compacted
from tests.support.egress import SITE, Bench
from tests.support.ingress import CHAIN, Archive, Centre, rows_of

pytestmark = pytest.mark.simulated

LINE = re.compile(r"(OK|WARNING|CRITICAL|UNKNOWN) - [^|\n]+( \| ('?[\w.]+'?=[\d.]+(s|B)?(;[\d:]*){0,2} ?)+)?\n")
STATES = ("OK", "WARNING", "CRITICAL", "UNKNOWN")


async def checked(*words: str, code: int) -> str:
    """Run a check, which must exit with `code` and state it, and return its line."""
    done = await ran("check", *words, code=code)
    assert LINE.fullmatch(done.out), done.out
    assert done.out.startswith(STATES[code])
    return done.out


@pytest.mark.servers
async def test_egress_is_asked_at_its_monitor(bench: Bench, nats_url: str, tmp_path: Path) -> None:
    stream = await bench.filled([b"x"] * 50)
    [port] = free_ports(1)
    role = {"feeds": [{"stream": stream}], "monitor": {"listen": f"0.0.0.0:{port}"}}
    config = configured(tmp_path, site=SITE, nats={"url": nats_url}, store=bench.store_config, egress=role)
    line = await checked("egress", "-c", config, code=3)
    assert f"monitor at 0.0.0.0:{port}" in line
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: running.status(stream).get("end") == 50)
        await soon(lambda: not running.health.problems())
        with served(running.health, port):
            metrics.expiry.clear()  # of feeds that other tests ran in this process
            line = await checked("egress", "-c", config, code=0)
            assert line.startswith("OK - 1 chain, 0 sequences not archived | chains=1 stopped=0")
            running.health.set_ready("somebody", False, "is away")  # egress itself sets "objects" ready again
            assert "not ready: somebody: is away" in await checked("egress", "-c", config, code=1)
            running.health.set_ready("somebody", True)
            await bench.delete_stream(stream)
            await soon(lambda: running.state(stream) == "stopped")
            assert f"stopped: {stream}: E-SOURCE-GONE" in await checked("egress", "-c", config, code=2)


@pytest.mark.servers
async def test_ingress_is_asked_at_its_monitor(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str
) -> None:
    archive.put(rows_of(1, 20))
    [port] = free_ports(1)
    centre = Centre(tmp_path, archive, nats_url)
    config = centre.write(monitor={"listen": f"127.0.0.1:{port}"})
    await checked("ingress", "-c", str(config), code=3)
    async with centre.running() as health:
        with served(health, port):
            await centre.carried(client, 20)
            await soon(lambda: str(CHAIN) in health.chains() and not health.problems())
            line = await checked("ingress", "-c", str(config), code=0)
            assert line.startswith("OK - 1 target, 1 chain, 0 s behind | targets=1 chains=1")
            archive.put(rows_of(31, 40))
            await soon(lambda: lag(health) >= 2)
            assert "s behind" in await checked("ingress", "-c", str(config), "--warning", "1s", code=1)
            assert "s behind" in await checked("ingress", "-c", str(config), "--critical", "1s", code=2)


def lag(health: Health) -> float:
    """The lag in seconds of the one chain of the one target."""
    [target] = [part for name, part in health.status()["parts"].items() if name.startswith("target ")]
    return float(target["chains"][str(CHAIN)]["lag_seconds"])


async def test_a_wrong_command_line_or_configuration_is_unknown_and_not_critical(tmp_path: Path) -> None:
    config = configured(tmp_path, store={"url": f"file://{tmp_path}"}, ingress={"monitor": {"listen": ""}})
    for wrong, part in (
        ("", "E-USAGE: floe check: expected one of egress, ingress, archive, compaction, found none"),
        ("egres", "'egres' is not one of 'egress', 'ingress'"),
        ("egress us-east -c FILE", "E-USAGE: us-east: expected only with archive, found egress"),
        ("egress --warning soon", "expected a duration such as"),
        ("egress --nothing", "E-USAGE: No such option '--nothing'"),
        ("egress", "E-USAGE: expected a configuration: -c FILE"),
        ("archive -c FILE x/y/z", "chain 'x/y/z': expected SITE/FEED"),
        ("archive -c FILE eu", "E-USAGE: eu: expected a site of the archive or the configuration"),
        ("ingress -c FILE --warning 2h --critical 1h", "E-USAGE: --warning: expected at most --critical, 1h, found 2h"),
        (f"ingress -c {tmp_path}/none.yaml", "E-CONFIG"),
        ("ingress -c FILE", "ingress.monitor.listen: expected an address"),
    ):
        assert part in await checked(*wrong.replace("FILE", config).split(), code=3)


def configured(folder: Path, **document: object) -> str:
    path = folder / "central.yaml"
    path.write_text(yaml.safe_dump({"spool_dir": str(folder / "spool"), **document}))
    path.chmod(0o600)
    return str(path)


async def test_the_archive_is_checked_in_the_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive(tmp_path / "store")
    config = configured(tmp_path, store={"url": f"file://{archive.folder}", "prefix": "data"})
    assert "no chain is archived" in await checked("archive", "-c", config, code=3)
    never = Chain(CHAIN.site, "NEVER")
    stop = ChainHeartbeat("stopped", 0.0, "E-SOURCE-GONE", chain=never)
    archive.documents.write_heartbeat("host", HeartbeatObject(CHAIN.site, "host", 0.0, (stop,)))
    for words in ([], [f"{CHAIN.site}/NEVER"], [CHAIN.site]):
        assert f"{never}: stopped at its site: E-SOURCE-GONE" in await checked("archive", "-c", config, *words, code=2)
    assert "elsewhere" in await checked("archive", "-c", config, "elsewhere", code=3)
    archive.put(rows_of(1, 20))
    newest = archive.put(rows_of(21, 40))
    heartbeat = ChainHeartbeat("reading", 0.0, "", "", 40, 47, 0.0, chain=CHAIN)
    archive.documents.write_heartbeat("host", HeartbeatObject(CHAIN.site, "host", 0.0, (heartbeat,)))
    line = await checked("archive", "-c", config, CHAIN.site, code=0)
    assert line.startswith("OK - 1 chain, 7 sequences not archived | chains=1 holes=0 damaged=0 not_archived=7")
    with monkeypatch.context() as limited:
        limited.setattr(ChainStore, "list_heartbeats", Mock(side_effect=Refused("denied", code="E-S3-DENIED")))
        assert "heartbeats cannot be read: E-S3-DENIED: denied" in await checked("archive", "-c", config, code=3)

    forked = ChainHeartbeat("stopped", 0.0, "E-FORKED", "", 40, 47, 0.0, chain=CHAIN)
    archive.documents.write_heartbeat("a", HeartbeatObject(CHAIN.site, "a", 0.0, (forked,)))
    archive.documents.write_heartbeat("host", HeartbeatObject(CHAIN.site, "host", 0.0, (heartbeat,)))
    assert "stopped at its site: E-FORKED" in await checked("archive", "-c", config, code=2), "though another reads"
    [gone, alive] = archive.documents.list_heartbeats()
    (archive.folder / gone.key).unlink()

    before = alive.modified - 1000
    os.utime(archive.folder / alive.key, (before, before))
    assert "no heartbeat for 1" in await checked("archive", "-c", config, code=1)

    archive.put(rows_of(51, 60))
    done = await floe("check", "archive", "-c", config, "--json")
    found = json.loads(done.out)
    assert (done.code, found["state"], found["figures"]["holes"]) == (2, "CRITICAL", 1)
    assert "us-east/NODES/0000/0: 41..50 missing" in found["text"]
    newest = archive.store.list(CHAIN)[-1]
    for damage in (b"", (archive.folder / newest.key).read_bytes()[:-8] + b"damaged!"):
        (archive.folder / newest.key).write_bytes(damage)
        assert f"damaged: {newest.key}" in await checked("archive", "-c", config, code=2)

    other = Chain("spoiled", CHAIN.feed)
    archive.put(rows_of(1, 5), chain=other)
    archive.objects.put(archive.store.layout.stream_document(other.next_incarnation()), b'{"previous": {"x": 1}}')
    part = await checked("archive", "-c", config, code=2)
    assert "41..50 missing" in part
    assert "damaged: data/_floe/site=spoiled/" in part, "one site's document hides nothing of the others"


async def test_compaction_is_judged_by_what_waits_and_by_its_last_success(tmp_path: Path) -> None:
    archive = Compacted(tmp_path)
    level = {"from": 0, "to": 1, "min_age": "1m", "max_wait": "10m", "min_count": 3, "min_size": "1G", "max_size": "4G"}
    compaction = {"levels": [level], "engine": "local", "allow_short_times": True}
    store = {"url": f"file://{tmp_path}/store", "prefix": "data"}
    config = configured(tmp_path, store=store, compaction=compaction)
    line = await checked("compaction", "-c", config, code=0)
    assert line.startswith("OK - 0 segments wait for a merge; no merge yet | chains=0 waiting=0")
    for first in range(1, 40, 10):
        archive.put(first, first + 9, age=7200)
    documents = ChainStore(archive.objects, archive.layout)
    documents.create_chain(COMPACTED, ChainDocument((), 1, 1))
    limits = ("--warning", "1h", "--critical", "1d")
    before = archive.objects.list("")
    assert "4 segments wait for a merge, the oldest for" in await checked("compaction", "-c", config, *limits, code=1)
    # Whatever `max_wait` is: a run that has nothing to do succeeds too.
    levels = [{**level, "max_wait": "30d", "min_count": 9}]
    patient = configured(tmp_path, store=store, compaction={**compaction, "levels": levels})
    line = await checked("compaction", "-c", patient, *limits, code=1)
    assert "no run is recorded, and the oldest segment is 72" in line
    documents.write_run(None, None, CompactionRun(time.time(), 1.0, 0, time.time() - 4 * 86_400))
    assert "no run has succeeded for 345" in await checked("compaction", "-c", patient, code=2)
    archive.objects.delete(archive.layout.run(None, None))
    configured(tmp_path, store=store, compaction=compaction)
    await checked("compaction", "-c", config, "--warning", "1m", "--critical", "1h", code=2)
    assert archive.objects.list("") == before, "a check needs no right to write"
    await ran("compact", "-c", config)
    for first, age in ((41, 10**6), (51, 10**6), (61, 100)):
        archive.put(first, first + 9, age=age)  # a quiet feed: until the third there is nothing to merge
    line = await checked("compaction", "-c", config, *limits, code=0)
    assert ("last_success=" in line, "the last merge was" in line) == (True, True)
    documents.write_run(None, None, CompactionRun(time.time(), 1.0, 75, time.time() - 7200))
    line = await checked("compaction", "-c", config, *limits, code=1)
    assert "no run has succeeded for 72" in line
    documents.write_run(None, None, CompactionRun(time.time(), 1.0, 75))
    assert "no run has succeeded yet" in await checked("compaction", "-c", config, *limits, code=2)


def test_ctrl_c_decides_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        nats = {"url": f"nats://{address}", "connect_timeout": "60s"}
        role = {"feeds": [{"stream": "NODES"}], "monitor": {"listen": address}}
        config = configured(tmp_path, site=SITE, nats=nats, store={"url": f"file://{tmp_path}"}, egress=role)
        pipe = subprocess.PIPE
        with spawned("check", "egress", "-c", config, stdout=pipe, stderr=pipe) as process, silent.accept()[0]:
            process.send_signal(signal.SIGINT)
            shown, part = process.communicate(timeout=PATIENCE)
    assert (process.returncode, shown, part) == (3, "UNKNOWN - interrupted before the check was done\n", "")
