"""`floe fleet`: the senders that the samplers of all sites know."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from msgspec import structs

from common.archive.documents import ChainDocument
from common.chain import Chain
from common.clock import SystemClock
from common.nats.client import FloeClient
from egress.advisories.advisory import Advisory, AdvisoryEvent, build_document
from egress.sampling import fleet as of_fleet
from egress.sampling.fleet import fleet
from egress.sampling.sampler import Sampler
from infra.local.process import free_port
from tests.support.basics import PATIENCE
from tests.support.sampling import CHAIN, FEED, SECOND, SITE, START_NS, SampledArchive, columns_of, fold, sent


class Site(SampledArchive):
    """A store with a sampled chain, and the configuration of its site."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.config = folder / "site.yaml"
        self.configure({"stream": FEED, "inspect_subject_token": 2, "inspect_duration": "100s"})
        self.begin_chain(CHAIN)

    def begin_chain(self, chain: Chain) -> None:
        self.chains.create_chain(chain, ChainDocument((), 1, 1))

    def configure(self, *feeds: dict[str, Any]) -> None:
        document = {
            "site": SITE,
            "log": {"level": "error"},
            "spool_dir": str(self.folder / "spool"),
            "nats": {"url": "nats://127.0.0.1:1"},
            "store": {"url": f"file://{self.folder}/store", "prefix": "data"},
            "egress": {"feeds": list(feeds)},
        }
        self.config.write_text(yaml.safe_dump(document))
        self.config.chmod(0o600)

    def known(self, *nodes: tuple[str, float], position: int = 11, chain: Chain = CHAIN) -> Sampler:
        """Save a sampler that saw each node so many seconds after the start."""
        sampler = Sampler(self.sampling)
        fold(sampler, [sent(n, node, seconds, n) for n, (node, seconds) in enumerate(nodes, 1)])
        self.save(sampler, position, chain=chain)
        return sampler

    def command(self, *options: str, code: int = 0) -> Result:
        found = CliRunner().invoke(fleet, ["-c", str(self.config), *options])
        assert found.exit_code == code, found.output
        return found

    def fleet(self, *options: str) -> list[tuple[str, ...]]:
        """Return site, sender, time and state of each."""
        found = self.command("--json", *options)
        self.said = found.stderr
        return [tuple(json.loads(line).values()) for line in found.stdout.splitlines()]

    def values(self, *options: str, code: int = 0) -> list[str]:
        return self.command("--values", *options, code=code).stdout.splitlines()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_value_is_looked_for_by_a_regular_expression(site: Site) -> None:
    site.known(("web-1", 0), ("web-12", 0), ("db-1", 0))
    assert (site.values("--value", "web"), site.values("--value", "1$")) == (["web-1", "web-12"], ["db-1", "web-1"])
    assert site.values("--value", "^nothing$") == []
    for pattern in ("(", "*", "(?P<x>a)(?P<x>b)", "a{99999999999}"):
        assert "expected a regular expression" in site.command("--value", pattern, code=2).stderr


def test_messages_that_were_not_folded_in_silence_nobody(site: Site) -> None:
    sampler = site.known(("a", 0), ("b", 10))
    site.save(sampler, 12, newest_ns=sampler.watermark_ns + 1000 * SECOND)
    assert (site.values(), site.values("--silent")) == (["a", "b"], [])


def test_the_time_since_a_value_was_seen_counts_from_now(site: Site) -> None:
    sampler, now = Sampler(site.sampling), round(SystemClock().now() * SECOND)
    times = {"early": now - 150 * SECOND, "late": now - 60 * SECOND}
    rows = [replace(sent(n, node, 0), timestamp_ns=time) for n, (node, time) in enumerate(times.items(), 1)]
    sampler.fold(columns_of(rows))
    site.save(sampler, 12)
    assert [site.values("--since", since) for since in ("2h", "100s", "30s")] == [["early", "late"], ["late"], []]


def test_a_value_cannot_forge_a_line(site: Site) -> None:
    site.known(("x\nforged\x1b[2J", 0))
    assert (site.values(), len(site.command().stdout.splitlines())) == (["x\\nforged\\x1b[2J"], 1)
    assert site.fleet()[0][1] == "x\nforged\x1b[2J"


def test_the_newest_readable_snapshot_counts(site: Site) -> None:
    site.known(("old", 0), position=5)
    site.known(("new", 0), position=500)
    assert site.values() == ["new"]
    newest = site.snapshots().list()[0]
    (site.folder / "store" / newest.key).write_bytes(b"x" * newest.size)
    found = site.command("--values")
    assert found.stdout == "old\n"
    assert "error[E-SNAPSHOT]" in found.stderr


def test_only_damaged_snapshots_are_an_error_and_other_chains_are_shown(site: Site) -> None:
    other = Chain(SITE, "OTHER")
    site.begin_chain(other)
    site.known(("damaged", 0))
    site.known(("good", 0), chain=other)
    [ref] = site.snapshots().list()
    (site.folder / "store" / ref.key).write_bytes(b"x")
    found = site.command("--values", code=3)
    assert found.stdout == "good\n"
    assert "error[E-SNAPSHOT]" in found.stderr
    assert site.values(f"{SITE}/OTHER") == site.values(f"{SITE}/OTHER/0000/0") == ["good"]
    assert "OTHER" in site.command(f"{SITE}/ELSE", code=2).stderr


