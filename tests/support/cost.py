"""Requests, bytes and money of a site: the formula of docs/guides/retention-and-cost.md, and its tables.

`python -m tests.support.cost docs/guides/retention-and-cost.md` writes the tables;
`tests/integration/test_cost.py` checks the formula against the requests that a server gets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from egress.deps import Intervals
from ingress.discovery import discovery
from ingress.report import POSITIONS_INTERVAL_S
from ingress.target import IngressTuning

DAY, MONTH = 86_400.0, 30 * 86_400.0  # seconds
BEGIN, END = "<!-- cost: begin -->", "<!-- cost: end -->"


@dataclass(frozen=True)
class Requests:
    """The number of requests of each kind that a server gets."""

    put: float = 0
    list: float = 0
    get: float = 0
    head: float = 0
    delete: float = 0

    def __add__(self, other: Requests) -> Requests:
        return Requests(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __rmul__(self, times: float) -> Requests:
        return Requests(*(times * each for each in astuple(self)))

    @classmethod
    def of(cls, counted: Mapping[str, int]) -> Requests:
        """Convert counts by kind; other kinds are an error."""
        return cls(**counted)


ABSENT = Requests(head=1, get=1)  # a HEAD of a missing object: its answer cannot name the missing thing, so a GET asks

# Egress, of one chain
EGRESS_SEGMENT = Requests(list=1, put=2, head=2) + ABSENT  # covered yet? next incarnation? put, read back, tip; tail
EGRESS_CHECK = ABSENT  # is there a next incarnation
NEWEST_LOOK = Requests(head=1)  # is the newest segment still there, if nothing was put meanwhile
SNAPSHOT = Requests(put=1, head=1)  # of a sampled feed, at most one a segment
ALIVE = Requests(put=1)  # of each process
CAPTURE = Requests(put=1)  # of a stream, if its consumers moved

# Ingress
INGRESS_SEGMENT = Requests(get=2, list=1)  # its tail, the segment; continuing segments
POLL = Requests(list=1)  # of up to 1,000 chains of all sites
PARKED_LOOK = ABSENT  # of each target: is a parked message to be tried again
SITES_LOOK = Requests(list=1)
SIGN_OF_LIFE = Requests(get=1)  # of each process of egress, each minute
LOOK_UP = Requests(list=1)  # of each feed; of all feeds, if there are many
SEARCH = OTHER_LEVELS = Requests(list=1)  # of each chain, though nothing shows a change
POSITIONS = Requests(put=1)  # of each target, each minute in which it moved; its tails cost the same

# Compaction
RUN = Requests(put=3, head=3, list=3)
RUN_CHAIN = Requests(list=4)
RUN_TOMBSTONE = Requests(get=2)  # that exists, for readers of older listings
RUN_BURIED = Requests(list=1)  # of a chain that has one
INPUT = Requests(get=3, delete=1)  # merged and proved, proved once more at its deletion
OUTPUT = Requests(put=2, get=6, head=2)  # read back, proved; its tombstone; read in the two runs in which inputs go


def egress(segments: float, checks: float, *, snapshots: float = 0, alive: float = 0, captures: float = 0) -> Requests:
    looks = checks * EGRESS_CHECK + alive * ALIVE + captures * CAPTURE
    return segments * EGRESS_SEGMENT + snapshots * SNAPSHOT + looks


INGRESS_LOOKS = {"sites": SITES_LOOK, "signs": SIGN_OF_LIFE, "lookups": LOOK_UP, "positions": POSITIONS}
INGRESS_LOOKS |= {"polls": POLL, "parked": PARKED_LOOK, "searches": SEARCH, "full": OTHER_LEVELS}


def ingress(segments: float, **looks: float) -> Requests:
    return sum((count * INGRESS_LOOKS[name] for name, count in looks.items()), segments * INGRESS_SEGMENT)


def compaction(
    runs: float, chains: float, inputs: float, outputs: float, existing: float = 0, buried: float = 0
) -> Requests:
    """Return a run's requests. `existing`: tombstones met, `buried`: chains with one, both added up over the runs."""
    listed = runs * RUN + runs * chains * RUN_CHAIN + buried * RUN_BURIED + existing * RUN_TOMBSTONE
    return listed + inputs * INPUT + outputs * OUTPUT


