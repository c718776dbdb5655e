"""One seed: its world, its run, and the findings of the auditor."""

import gc
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import tasks
from common.settings.root import Settings
from compaction.retention import RetentionRule
from tests.sim import actors, doors
from tests.sim.accounts import PATTERN, Account
from tests.sim.auditor import Broken, PublisherLog, SourceTap, TargetAuditor
from tests.sim.company import HOME as SITE
from tests.sim.company import MANY, Company
from tests.sim.hardships import HOSTILE_SITE, Hardship
from tests.sim.nats import SimNats
from tests.sim.operator import Operator
from tests.sim.plan import ACCOUNT, CHANGING, HOSTILE, LOST, MESSAGES, REPLAYED, SAMPLED, SWITCHED, TARGET, Cut, Plan
from tests.sim.recovery import Disaster, Replays
from tests.sim.saboteur import Saboteur
from tests.sim.sampled import ADVISED, SAMPLING, Choices
from tests.sim.sources import SourceChanges
from tests.sim.store import SimObjects
from tests.sim.strands import Carriers
from tests.sim.streams import INTEREST, LIMITS, Stream
from tests.sim.world import Overdue, World

SOURCE, PREFIX = "ORDERS", "c"
PUBLISHING, BREAKING = 36.0, 44.0  # seconds of messages, and of faults
TO_THE_END = 240.0  # simulated seconds without faults until everything has arrived
LISTED_WITHIN = 160.0  # seconds more until scheduled listings have found what a site left
AFTERWARDS = 5.0  # seconds to watch afterwards: no message may arrive any more


@dataclass
class Result:
    """The result of one seed."""

    seed: int
    trace: str
    problem: str = ""
    last: list[str] = field(default_factory=list)
    plan: str = ""
    simulated: float = 0.0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    happened: list[tuple[int, str]] = field(default_factory=list)  # number and kind of each fault

    def line(self) -> str:
        shown = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        faults = f"{sum(self.faults.values())} faults"
        verdict = self.problem.splitlines()[0] if self.problem else "ok"
        times = f"{self.simulated:.0f} s in {self.seconds:.2f} s"
        return f"seed {self.seed}: {verdict}; {times}, {shown}, {faults}, trace {self.trace}"


