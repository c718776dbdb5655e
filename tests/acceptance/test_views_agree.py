"""The views of an operator agree with the store and the streams, and report each fault.

Two sites' egress and the centre's ingress run as processes, over servers of their own. The page, /status, /metrics,
`floe status` and `floe check` are compared with each other and with the truth: the bucket as an S3 client lists it, the
streams as their servers report them.
"""

import asyncio
import http.client
import json
import re
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.nats.api import create_stream, stream_info
from common.objects import open as opening
from infra.local.process import free_ports
from tests.scenarios.load import make_stream
from tests.scenarios.processes import Service
from tests.scenarios.world import TARGET, World
from tests.support.basics import PATIENCE, SharedS3, commands_of, soon
from tests.support.browser import table_rows
from tests.support.commands import Done, floe
from tests.support.ingress import client_of
from tests.support.proxies import TcpProxy, silent_store

pytestmark = pytest.mark.servers

SITES = ("alpha", "beta")
MINUTE = 60.0
LONGEST = 4000  # bytes of the largest message that the target accepts
SEGMENT = re.compile(r"data/site=(\w+)/feed=NODES/incarnation=0000/partition=0/level=0/0*(\d+)-0*(\d+)-\w{16}\.parquet")

Look = Callable[[], Awaitable[bool]]


@dataclass(frozen=True)
class Truth:
    """The true figures of one site, from the server of the stream and from the listing of the bucket."""

    source: int
    archived: int
    segments: int
    bytes: int


@dataclass
class Fleet:
    """Two sites and a centre, by name; the services reach the store through `line`."""

    world: World
    line: TcpProxy
    bucket: Any
    configs: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    services: dict[str, Service] = field(default_factory=dict)

    # The truth

    async def publish(self, site: str, count: int, size: int = 100) -> None:
        async with client_of(self.world.sites[site].url) as client:
            for _ in range(count):
                await client.request_raw(b"nodes.a", b"x" * size, timeout=PATIENCE)

    async def truth(self) -> tuple[dict[str, Truth], int]:
        """The truth by site, and the last sequence of the target, which is also the number of its messages."""
        stored = await asyncio.to_thread(self._listed)
        found = {}
        for site in SITES:
            async with client_of(self.world.sites[site].url) as client:
                source = await stream_info(client, "NODES")
            segments = stored.get(site, [])
            ends, sizes = [end for end, _ in segments], [size for _, size in segments]
            found[site] = Truth(source.last_sequence, max(ends, default=0), len(segments), sum(sizes))
        async with client_of(self.world.central.url) as client:
            info = await stream_info(client, TARGET)
        assert info.messages == info.last_sequence
        return found, info.last_sequence

    def _listed(self) -> dict[str, list[tuple[int, int]]]:
        """End and size of each segment in the bucket."""
        found: dict[str, list[tuple[int, int]]] = {}
        pages = self.bucket.get_paginator("list_objects_v2").paginate(
            Bucket=self.world.store["url"].removeprefix("s3://")
        )
        for each in (each for page in pages for each in page.get("Contents", ())):
            if match := SEGMENT.fullmatch(each["Key"]):
                found.setdefault(match[1], []).append((int(match[2]), each["Size"]))
        return found

    # The views

    async def page(self, name: str, path: str = "/") -> str:
        """The answer of the monitor of a service; empty if it does not run."""
        return await asyncio.to_thread(get, self.ports[name], path)

    async def parts(self, name: str) -> dict[str, Any]:
        """The parts that /status shows."""
        text = await self.page(name, "/status")
        return dict(json.loads(text)["parts"]) if text else {}

    async def metric(self, name: str, metric: str, **labels: str) -> float | None:
        """The one sample of a service's `floe_{metric}` that has these labels."""
        for family in text_string_to_metric_families(await self.page(name, "/metrics")):
            for sample in family.samples:
                if sample.name == f"floe_{metric}" and sample.labels.items() >= labels.items():
                    return float(sample.value)
        return None

    async def chain_of_alpha(self) -> dict[str, Any]:
        """The chain of alpha, as /status of the centre shows it; empty while its instance has no lease."""
        target = (await self.parts("centre")).get(f"target {TARGET}", {})
        return dict(target.get("chains", {}).get("alpha/NODES/0000/0", {}))

    async def status(self, name: str, *more: str) -> Done:
        return await floe("status", "-c", self.configs[name], "--json", *more)

    async def check(self, part: str, name: str) -> tuple[int, Any]:
        """The exit code of `floe check`, and its JSON document."""
        done = await floe("check", part, "-c", self.configs[name], "--json")
        return done.code, done.json()


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    except ConnectionError:
        return ""
    finally:
        connection.close()


