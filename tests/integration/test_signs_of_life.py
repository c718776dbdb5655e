"""A dead site, a dead store and a stopped chain, as shown at the centre."""

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from common import logs
from common.archive.documents import ChainStore
from common.archive.heartbeats import ChainHeartbeat, HeartbeatObject
from common.chain import Chain
from common.errors import Refused
from common.nats.client import FloeClient
from tests.support.basics import metric_value, soon, unique
from tests.support.commands import floe
from tests.support.egress import QUICK, SITE, Bench
from tests.support.egress_process import Process as EgressProcess
from tests.support.egress_process import processes
from tests.support.ingress import CHAIN, Archive, Centre, rows_of
from tests.support.proxies import TcpProxy
from tests.support.stores import FaultyStore

pytestmark = [pytest.mark.servers, pytest.mark.simulated]

OTHER = Chain("eu-west", "NODES")
LIVELY = replace(QUICK, intervals=replace(QUICK.intervals, alive=0.2))


def gauge(name: str, **labels: str) -> float | None:
    return metric_value(f"floe_{name}", labels)


def heartbeat_of(bench: Bench, feed: str) -> ChainHeartbeat | None:
    """The heartbeat of the feed by the one process of the site."""
    infos = bench.chains.list_heartbeats()
    assert len(infos) <= 1, "a restart takes the name that it had"
    alive = bench.chains.read_heartbeat(infos[0].key) if infos else None
    return next((heartbeat for heartbeat in alive.chains if heartbeat.chain.feed == feed), None) if alive else None