class Scenario:
    """A site with two processes of egress, a centre with two of ingress, and their surroundings."""

    def __init__(self, world: World, folder: Path, cut: Cut) -> None:
        self.world, self.plan = world, Plan.of(world.seed, world.chance("plan"), world.chance("kind"), cut)
        self.nats, self.objects = SimNats(world), SimObjects(world)
        self.log, self.cleaning = PublisherLog(), actors.Cleaning(self._expected())
        self.target = TargetAuditor(self.log, f"{PREFIX}.".encode(), may_repeat=self.plan.is_shared)
        self.tap = SourceTap(self.log, self._archived)
        self.nats.taps |= {SOURCE: self.tap, TARGET: self.target}
        self.members: dict[str, actors.Member] = {}
        self._is_shared = self.plan.is_shared
        longer = 2.5 if self.plan.kind == CHANGING else 1  # messages follow each change
        count, seconds = cut.messages, longer * PUBLISHING * cut.messages / MESSAGES
        self.publishers = actors.Publishers(self.nats, self.log, SOURCE, self.plan.parts, count, seconds)
        self.account = Account(self.nats, self.objects, self.publishers, SITE) if self.plan.kind == ACCOUNT else None
        self.company = Company(self.plan, self.nats, self.objects, self.publishers)
        settings = self._settings(folder)
        doors.lead_commands(settings, self.objects)
        if self.plan.kind == SAMPLED:
            self.choices = self.target.choices = Choices(self.world, self.log, SITE, settings.egress.feeds[0])
            self.nats.taps["ADVISED"] = self.choices
        self.disaster = Disaster(self.nats, self.tap, SOURCE, SITE, self._has_begun)
        self.replays = Replays(self.nats, self.log, SOURCE, SITE, self._archived)
        self._add_members(folder, settings)
        self.foreign = actors.ForeignWriter(self.nats, f"{PREFIX}.foreign".encode(), 3.0)
        self._errors_before = unexpected_errors()
        foreign = self.foreign if self.plan.is_shared else None
        servers = [*self.company.servers.values()]
        self.saboteur = Saboteur(servers, self.objects, self.members, foreign, self.plan)
        self.changes = SourceChanges(self.nats, self.tap, SOURCE, self.saboteur.allows, is_quiet=self.plan.is_quiet)
        self.operator = Operator(world, self.members, 1.0) if cut.chains else Operator(world, self.members)

    def _expected(self) -> tuple[str, ...]:
        """Return the failures of compaction that may occur: see `actors.Cleaning`."""
        return (
            ("E-FORK",) if self.plan.kind in (CHANGING, ACCOUNT) else ("E-LATE-ROWS",) if self.plan.source_limit else ()
        )

    def _settings(self, folder: Path, site: str = SITE) -> Settings:
        plan, company = self.plan, self.company
        segment = {"max_messages": plan.segment, "max_age": "5s"}
        feed: dict[str, Any] = {"stream": SOURCE, "segment": segment}
        if plan.kind == CHANGING:
            feed["on_recreated"] = plan.on_recreated
        elif plan.kind == SAMPLED:
            feed |= SAMPLING
        if plan.parts > 1:
            feed["partitions"] = [f"{SOURCE}.{n}.>" for n in range(plan.parts)]
        sources = [{"site": SITE, "feed": SOURCE, "subject_prefix": PREFIX}, *company.sources(PREFIX)]
        target: dict[str, Any] = {"stream": TARGET, "publisher": plan.publisher, "sources": sources}
        target["create"] = {"subjects": [f"{PREFIX}.>"]}
        if plan.hardship == HOSTILE:
            target["create"]["subjects"].append(f"{HOSTILE_SITE}.>")
            sources.append({"site": HOSTILE_SITE, "feed": SOURCE, "subject_prefix": HOSTILE_SITE})
        if self._is_shared:
            target |= {"exclusive": False, "delivery": "at_least_once"}
        level = {"from": 0, "to": 1, "min_age": "3s", "max_wait": "6s", "min_count": 2}
        cleaning = {"levels": [level], "engine": "local", "delete_grace": "5s", "allow_short_times": True}
        feeds = [*([feed] if site == SITE else ()), *company.of_site(site, segment)]
        if self.account is not None and site == SITE:
            feeds.append({"streams": PATTERN, "segment": segment})
            sources.append({"site": f"{SITE}*", "feed": PATTERN, "subject_prefix": PREFIX})
        ingress = {"lease_ttl": "10s", "targets": [target], "requests_per_second": company.rate}
        nats = {"url": f"nats://127.0.0.1:{company.servers[site].port}"}
        document = {"site": site, "store": {"url": "file:///nowhere"}, "spool_dir": str(folder), "nats": nats}
        roles = {"egress": {"feeds": feeds, "lease_ttl": "10s"}, "ingress": ingress, "compaction": cleaning}
        return Settings.model_validate({**document, **roles})

    def _add_members(self, folder: Path, settings: Settings) -> None:
        world, objects = self.world, self.objects
        tuning = actors.SELDOM if self.plan.cut.chains >= MANY else actors.TUNING
        tuning = actors.WATCHING if self.account else tuning
        others = [(f"egress-{site}", site) for site in self.company.servers if site != SITE]
        for name, site in (("egress-0", SITE), ("egress-1", SITE), *others):
            found = settings if site == SITE else self._settings(folder, site)
            self.members[name] = actors.egress(world, name, found, objects, tuning)
        for name in ("ingress-0", "ingress-1"):
            self.members[name] = actors.ingress(world, name, lambda: self._settings(folder), objects, folder)
        if self.plan.compacts:
            name = "compaction"
            # Shorter than a configuration may set: here a day would never pass.
            rule = RetentionRule(max_age=20.0) if self.plan.expires else RetentionRule()
            self.members[name] = actors.compaction(world, name, settings, objects, folder, rule, self.cleaning)
        if self.plan.kind == LOST:
            self.members["restore"] = self.disaster.operator(settings, objects, folder)
        if self.plan.kind == REPLAYED:
            self.members["replay"] = self.replays.operator(settings, objects, folder)

    def _archived(self) -> dict[str, int]:
        """Return the last sequence in a segment, by chain."""
        found: dict[str, int] = {}
        for partition, end in re.findall(
            rf"feed={SOURCE}/.*/partition=(\d+)/level=\d/(\d+)-", "\n".join(self.objects.keys)
        ):
            chain = f"partition {partition}"
            found[chain] = max(found.get(chain, 0), int(end))
        return found

    def _has_begun(self) -> bool:
        """Return true if every partition has a segment: otherwise a restore reports that the archive lacks a part."""
        return len(self._archived()) == self.plan.parts

    @property
    def source(self) -> Stream | None:
        return self.nats.streams.get(SOURCE)

    def _create_source(self) -> None:
        from tests.sim import api

        config: dict[str, Any] = {"name": SOURCE, "subjects": [f"{SOURCE}.>"], "retention": self.plan.retention}
        if self.plan.kind == LOST:  # only subjects that the feed reads, else a restore may be lossy
            config["subjects"] = [f"{SOURCE}.{n}.>" for n in range(self.plan.parts)]
        if self.plan.source_limit:
            config["max_msgs"] = self.plan.source_limit
        api.answer(self.nats, ["STREAM", "CREATE", SOURCE], config)
        if self.plan.kind == SAMPLED:
            api.answer(self.nats, ["STREAM", "CREATE", "ADVISED"], ADVISED)

    # Running

    def strike(self, point: str) -> None:
        for change in (self.changes, *self.company.changes):
            change.strike(point)
        self.company.strike(point)
        self.saboteur.strike(point)

    def _switch(self) -> None:
        """Switch `exclusive`, and start each ingress again: foreign messages come only while it is false.

        Once something has arrived: a new exclusive target that holds foreign messages is a question for an operator. A
        target that becomes exclusive with foreign messages behind its state stops too, and is set back.
        """
        if not self.target.seen:
            self.world.at(1.0, self._switch)
            return
        self._is_shared = not self._is_shared
        self.world.note(f"exclusive is {not self._is_shared} from now on")
        self.target.may_repeat = True
        self.foreign.is_over = not self._is_shared
        if self._is_shared:
            self.world.at(5.0, self.foreign.begin)
        else:
            self.world.at(12.0, self._switch)
        self.saboteur.kill_ingress()

    def run(self) -> None:
        """Run to the end. Raises Broken, Overdue, Deadlock."""
        world, plan = self.world, self.plan
        self._create_source()
        for name, member in self.members.items():
            world.at(plan.centre_begins if name.startswith("ingress") else 0.0, member.start)
        # An interest stream keeps nothing before each partition has its durable.
        kept = plan.parts if plan.retention == INTEREST else 0
        self.publishers.may_begin = lambda: (
            self.source is not None and len({str(each.filters) for each in self.source.consumers.values()}) >= kept
        )
        world.at(1.0, self.publishers.begin)
        self.company.begin(PUBLISHING, self.saboteur.allows, plan)
        self.company.doom(self.members, self.saboteur.kill_ingress)
        if plan.is_shared:
            world.at(5.0, self.foreign.begin)
        if not plan.is_quiet:
            self.saboteur.begin(BREAKING, world.chance("pace").choice([1.5, 3.0, 6.0]))
        if plan.kind == CHANGING:
            self.changes.begin()
        if self.account is not None:
            self.account.begin()
        if plan.kind == REPLAYED:
            world.at(world.chance("replayed").uniform(3, 30), lambda: self.replays.begin(self.nats, plan.parts))
        if plan.kind in (LOST, REPLAYED):  # a command plans by one listing, and takes the end of the archive from it
            self.saboteur.kinds = [each for each in self.saboteur.kinds if each != "store_hides"]
        if plan.kind == LOST:
            self.disaster.begin()
        if plan.hardship == SWITCHED:
            world.at(world.chance("switched").uniform(6, 25), self._switch)
        elif plan.hardship and self.saboteur.allows(plan.hardship):
            Hardship(plan.hardship, self.nats, self.objects).begin()
        self._run(
            lambda: world.now > BREAKING and self.publishers.is_done and self.company.is_over and self._has_changed(),
            2000.0,
        )
        self.saboteur.calm()
        self.company.settle()
        try:
            self._run(self._is_complete, TO_THE_END + (LISTED_WITHIN if self.company.feeds else 0.0))
        except Overdue as overdue:
            raise Broken(self._unfinished()) from overdue
        self.foreign.is_over = True
        end = world.now + AFTERWARDS
        self._run(lambda: world.now >= end, AFTERWARDS + 1)
        if (defects := unexpected_errors() - self._errors_before) > 0:
            raise Broken(f"{defects} unexpected errors (E-UNEXPECTED) in the log of the product")
        if wrong := self.target.not_wanted():
            raise Broken(f"I8: {len(wrong)} messages arrived that a sampler leaves out, first {wrong[0].sequence}")
        if self.plan.kind == REPLAYED and (numbers := self.replays.wrong()):
            raise Broken(
                f"I3: {len(numbers)} messages of a replay are missing, or are not of its range: {min(numbers)}"
            )
        if self.plan.kind == LOST and (absent := self.tap.not_restored()):
            raise Broken(f"R: {len(absent)} archived messages did not come back, first {absent[0].sequence}")
        taps = [self.tap, *self.company.taps.values(), *(self.account.taps.values() if self.account else ())]
        if skipped := [each for tap in taps for each in tap.skipped(self.target.seen)]:
            places = ", ".join(f"{each.chain} {each.sequence}" for each in skipped[:5])
            raise Broken(f"I3: {len(skipped)} messages that a change took away ({places}) are missing before others")

    def _run(self, until: Callable[[], bool], limit: float) -> None:
        """Run until `until` holds, checked four times a second; supervisors check then too."""
        end = self.world.now + limit
        while not until():
            if self.world.now > end:
                raise Overdue(f"not reached within {limit:g} simulated seconds")
            for member in self.members.values():
                member.look()
            if self.plan.kind:
                self.operator.look()
                self.target.may_repeat = self.target.may_repeat or self.operator.has_repeated
            at = self.world.now + 0.25
            self.world.at(0.25, lambda: None)
            self.world.run(lambda at=at: self.world.now >= at, 10.0)  # type: ignore[misc]

    def _has_changed(self) -> bool:
        if self.plan.kind in (LOST, REPLAYED):
            return self.disaster.is_over if self.plan.kind == LOST else self.replays.is_over
        if self.account is not None:
            return self.account.is_over
        return self.plan.kind != CHANGING or self.changes.is_over

    def _is_complete(self) -> bool:
        """Return true once everything has arrived, and nothing is left in a queue.

        A message may stay there if no listing showed its segment: egress counts it as lost until its next session.
        """
        if self.plan.kind and (
            self.source is None or not self._has_changed() or self.operator.stops() or self.operator.is_busy
        ):
            return False
        if self.account is not None and self.account.unnamed(self.members, self.target.seen):
            return False
        is_sent = self.plan.kind != SAMPLED or not self.choices.unseen()
        return is_sent and not (self.target.missing() or self._is_queued())

    def _is_queued(self) -> bool:
        if self.source is None or self.plan.retention == LIMITS or self.tap.lost:
            return False
        return bool(self.source.sequences and not self.saboteur.count["store_hides"])

    def _unfinished(self) -> str:
        missing = self.target.missing()
        places = ", ".join(f"{each.chain} {each.sequence}" for each in missing[:5])
        states = "\n".join(member.state() for member in self.members.values())
        left = 0 if self.source is None else len(self.source.sequences)
        found = f"{len(missing)} acknowledged messages are missing ({places}), {left} are left"
        if self.account is not None and (names := self.account.unnamed(self.members, self.target.seen)):
            found += f", {', '.join(names)} are gone and not named"
        return f"after {TO_THE_END:g} s of peace {found}\n{states}\n{self.operator.last}"

    def counts(self) -> Counter[str]:
        segments = sum(key.endswith(".parquet") for key in self.objects.keys)
        log, done = self.log.all, self.cleaning
        numbers = {"turns": self.world.turns, "events": self.world.trace.count, "messages": len(log)}
        numbers |= {"acknowledged": sum(each.is_acknowledged for each in log), "arrived": len(self.target.seen)}
        numbers |= {"segments": segments, "store calls": self.objects.calls, "requests": self.nats.requests}
        numbers |= {"merges": done.merged, "deleted": done.deleted, "expired": done.expired}
        numbers |= {"foreign": self.target.foreign, "repeated": self.target.repeated}
        numbers |= {"lost": sum(map(len, self.tap.lost)), "decisions": self.operator.ran.total()}
        if self.plan.kind == SAMPLED:
            numbers["advisories"] = self.choices.seen
        numbers |= {"replayed": len(self.replays.target.seen), "restores": self.disaster.tries}
        return Counter(numbers | {"restored": len(self.tap.back)})