@dataclass(frozen=True)
class Prices:
    """US dollars. `write`: 1,000 PUT or LIST; `read`: 1,000 GET or HEAD; `storage`: a GB for a month; `transfer`: a GB
    out of the region. Deleting and sending in are free.
    """

    write: float = 0.005
    read: float = 0.0004
    storage: float = 0.023
    transfer: float = 0.09

    def of(self, requests: Requests) -> float:
        writes, reads = requests.put + requests.list, requests.get + requests.head
        return writes / 1000 * self.write + reads / 1000 * self.read


@dataclass(frozen=True)
class CostedSite:
    """One site, and its share of the centre. `max_age`, `poll`: seconds; `every`: between two runs of compaction, 0:
    none; `levels`: pairs of them; `grace`: how long merged inputs stay; `sharing`: sites that one target carries.
    """

    feeds: int = 1
    max_age: float = 300.0
    poll: float = 10.0
    every: float = 3600.0
    levels: int = 1
    grace: float = DAY
    sampled: bool = False
    sharing: int = 1

    @property
    def segments(self) -> float:
        """Return segments a month: each feed closes one each `max_age`, with messages or without."""
        return self.feeds * MONTH / self.max_age

    def egress(self) -> Requests:
        pace = Intervals()
        checks, alive = self.feeds * MONTH / pace.check, MONTH / pace.alive
        captures = self.feeds * MONTH / pace.consumers_capture
        return egress(self.segments, checks, snapshots=self.segments * self.sampled, alive=alive, captures=captures)

    def ingress(self) -> Requests:
        share, searches = MONTH / self.sharing, self.feeds * MONTH / discovery.SEARCH_INTERVAL_S
        sites, signs = share / discovery.HEARTBEAT_READ_INTERVAL_S, MONTH / discovery.HEARTBEAT_READ_INTERVAL_S
        looks = {"polls": share / self.poll, "parked": share / IngressTuning().parked_check_interval_s}
        looks |= {"sites": sites, "signs": signs, "lookups": self.feeds * MONTH / discovery.CHAIN_LISTING_INTERVAL_S}
        looks |= {"searches": searches, "full": searches / discovery.FULL_SEARCH_EVERY}
        positions = share / POSITIONS_INTERVAL_S + min(self.segments, share / discovery.TAILS_RECORD_INTERVAL_S)
        return ingress(self.segments, positions=positions, **looks)

    def compaction(self) -> Requests:
        """Return a month's requests. Each pair of levels merges daily: too few segments for earlier (`max_wait`)."""
        if not self.every:
            return Requests()
        runs, outputs = MONTH / self.every, self.levels * self.feeds * MONTH / DAY
        inputs = self.segments + (self.levels - 1) * self.feeds * MONTH / DAY
        existing = self.levels * self.feeds * runs * self.grace / DAY
        return compaction(runs, self.feeds, inputs, outputs, existing, runs * self.feeds)


WORDS = {60.0: "1m", 300.0: "5m", 1.0: "1s", 10.0: "10s", 30.0: "30s", 0.0: "none", 3600.0: "1h"}
ONE = CostedSite()
SETTINGS = (
    ("one feed, the defaults", ONE),
    ("segments of a minute", CostedSite(max_age=60.0)),
    ("poll each second", CostedSite(poll=1.0)),
    ("poll each 30 s", CostedSite(poll=30.0)),
    ("bucket events", CostedSite(poll=60.0)),
    ("20 sites at one target", CostedSite(sharing=20)),
    ("no compaction", CostedSite(every=0.0)),
    ("two levels", CostedSite(levels=2)),
    ("sampled", CostedSite(sampled=True)),
    ("four feeds", CostedSite(feeds=4)),
    ("four feeds, a minute, poll each second", CostedSite(feeds=4, max_age=60.0, poll=1.0)),
    ("four feeds, 20 sites, bucket events", CostedSite(feeds=4, poll=60.0, sharing=20)),
)