@asynccontextmanager
async def running(s3: SharedS3, **times: Mapping[str, str]) -> AsyncIterator[Fleet]:
    """The running fleet. `times`: keys of `egress` and `ingress` in place of the world's, which are short."""
    names = (*SITES, "centre")
    async with TcpProxy(urlsplit(s3.endpoint_url).port or 0) as line:
        store = s3.store() | {"endpoint_url": f"http://127.0.0.1:{line.port}"}
        with World(store, *SITES, segment={"max_age": "1s", "max_messages": 500}) as world:
            keys = {"aws_access_key_id": s3.access_key, "aws_secret_access_key": s3.secret_key}
            bucket = boto3.client("s3", endpoint_url=s3.endpoint_url, region_name="us-east-1", **keys)
            fleet = Fleet(world, line, bucket, ports=dict(zip(names, free_ports(3), strict=True)))
            monitors = {name: {"monitor": {"listen": f"127.0.0.1:{port}"}} for name, port in fleet.ports.items()}
            for site in SITES:
                fleet.configs[site] = str(world.site_config(site, **monitors[site], **times.get("egress", {})))
            fleet.configs["centre"] = str(world.central_config(**monitors["centre"], **times.get("ingress", {})))
            for site, server in world.sites.items():
                async with client_of(server.url) as client:
                    await make_stream(client, "NODES", "nodes")
                await fleet.publish(site, 300)
            async with client_of(world.central.url) as client:
                config = {"subjects": ["fleet.>"], "allow_atomic": True, "max_msg_size": LONGEST}
                await create_stream(client, {"name": TARGET, **config})
            for site in SITES:
                fleet.services[site] = world.egress(Path(fleet.configs[site]), site)
            fleet.services["centre"] = world.ingress(Path(fleet.configs["centre"]), "centre")
            yield fleet


# Agreement


async def well(fleet: Fleet) -> tuple[dict[str, Truth], int]:
    """Wait until all is archived and carried, and every process reports that it is ready; return the truth."""

    async def found_well() -> tuple[dict[str, Truth], int] | None:
        found, carried = await fleet.truth()
        is_archived = all(each.source == each.archived for each in found.values())
        ready = [await fleet.page(name, "/readyz") for name in fleet.ports]
        is_carried = carried == sum(each.source for each in found.values())
        return (found, carried) if is_archived and is_carried and set(ready) == {"ready\n"} else None

    return await soon(found_well, every=0.3)


async def agree(fleet: Fleet) -> None:
    """Wait until all is well again; then each view must show exactly the contents of store and streams."""
    truth, carried = await well(fleet)
    differences: dict[str, Any] = {}

    async def same() -> bool:
        nonlocal differences
        found = {**await shown_by_sites(fleet, truth), **await shown_by_centre(fleet, truth, carried)}
        differences = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
        return not differences

    try:
        await soon(same, every=0.3)
    except AssertionError:
        raise AssertionError(f"by view: what it shows, and what is true: {differences}") from None


Pairs = dict[str, tuple[Any, Any]]