def unexpected_errors() -> int:
    """Return the number of errors that the product met in this process and did not expect."""
    samples = (sample for metric in tasks.unexpected.collect() for sample in metric.samples)
    return int(sum(each.value for each in samples if each.name.endswith("_total")))


CARRIERS = Carriers()
SPOOL = Path("/dev/shm")  # files in memory, if there is such a folder


def run_seed(seed: int, cut: Cut = Cut()) -> Result:  # noqa: B008  (it does not change)
    """Run the world of one seed, except the parts in `cut`."""
    folder = Path(tempfile.mkdtemp(prefix="floe-sim-", dir=SPOOL if SPOOL.is_dir() else None))
    began, world = time.process_time(), World(seed, CARRIERS)
    problem = ""
    gc.disable()  # no finalizer of a dead process may run in the middle of another's turn
    try:
        with doors.entered(world):
            scenario = Scenario(world, folder, cut)
            with doors.striking(scenario.strike):
                try:
                    scenario.run()
                except AssertionError as error:
                    problem = f"{type(error).__name__}: {error}"
            trace, last = world.trace.digest(), [*world.trace.last]
            world.close()
            counts, faults, happened = scenario.counts(), scenario.saboteur.count, scenario.saboteur.happened
            plan = f"{scenario.plan}, faults {', '.join(scenario.saboteur.kinds)}"
            simulated = world.now
            del scenario, world
            gc.collect()
            gc.freeze()  # the few objects that remain are not traversed again behind the next seed
    finally:
        gc.enable()
        shutil.rmtree(folder, ignore_errors=True)
    return Result(seed, trace, problem, last, plan, simulated, time.process_time() - began, counts, faults, happened)