def tables() -> str:
    return "\n".join([*_terms(), "", *_settings(), "", *_bytes()])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


TERMS = (
    ("egress", "segment", EGRESS_SEGMENT),
    ("", f"chain, each {Intervals().check:.0f} s", EGRESS_CHECK),
    ("", f"chain, each {Intervals().newest:.0f} s in which nothing was put", NEWEST_LOOK),
    ("", "segment of a sampled feed, at most", SNAPSHOT),
    ("", f"process, each {Intervals().alive:.0f} s", ALIVE),
    ("", f"feed, each {Intervals().consumers_capture:.0f} s in which consumers of its stream moved", CAPTURE),
    ("ingress", "segment", INGRESS_SEGMENT),
    ("", "`poll_interval`, for each 1,000 chains", POLL),
    ("", f"target, each {IngressTuning().parked_check_interval_s:.0f} s", PARKED_LOOK),
    ("", f"each {discovery.HEARTBEAT_READ_INTERVAL_S:.0f} s", SITES_LOOK),
    ("", f"process of egress, each {discovery.HEARTBEAT_READ_INTERVAL_S:.0f} s", SIGN_OF_LIFE),
    ("", f"feed, each {discovery.CHAIN_LISTING_INTERVAL_S:.0f} s; of many feeds, 3,000 at a time", LOOK_UP),
    ("", f"chain, each {discovery.SEARCH_INTERVAL_S / 3600:.0f} h", SEARCH),
    ("", f"chain, each {discovery.SEARCH_INTERVAL_S * discovery.FULL_SEARCH_EVERY / DAY:.0f} d", OTHER_LEVELS),
    ("", f"target, each {POSITIONS_INTERVAL_S:.0f} s in which it moved", 2 * POSITIONS),
    ("compaction", "run", RUN),
    ("", "run and chain; a LIST more for each further 1,000 segments", RUN_CHAIN),
    ("", "run and chain with a tombstone", RUN_BURIED),
    ("", "run and existing tombstone", RUN_TOMBSTONE),
    ("", "segment that is merged", INPUT),
    ("", "segment that is made", OUTPUT),
)


def _terms() -> Iterator[str]:
    names = [field.name for field in fields(Requests)]
    yield _row(["part", "for each", *(name.upper() for name in names)])
    yield _row(["---", "---", *("--:" for _ in names)])
    for part, what, requests in TERMS:
        yield _row([part, what, *(f"{count:g}" if count else "" for count in astuple(requests))])


def _settings() -> Iterator[str]:
    prices = Prices()
    parts = ("egress", "ingress", "compaction")
    yield _row(
        ["site", "feeds", "`max_age`", "poll", *(f"{part}: PUT+LIST / GET+HEAD" for part in parts), "US$ a month"]
    )
    yield _row(["---", "--:", "--:", "--:", *("--:" for _ in parts), "--:"])
    for name, site in SETTINGS:
        each = [getattr(site, part)() for part in parts]
        counts = [f"{r.put + r.list:,.0f} / {r.get + r.head:,.0f}" for r in each]
        money = sum(map(prices.of, each))
        yield _row([name, str(site.feeds), WORDS[site.max_age], WORDS[site.poll], *counts, f"{money:.2f}"])


def _bytes() -> Iterator[str]:
    prices = Prices()
    stored = ["stored a month", "up", "down to the centre", "read by compaction"]
    yield _row([*stored, "kept a year, US$ a month", "down, US$ a month"])
    yield _row(["--:"] * 6)
    for size in (1, 10, 100, 1000):
        yield _row([
            f"{size} GB", f"{size} GB", f"{size} GB", f"{4 * size} GB",
            f"{12 * size * prices.storage:.2f}", f"{size * prices.transfer:.2f}",
        ])  # fmt: skip


def with_tables(page: str) -> str:
    """Return `page` with the tables between its two marks brought up to date."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        Path(path).write_text(with_tables(Path(path).read_text()))