async def shown_by_sites(fleet: Fleet, truth: Mapping[str, Truth]) -> Pairs:
    """By view: the figures that it shows of each site, and the expected ones."""
    found: Pairs = {}
    for site, each in truth.items():
        last, labels, chain = each.archived, {"site": site, "feed": "NODES"}, f"{site}/NODES/0000/0"
        [row] = [row for row in table_rows(await fleet.page(site)) if row[0] == chain] or [[]]
        found[f"page of {site}"] = (row[1:2], row[3:6]), (["reading"], [f"{last:,}", f"{each.source:,}", "0"])
        part = (await fleet.parts(site)).get("egress NODES", {})
        reported = tuple(part.get(key) for key in ("state", "end", "source_last", "position"))
        found[f"/status of {site}"] = reported, ("reading", last, each.source, last + 1)
        names = "end_sequence", "source_sequence", "stopped", "store_reachable", "nats_reachable"
        labelled = [await fleet.metric(site, f"egress_{name}", **labels) for name in names[:3]]
        plain = [await fleet.metric(site, f"egress_{name}") for name in names[3:]]
        found[f"metrics of {site}"] = [*labelled, *plain], [last, each.source, 0, 1, 1]
        done = await fleet.status(site)
        [row] = done.json()
        keys = "state", "known_from", "archived", "source_sequence", "lag_sequences"
        seen = done.code, done.err, *(row[key] for key in keys)
        found[f"floe status of {site}"] = seen, (0, "", "reading", "monitor", last, each.source, 0)
        code, checked = await fleet.check("egress", site)
        counted = {key: checked["figures"].get(key) for key in ("chains", "stopped", "not_archived")}
        expected = {"chains": 1, "stopped": 0, "not_archived": each.source - last}
        found[f"floe check egress of {site}"] = (code, checked["state"], counted), (0, "OK", expected)
    return found


async def shown_by_centre(fleet: Fleet, truth: Mapping[str, Truth], carried: int) -> Pairs:
    found: Pairs = {}
    chains = {f"{site}/NODES/0000/0": each for site, each in truth.items()}
    rows = {row[0]: row[1:5] for row in table_rows(await fleet.page("centre")) if row and row[0] in chains}
    expected = {chain: ["idle", f"{t.archived:,}", f"{t.archived:,}", "0"] for chain, t in chains.items()}
    found["page of the centre"] = rows, expected
    part = (await fleet.parts("centre")).get(f"target {TARGET}", {})
    seen = {
        chain: tuple(each.get(key) for key in ("phase", "archived", "position"))
        for chain, each in part.get("chains", {}).items()
    }
    ends = {chain: ("idle", each.archived, each.archived + 1) for chain, each in chains.items()}
    found["/status of the centre"] = (part.get("state"), part.get("target_sequence"), seen), ("carrying", carried, ends)
    for site in truth:
        labels = {"target": TARGET, "site": site, "feed": "NODES"}
        lags = [await fleet.metric("centre", f"ingress_{n}", **labels) for n in ("lag_seconds", "source_lag_sequences")]
        found[f"metrics of {site} at the centre"] = lags, [0, 0]
    names = "target_sequence", "stopped_chains", "store_reachable", "nats_reachable"  # of the only target
    figures = [await fleet.metric("centre", f"ingress_{name}") for name in names]
    found["metrics of the centre"] = figures, [carried, 0, 1, 1]
    keys = "phase", "archived", "position", "lag_sequences", "source_sequence", "source_lag_sequences"
    done = await fleet.status("centre")
    reported = {row["site"]: tuple(row[key] for key in keys) for row in done.json()}
    ends = {site: ("idle", t.archived, t.archived + 1, 0, t.source, 0) for site, t in truth.items()}
    found["floe status of the centre"] = (done.code, done.err, reported), (0, "", ends)
    done = await fleet.status("centre", "--archive")
    reported = {row["site"]: tuple(row[key] for key in ("archived", "segments", "bytes")) for row in done.json()}
    found["floe status --archive"] = reported, {site: (t.archived, t.segments, t.bytes) for site, t in truth.items()}
    none = dict.fromkeys(("stopped", "waiting", "lag", "holes", "damaged", "not_archived"), 0)
    for part, expected in (("ingress", {"targets": 1, "chains": 2}), ("archive", {"chains": 2})):
        code, checked = await fleet.check(part, "centre")
        figures = {key: value for key, value in checked["figures"].items() if key != "silent"}
        wanted = {key: ({**none, **expected})[key] for key in figures}
        found[f"floe check {part}"] = (code, checked["state"], figures), (0, "OK", wanted)
    return found