def test_the_newest_incarnation_is_shown_with_all_its_partitions(site: Site) -> None:
    for partition in (0, 1):
        site.begin_chain(Chain(SITE, FEED, 1, partition))
    site.known(("before", 0))
    site.known(("one", 0), chain=Chain(SITE, FEED, 1, 1))
    assert site.values() == ["one"]


def test_an_unreachable_store_is_for_later(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    text = site.config.read_text()
    away = f"{{url: 's3://bucket', endpoint_url: 'http://127.0.0.1:{free_port()}', "
    away += "access_key_id: key, secret_access_key: secret}"
    site.config.write_text(yaml.safe_dump(yaml.safe_load(text) | {"store": yaml.safe_load(away)}))
    assert "error[E-" in site.command(code=75).stderr
    site.config.write_text(text + "nonsense: 1\n")
    assert "nonsense" in site.command(code=78).stderr


def test_the_fleet_has_each_sender_of_each_site_once_where_it_was_seen_last(site: Site) -> None:
    assert (site.fleet(), "no feed is sampled" in site.said) == ([], True)
    site.known(("expired", -100), ("b", 0), ("a", 30))
    other, elsewhere = Chain(SITE, "OTHER"), Chain("a-site", FEED)
    for chain in (other, elsewhere, Chain(SITE, FEED, 1)):
        site.begin_chain(chain)
    site.known(("a", 10), ("b", 40), chain=other)
    sampler = site.known(("old", 0), ("c\x1b", 60), chain=elsewhere)
    sampler.advance(sampler.watermark_ns)
    site.save(sampler, 12, chain=elsewhere)
    at = "2023-11-14T22:13:20Z"
    assert site.fleet() == [  # of the first feed the newest incarnation has no snapshot yet
        ("a-site", "c\x1b", "2023-11-14T22:14:20Z", "active"), ("a-site", "old", at, "silent"),
        (SITE, "a", "2023-11-14T22:13:30Z", "active"), (SITE, "b", "2023-11-14T22:14:00Z", "active"),
    ]  # fmt: skip
    assert site.fleet("--silent") == [("a-site", "old", at, "silent")]
    site.known(("expired", -100), ("a", 30), chain=Chain(SITE, FEED, 1))
    assert site.fleet(SITE, "--since", "2023-11-14T22:12:00Z") == [
        (SITE, "a", "2023-11-14T22:13:50Z", "active"), (SITE, "b", "2023-11-14T22:14:00Z", "active"),
    ]  # fmt: skip
    assert (SITE, "expired", "2023-11-14T22:11:40Z", "expired") in site.fleet(SITE)
    assert f"{SITE}: 3 senders: 2 active, 0 silent, 1 expired; as of" in site.said
    shown = CliRunner().invoke(fleet, ["-c", str(site.config), "a-site"]).stdout
    assert "a-site  2023-11-14T22:14:20Z  active   c\\x1b" in shown


async def test_advisories_continue_the_snapshots(site: Site, client: FloeClient, nats_url: str) -> None:
    site.known(("a", 0), ("b", 5))
    text = yaml.safe_load(site.config.read_text())
    site.config.write_text(yaml.safe_dump(text | {"nats": {"url": nats_url}}))
    await client.api("STREAM.CREATE.ADVICE", {"name": "ADVICE", "subjects": ["advice"], "storage": "memory"})
    events = (("a", AdvisoryEvent.TIMEOUT, 0, 50), ("new", AdvisoryEvent.NEW, 70, 70), ("new", "expire", 70, 170))
    for value, event, seen, at in (*events, ("b", AdvisoryEvent.TIMEOUT, 1, 2)):  # the last one before the snapshot
        advisory = Advisory(AdvisoryEvent(event), value, START_NS + seen * SECOND, START_NS + at * SECOND)
        await client.request_raw(b"advice", build_document(CHAIN, "sender", advisory).to_json(), timeout=PATIENCE)
    foreign = structs.replace(build_document(CHAIN, "sender", advisory), replicator="x\n")
    for document in (foreign, structs.replace(foreign, value="never", seen=10**18)):
        await client.request_raw(b"advice", document.to_json(), timeout=PATIENCE)
    assert {row[1]: row[3] for row in await asyncio.to_thread(site.fleet, SITE, "--advisories", "ADVICE")} == {
        "a": "silent", "b": "active", "new": "expired",
    }  # fmt: skip
    assert len(await asyncio.to_thread(site.fleet, "--advisories", "ADVICE")) == 4


def test_a_large_fleet_is_merged_as_a_small_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_fleet, "_LINES_PER_WRITE", 100)
    senders = [f"node-{number:05d}" for number in range(9000)]  # more than one list of the table
    site.known(*((sender, 0.001 * number) for number, sender in enumerate(senders)))
    assert [sender for _, sender, *_ in site.fleet()] == senders