async def test_each_process_reports_its_state_and_how_far_its_streams_are(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    store = FaultyStore(bench.objects)
    trouble: dict[str, Exception] = {}

    def perhaps(real: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        for part, error in trouble.items():
            if part in key:
                raise error
        return real(key, *args, **kwargs)

    for verb in ("put", "put_if_absent", "put_if_match", "get", "head", "list"):
        store.on(verb, perhaps)

    def reports(end: int, last: int) -> bool:
        found = heartbeat_of(bench, stream)
        return found is not None and (found.state, found.end, found.source_last) == ("reading", end, last)

    async with bench.egress({"stream": stream}, tuning=LIVELY, objects=store):  # type: ignore[arg-type]
        await bench.publish(stream, [b"x"] * 50)
        await soon(lambda: reports(50, 50))
        assert gauge("egress_store_reachable") == gauge("egress_nats_reachable") == 1

        # Refused: the archive continues.
        trouble["/alive/"] = Refused("no")
        await soon(lambda: (gauge("egress_alive_errors_total", site=SITE) or 0) >= 1)
        await bench.archive(stream, [b"y"] * 10, 60)
        assert gauge("egress_store_reachable") == 1, "a refusal is an answer"
        trouble["/alive/"] = Refused("who?", code="E-S3-AUTH")
        await soon(lambda: gauge("egress_store_reachable") == 0)

        trouble.clear()
        await soon(lambda: gauge("egress_store_reachable") == 1)
        await soon(lambda: reports(60, 60))

    await bench.delete_stream(stream)
    async with bench.egress({"stream": stream}, tuning=LIVELY):
        await soon(lambda: getattr(heartbeat_of(bench, stream), "code", "") == "E-SOURCE-GONE")


async def test_a_takeover_is_reported_before_the_next_heartbeat_is_due(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    settings = bench.settings({"stream": stream})

    def second() -> ChainHeartbeat | None:
        found = [
            bench.chains.read_heartbeat(info.key) for info in bench.chains.list_heartbeats() if "second" in info.key
        ]
        return found[0].chains[0] if found and found[0] else None

    def reports(state: str) -> bool:
        heartbeat = second()
        return heartbeat is not None and heartbeat.state == state

    first = bench.start(settings, QUICK)
    await soon(lambda: first.state(stream) == "reading")
    calm = replace(QUICK, intervals=replace(QUICK.intervals, alive=15.0))
    standby = bench.start(settings.model_copy(update={"instance": "second"}), calm)
    await soon(lambda: reports("standby"))
    await first.drain()
    await soon(lambda: reports("reading"), 13)
    await standby.drain()


@asynccontextmanager
async def silenced(far: Bench) -> AsyncIterator[TcpProxy]:
    """Let the bench's store accept connections and never answer, until it is healed."""
    async with TcpProxy(urlsplit(far.store_config["endpoint_url"]).port or 0) as line:
        line.blackhole()
        far.store_config["endpoint_url"] = f"http://127.0.0.1:{line.port}"
        yield line


@pytest.mark.real
async def test_a_silent_store_is_named_and_hides_neither_the_lag_nor_waiting_chains(
    far: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the start, and later."""
    stream = await far.make_stream(unique("T"))
    labels = {"site": SITE, "feed": stream, "partition": "0"}
    logs.configure("info", "text")
    async with silenced(far) as line, far.egress({"stream": stream}, tuning=LIVELY, lease_ttl="30s") as running:
        await soon(lambda: "objects: the store does not answer" in running.health.problems())
        assert (gauge("egress_store_reachable"), gauge("egress_nats_reachable")) == (0, 1)
        logs.flush()
        assert f"store http://127.0.0.1:{line.port}: no answer for 0.1 s" in capsys.readouterr().err
        line.heal()
        await soon(lambda: running.state(stream) == "reading")
        await far.publish(stream, [b"x"] * 10)
        for name, value in (("end_sequence", 10), ("source_sequence", 10), ("waiting", 0)):
            await soon(lambda name=name, value=value: gauge(f"egress_{name}", **labels) == value)
        line.blackhole()
        await soon(lambda: gauge("egress_waiting", **labels) == 1)
        await far.publish(stream, [b"y"] * 5)
        await soon(lambda: gauge("egress_source_sequence", **labels) == 15)
        assert gauge("egress_end_sequence", **labels) == 10
        line.heal()
        await soon(lambda: gauge("egress_waiting", **labels) == 0)
        await far.archived_to(stream, 15)


@pytest.mark.real
async def test_sigterm_ends_egress_that_starts_on_a_silent_store(far: Bench) -> None:
    stream = await far.make_stream(unique("T"))
    async with silenced(far) as line:
        with processes() as started:
            started.append(EgressProcess(far, stream))
            await soon(lambda: line.accepted > 0)
            started[0].send(signal.SIGTERM)
            assert await started[0].ended() == 0  # nothing was begun, so nothing is left
            assert "calls abandoned" in started[0].log.read_text()


def put_heartbeat(archive: Archive, chain: Chain, state: str, *, ago: float = 0.0, **fields: Any) -> None:
    """Put the heartbeat of a process that has the chain, `ago` seconds old."""
    now = time.time()
    alive = HeartbeatObject(chain.site, "o", now, (ChainHeartbeat(state, now, chain=chain, **fields),))
    archive.documents.write_heartbeat("host", alive)
    os.utime(archive.folder / archive.documents.layout.heartbeat(chain.site, "host"), (now - ago, now - ago))


async def status(centre: Centre) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """The exit code of `floe status`, and its rows by site and feed."""
    done = await floe("status", "-c", str(centre.write()), "--json")
    return done.code, {(row["site"], row["feed"]): row for row in done.json()}


async def test_the_centre_knows_the_true_lag_the_reason_and_who_is_silent(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.put(rows_of(1, 50))
    put_heartbeat(archive, CHAIN, "reading", end=50, source_last=597)
    centre = Centre(tmp_path, archive, nats_url)
    labels = {"site": CHAIN.site, "feed": CHAIN.feed, "partition": "0"}

    async with centre.running() as health:
        await centre.carried(client, 50)
        await soon(lambda: gauge("ingress_source_lag_sequences", target=centre.target, **labels) == 547)
        lag, silent = gauge("ingress_lag_messages", target=centre.target), gauge("ingress_site_silent", site=CHAIN.site)
        assert (lag, silent) == (0, 0)
        shown = centre.status(health)["chains"][str(CHAIN)]["source"]
        assert (shown["state"], shown["sequence"]) == ("reading", 597)

        code, rows = await status(centre)
        row = rows[CHAIN.site, CHAIN.feed]
        assert (code, row["phase"], row["egress"]) == (0, "idle", "reading")
        assert (row["lag_sequences"], row["source_lag_sequences"]) == (0, 547)
        assert row["last_archived"] is not None

        # A site that never archived anything is shown too, with the reason.
        put_heartbeat(archive, OTHER, "stopped", code="E-ROLLED-BACK", why="it ends before", source_last=9)
        code, rows = await status(centre)
        row, why = rows[OTHER.site, OTHER.feed], "egress: it ends before"
        assert (code, row["egress"], row["archived"], row["why"]) == (3, "stopped E-ROLLED-BACK", None, why)

    put_heartbeat(archive, CHAIN, "reading", ago=400, end=50, source_last=597)
    os.utime(archive.folder / archive.documents.layout.tail(CHAIN), (1000, 1000))
    read: list[Chain] = []
    monkeypatch.setattr(ChainStore, "read_tail", lambda _, chain: read.append(chain))
    code, rows = await status(centre)
    monkeypatch.undo()
    row = rows[CHAIN.site, CHAIN.feed]
    assert (code, row["egress"], row["archived"], CHAIN in read) == (3, "silent", 50, False), "the heartbeat is newer"
    async with centre.running():
        await soon(lambda: gauge("ingress_site_silent", site=CHAIN.site) == 1)
        assert gauge("ingress_source_silent", site=CHAIN.site) == 1
        await soon(lambda: gauge("ingress_source_stopped", site=OTHER.site) == 1)