# Faults


async def all_seen(*views: Look) -> float:
    """Wait until each view reports the fault, and return the seconds until the last one does."""
    began = time.monotonic()
    for look in views:
        try:
            await soon(look, every=0.2)
        except AssertionError as error:
            raise AssertionError(f"{look.__qualname__} does not say so: {error}") from None
    return time.monotonic() - began


async def not_ready(fleet: Fleet, name: str, part: str) -> bool:
    """True if the page, /readyz and `floe check` of a service all report that `part` is not ready."""
    code, checked = await fleet.check("ingress" if name == "centre" else "egress", name)
    page, ready = unescape(await fleet.page(name)), await fleet.page(name, "/readyz")
    is_listed = f"not ready: {part}: " in checked["text"]
    return code >= 1 and is_listed and "not ready" in page and f"<li>{part}: " in page and f"{part}: " in ready


async def dead_site(fleet: Fleet, *, is_long: bool) -> float:
    fleet.services["alpha"].kill()

    async def checked() -> bool:
        code, found = await fleet.check("egress", "alpha")
        return code == 3 and f"monitor at 127.0.0.1:{fleet.ports['alpha']}" in found["text"]

    async def shown() -> bool:
        done = await fleet.status("alpha")
        [row] = done.json()
        return done.code == 3 and row["state"] == "not held" and "no process answers" in done.err

    async def archive_checked() -> bool:
        code, found = await fleet.check("archive", "centre")
        return code == 1 and "alpha/NODES/0000/0: no heartbeat for " in found["text"]

    async def overdue() -> bool:
        [row] = [row for row in (await fleet.status("centre")).json() if row["site"] == "alpha"]
        chain = await fleet.chain_of_alpha()
        alive = await fleet.metric("centre", "ingress_site_alive_timestamp_seconds", site="alpha")
        is_old = alive is not None and time.time() - alive > 30
        states = row["egress"], chain.get("source", {}).get("state")  # none before its first heartbeat was read
        is_shown = "state overdue" in await fleet.page("centre")
        return states == ("overdue", "overdue") and not row["alarm"] and is_shown and is_old

    assert await fleet.page("alpha") == ""
    seconds = await all_seen(checked, shown, *((archive_checked, overdue) if is_long else ()))
    fleet.services["alpha"].start()
    return seconds


async def dead_store(fleet: Fleet, *, is_silent: bool = False) -> float:
    if is_silent:
        fleet.line.blackhole()
    else:
        await fleet.line.refuse()
        await fleet.publish("alpha", 5)

    async def at_the_site() -> bool:
        return await not_ready(fleet, "alpha", "objects") and not await fleet.metric("alpha", "egress_store_reachable")

    async def at_the_centre() -> bool:
        return await not_ready(fleet, "centre", "store") and not await fleet.metric("centre", "ingress_store_reachable")

    async def site_shown() -> bool:
        done = await fleet.status("alpha")
        is_named = "the store does not answer: " in done.err and fleet.world.store["endpoint_url"] in done.err
        return (done.code, done.json()[0]["known_from"]) == (75, "monitor") and is_named

    async def centre_shown() -> bool:
        done, store = await fleet.status("centre"), fleet.world.store["endpoint_url"]
        return (done.code, done.out, done.err.count("\n")) == (75, "", 1) and store in done.err

    async def archive_checked() -> bool:
        code, found = await fleet.check("archive", "centre")
        return code == 3 and fleet.world.store["endpoint_url"] in found["text"]

    seconds = await all_seen(at_the_site, at_the_centre)
    await all_seen(site_shown, centre_shown, archive_checked)  # each waits for a silent store for ten seconds
    fleet.line.heal()
    await fleet.line.listen()
    return seconds


