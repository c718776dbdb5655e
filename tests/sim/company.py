"""The other chains of the target: small streams of several sites, and a site that dies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.archive.documents import AcceptedGap, ChainStore
from common.archive.keys import Layout, SegmentName
from common.chain import Chain
from ingress.discovery import discovery
from tests.sim import api
from tests.sim.actors import Member, Publishers
from tests.sim.auditor import SourceTap
from tests.sim.nats import SimNats
from tests.sim.plan import CHANGING, Plan
from tests.sim.sources import Recreations
from tests.sim.store import SimObjects
from tests.sim.streams import LIMITS, WORK_QUEUE

HOME, PORT = "eu", 4222
LAYOUT = Layout("data")  # the prefix that a store has unless its settings name one
SITES = (HOME, "us", "ap", "sa")  # each with a server of its own; two of them, or all if there are many chains
MANY = 100  # chains
PARTITIONS = (1, 2, 5, 10)  # of a stream
BURSTS, SIZES = (1, 1, 2, 3), (1, 1, 2)  # of a chain, and messages of a burst
RECREATED = 2  # streams, if sources change
#: How a site ends: at any time, or after segments for which it could write neither tail nor heartbeat; a listing shows
#: those.
BY_TAIL, BY_LISTING = "tail", "listing"
DIES, LATEST, ENOUGH = (12.0, 30.0), 32.0, 5  # seconds; later while it has fewer segments
#: Seconds from then on until it dies in these ways, and from its death until an operator accepts its gap.
DYING, DECIDES = {BY_TAIL: (2.0, 9.0), BY_LISTING: (10.0, 15.0)}, (5.0, 25.0)
LOSES = 0.1  # chance that a segment of the dying site vanishes; of the first one that does
# Seconds between two listings of a chain and of all chains, how many are of one level, seconds between two records of
# the tails that a target knows: as in the product, with other chains, and if listings are to find what a site left.
USUAL = (discovery.SEARCH_INTERVAL_S, 600.0, discovery.FULL_SEARCH_EVERY, 60.0)
OFTEN = (USUAL[0], USUAL[1], USUAL[2], 4.0)
LISTED = (30.0, 60.0, 3, 4.0)


@dataclass(frozen=True)
class SmallFeed:
    """A stream of a site, and the number of its partitions."""

    site: str
    name: str
    parts: int
    retention: str

    def settings(self, segment: Mapping[str, Any]) -> dict[str, Any]:
        cut = {"partitions": [f"{self.name}.{n}.>" for n in range(self.parts)]} if self.parts > 1 else {}
        return {"stream": self.name, "segment": segment, **cut}


class Company:
    """The chains of a world beside those of its first stream, `plan.cut.chains` in all. Without that option: none.

    `dying`: the site that dies; `rate`: most listings a second that nothing but the schedule asks for.
    """

    def __init__(self, plan: Plan, home: SimNats, objects: SimObjects, publishers: Publishers) -> None:
        self.world, self._rng, self._home = home.world, home.world.chance("company"), home
        self._objects, self._publishers, self._documents = objects, publishers, ChainStore(objects, LAYOUT)
        self.feeds, self.taps, self.changes = list[SmallFeed](), dict[SmallFeed, SourceTap](), list[Recreations]()
        self._under_way = 0  # bursts that are not published yet
        self._gap: SegmentName | None = None
        rng, count, left = self._rng, plan.cut.chains, plan.cut.chains - plan.parts
        sites = SITES[: len(SITES) if count >= MANY else 2 if count else 1]
        self.servers = {s: SimNats(self.world, PORT + n) if n else home for n, s in enumerate(sites)}
        kinds = [LIMITS] if plan.hardship == "bucket_set_back" else [LIMITS, LIMITS, WORK_QUEUE]
        while left > 0:
            site, parts = rng.choice(sites), min(left, rng.choice(PARTITIONS))
            name = f"S{sum(each.site == site for each in self.feeds)}"
            self.feeds.append(SmallFeed(site, name, parts, rng.choice(kinds)))
            left -= parts
        self.ends = rng.choice(["", BY_TAIL, BY_LISTING]) if count else ""
        self.dying = rng.choice(sites[1:]) if self.ends else ""
        names = "SEARCH_INTERVAL_S", "CHAIN_LISTING_INTERVAL_S", "FULL_SEARCH_EVERY", "TAILS_RECORD_INTERVAL_S"
        values = LISTED if self.ends == BY_LISTING else OFTEN if count else USUAL
        vars(discovery).update(zip(names, values, strict=True))
        self.rate = max(1, count // 30) if self.ends == BY_LISTING else 5

    def begin(self, seconds: float, allows: Callable[[str], bool], plan: Plan) -> None:
        """Create the streams, and publish to each chain in some bursts within `seconds`."""
        for feed in self.feeds:
            nats, subjects = self.servers[feed.site], [f"{feed.name}.>"]
            self.taps[feed] = nats.taps[feed.name] = SourceTap(self._publishers.log)
            config = {"name": feed.name, "subjects": subjects, "retention": feed.retention}
            api.answer(nats, ["STREAM", "CREATE", feed.name], config)
            for part in range(feed.parts):
                for _ in range(self._rng.choice(BURSTS)):
                    self._under_way += 1
                    self.world.at(self._rng.uniform(1, seconds), partial(self._publish, feed, part))
        at_home = [feed for feed in self.feeds if feed.site == HOME][:RECREATED] if plan.kind == CHANGING else []
        self.changes = [Recreations(self._home, self.taps[f], f.name, allows, is_quiet=False) for f in at_home]
        for change in self.changes:
            change.begin()

    def _publish(self, feed: SmallFeed, part: int) -> None:
        nats = self.servers[feed.site]
        if not nats.is_up or feed.name not in nats.streams:
            self.world.at(0.5, lambda: self._publish(feed, part))
            return
        self._under_way -= 1
        for _ in range(self._rng.choice(SIZES)):
            self._publishers.publish(nats, feed.name, part, str(Chain(feed.site, feed.name, 0, part)))

    def of_site(self, site: str, segment: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the settings of the feeds of a site."""
        return [feed.settings(segment) for feed in self.feeds if feed.site == site]

    def sources(self, prefix: str) -> list[dict[str, Any]]:
        """Return the settings of the sources of the target."""
        return [{"site": each.site, "feed": each.name, "subject_prefix": prefix} for each in self.feeds]

    @property
    def is_over(self) -> bool:
        is_dead = not self.dying or self._member.is_gone
        return is_dead and not self._under_way and all(each.is_over for each in self.changes)

    # The site that dies

    def doom(self, members: Mapping[str, Member], kill_ingress: Callable[[], None]) -> None:
        """Plan the end of the site that dies: its process is never started again. Ingress may be killed just before."""
        if self.dying:
            self._member, self._kill_ingress = members[f"egress-{self.dying}"], kill_ingress
            self.world.at(self._rng.uniform(*DIES), self._become_due)

    def _become_due(self) -> None:
        if len(self._segments()) < ENOUGH and self.world.now < LATEST:
            self.world.at(2.0, self._become_due)
            return
        if self.ends == BY_LISTING:
            self._objects.closed = LAYOUT.tails_prefix(self.dying), LAYOUT.heartbeats_prefix(self.dying)
        else:
            self._kill_ingress()
        self.world.at(self._rng.uniform(*DYING[self.ends]), self._die)

    def _die(self) -> None:
        self._member.is_gone = True
        self.world.note(f"{self.dying} dies")
        self.world.at(self._rng.uniform(*DECIDES), self._accept)
        if self._member.process is not None:
            self._member.process.kill()

    def strike(self, point: str) -> None:
        """Lose the newest segment of the dying site while it passes the failpoint: nobody has read it yet."""
        process = self.world.current
        is_dying = process is not None and process.alive and process.name == f"egress-{self.dying}"
        if not is_dying or point != "egress.after_put" or self._gap is not None or self._rng.random() >= LOSES:
            return
        newest = max(self._segments(), key=lambda each: int(self._objects.kept[each][1].etag, 16), default="")
        if newest:
            self._gap = LAYOUT.parse_segment(newest)
            self.world.note(f"{newest} vanishes")
            self._objects.remove(newest)

    def _segments(self) -> list[str]:
        return [key for key in self._objects.keys if f"/site={self.dying}/" in key and key.endswith(".parquet")]

    def _accept(self) -> None:
        """Accept the gap of the lost segment, as an operator does once nobody can archive it again."""
        if self._gap is not None:
            gap = AcceptedGap(self._gap.coverage, "lost", "operator")
            self.world.note(f"gap {self._gap.coverage} of {self._gap.chain} is accepted")
            self._documents.accept_gap(self._gap.chain, gap)

    def settle(self) -> None:
        """Note the messages that were lost with the site: those that nothing in the bucket names."""
        names = [name for key in self._segments() if (name := LAYOUT.parse_segment(key)) is not None]
        ends = {name.chain: name.coverage.last for name in sorted(names, key=lambda each: each.coverage.last)}
        if self.ends == BY_TAIL:
            ends = {chain: self._documents.read_tail(chain) or 0 for chain in ends}
        for each in self._publishers.log.all if self.dying else ():
            chain = Chain.parse(each.chain) if each.chain.startswith(f"{self.dying}/") else None
            is_lost = self._gap is not None and self._gap.chain == chain and each.sequence in self._gap.coverage
            if chain is not None and (is_lost or each.sequence > ends.get(chain, 0)):
                each.gone = "dead"