async def dead_nats(fleet: Fleet, name: str) -> float:
    """Kill the NATS server of the site, or of the target."""
    is_site = name == "alpha"
    server = fleet.world.sites[name] if is_site else fleet.world.central
    server.kill()

    async def reported() -> bool:
        role, part = ("egress", "nats data") if is_site else ("ingress", f"target {TARGET}")
        return await not_ready(fleet, name, part) and await fleet.metric(name, f"{role}_nats_reachable") == 0

    async def shown() -> bool:
        done = await fleet.status(name)
        if is_site:
            known_from = {row["known_from"] for row in done.json()}
            return done.code in (3, 75) and "NATS does not answer: " in done.err and known_from == {"monitor"}
        views = {row["view"] for row in done.json()}
        return (done.code, views) == (75, {"archive"}) and "only the archive is shown" in done.err

    seconds = await all_seen(reported, shown)
    server.start()
    return seconds


async def stopped_chain(fleet: Fleet) -> float:
    """Stop the chain by a message that the target rejects until its configuration is changed."""
    await fleet.publish("alpha", 1, size=LONGEST + 1000)

    async def reported() -> bool:
        chain = await fleet.chain_of_alpha()
        if not (code := chain.get("code")):
            return False
        page, (status, found) = unescape(await fleet.page("centre")), await fleet.check("ingress", "centre")
        stopped = await fleet.metric("centre", "ingress_stopped_chains", target=TARGET)
        is_checked = status == 2 and f"stopped: alpha/NODES/0000/0 into target {TARGET}: {code}" in found["text"]
        return is_checked and code in page and chain["hint"] in page and stopped == 1

    async def hint() -> str:
        return str((await fleet.chain_of_alpha()).get("hint", ""))

    seconds = await all_seen(reported)
    resume = next(each for each in commands_of(await soon(hint)) if each.startswith("floe chain resume"))
    async with client_of(fleet.world.central.url) as client:
        config = {"name": TARGET, "subjects": ["fleet.>"], "allow_atomic": True, "max_msg_size": 4 * LONGEST}
        await client.api(f"STREAM.UPDATE.{TARGET}", config)
    assert (await floe(*shlex.split(resume)[1:])).code == 0
    return seconds


async def test_all_views_agree_with_store_and_streams_and_report_faults(s3: SharedS3) -> None:
    async with running(s3) as fleet:
        await agree(fleet)
        await dead_site(fleet, is_long=False)
        await well(fleet)
        await dead_store(fleet)
        await well(fleet)
        await stopped_chain(fleet)
        await agree(fleet)


DEFAULTS = {"egress": {"lease_ttl": "15s"}, "ingress": {"lease_ttl": "15s", "poll_interval": "10s"}}


@pytest.mark.timing
async def test_each_trouble_is_shown_within_a_minute_by_every_view_that_can(s3: SharedS3) -> None:
    """The services run with the default times."""
    async with running(s3, **DEFAULTS) as fleet:
        await agree(fleet)
        troubles = {
            "site": lambda: dead_site(fleet, is_long=True),
            "dead store": lambda: dead_store(fleet),
            "silent store": lambda: dead_store(fleet, is_silent=True),
            "nats": lambda: dead_nats(fleet, "alpha"),
            "target": lambda: dead_nats(fleet, "centre"),
            "stop": lambda: stopped_chain(fleet),
        }
        for name, trouble in troubles.items():
            seconds = await trouble()
            assert seconds <= MINUTE, f"{name}: said after {seconds:.0f} s"
            await agree(fleet)


WITHOUT_ANSWER = dict.fromkeys(("status", "segments ls", "segments info us-east/NODES"), 75)
VIEWS = WITHOUT_ANSWER | {"check archive": 3, "check compaction": 3, "doctor": 1}


async def test_a_view_ends_where_the_store_never_answers_and_names_it(
    s3: SharedS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 * opening.VIEW_TIMEOUT_S <= 10, "it is asked twice"
    for module in ("common.open", "common.doctor"):
        monkeypatch.setattr(f"{module}.VIEW_TIMEOUT_S", 0.3)
    async with silent_store(s3, tmp_path, nats={"connect_timeout": "300ms"}) as (config, line):
        for command, code in VIEWS.items():
            done = await floe(*command.split(), "-c", config)
            assert done.code == code, (command, done)
            why = f"store http://127.0.0.1:{line.port}: no answer within 0.3 s, asked 2 times"
            assert why in done.out + done.err, (command, done)
