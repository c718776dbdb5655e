"""The saboteur: makes random faults for a while; each world has a few kinds of them, never all."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tests.sim.actors import ForeignWriter, Member
from tests.sim.nats import SimNats
from tests.sim.network import Link
from tests.sim.plan import LOST, SAMPLED, STATE, TARGET, Plan
from tests.sim.store import SimObjects, StoreMood
from tests.sim.world import Killed, Process, World

Members = Mapping[str, Member]

KINDS = (
    "kill", "pause", "cut", "delay", "blackhole", "restart", "answers", "drops", "late_api", "leader", "stale",
    "store_refuses", "store_loses", "store_late", "store_slow", "store_silent", "store_hides", "clock", "tail",
)  # fmt: skip
AIMED = ("cut", "delay", "restart", "answers", "leader", "stale")  # may strike beside kill and pause
LEAST_KINDS, MOST_KINDS = 3, 9
# The failpoints that strike in a world, their chance (higher if they are few), and the fault: empty for kill, pause
# and the kinds of AIMED that the world has.
STRIKES: tuple[tuple[str | tuple[str, ...], float, str], ...] = (
    ("", 0.0, ""), ("segments.put", 0.3, "swallow"), ("", 0.02, ""), ("", 0.06, ""), ("egress.", 0.12, ""),
    ("segments.", 0.2, ""),
    ("ingress.", 0.08, ""), ("ingress.before_close", 0.2, ""), ("ingress.mid_batch", 0.12, ""),
    ("compaction.", 0.1, ""), (("ingress.after_intent", "ingress.before_close"), 0.15, "far"),
    ("ingress.after_close", 0.15, "kept"),
)  # fmt: skip
#: The same for half of the worlds of a kind, in place of a strike by chance.
AIMS = {LOST: ("restore.", 0.15, "kill"), SAMPLED: ("egress.after_snapshot", 0.25, "kill")}
SENDING = ("ingress.after_intent", "ingress.mid_batch")  # points for a foreign message in between, and its chance
BETWEEN = 0.1
WAITS = 4  # times in which the stream of advisories has no leader


def _near(links: Sequence[Link]) -> None:
    for link in links:
        link.lag = 0.0


class Saboteur:
    """A plan of faults on `members`, the server and the store until `end`; `calm` takes all of them back.

    `foreign`: another writer to the target, or None.
    """

    def __init__(
        self, servers: list[SimNats], objects: SimObjects, members: Members, foreign: ForeignWriter | None, plan: Plan
    ) -> None:
        self.world: World = servers[0].world
        self._servers, self._objects, self._members, self._foreign = servers, objects, members, foreign
        self._nats = servers[0]  # of the current fault; the first one is the centre's
        self._rng = self.world.chance("saboteur")
        self.kinds = sorted(self._rng.sample(KINDS, self._rng.randint(LEAST_KINDS, MOST_KINDS)))
        self._aimed = [each for each in AIMED if each in self.kinds]
        strike, aim = self._rng.choice(STRIKES), self.world.chance("aim")
        is_aimed = plan.kind in AIMS and aim.random() < 0.5
        self._struck, self._strike_chance, self._strike_kind = AIMS[plan.kind] if is_aimed else strike
        for _ in range(WAITS if is_aimed and plan.kind == SAMPLED else 0):
            self.world.at(aim.uniform(5, 40), self._advisories)
        self.end, self.every = 0.0, 5.0
        self.count: Counter[str] = Counter()
        self._left_out, self._number = plan.cut, 0
        self.happened: list[tuple[int, str]] = []  # number and kind of each fault

    def allows(self, fault: str) -> bool:
        """Count a fault that is about to happen. Return false if it is left out."""
        kind, number = fault.partition(" at ")[0], self._number
        self._number += 1
        if kind in self._left_out.without or (self._left_out.only is not None and number not in self._left_out.only):
            return False
        self.count[fault] += 1
        self.happened.append((number, kind))
        self.world.note(f"fault {number}: {fault}")
        return True

    def begin(self, seconds: float, every: float) -> None:
        """Make a fault every so many seconds, on average."""
        self.end, self.every = self.world.now + seconds, every
        self._plan()

    def _plan(self) -> None:
        self.world.at(self._rng.expovariate(1 / self.every), self._fault)

    def _fault(self) -> None:
        if self.world.now >= self.end:
            return
        kind = self._rng.choice(self.kinds)
        if self.allows(kind):
            self._choose_server(kind)
            getattr(self, f"_{kind}")()
        self._plan()

    def _choose_server(self, kind: str) -> None:
        is_of_centre = kind in ("tail", "kept") or len(self._servers) == 1
        self._nats = self._servers[0] if is_of_centre else self._rng.choice(self._servers)

    def _later(self, most: float, call: Callable[[], object], least: float = 0.0) -> None:
        self.world.at(self._rng.uniform(least, most), call)

    def _member(self) -> Member:
        return self._members[self._rng.choice(sorted(self._members))]

    # Processes

    def _kill(self) -> None:
        self._kill_process(self._member())

    def kill_ingress(self) -> None:
        for name, member in self._members.items():
            if name.startswith("ingress"):
                self._kill_process(member)

    def _kill_process(self, member: Member) -> None:
        if member.process is not None and member.is_alive:
            member.process.kill()
            self._later(15, member.start)

    def _pause(self) -> None:
        if (process := self._member().process) is not None:
            process.pause()
            self._later(35, process.resume)

    def _clock(self) -> None:
        """Make one host's wall clock jump."""
        if (process := self._member().process) is not None:
            process.skew = self._rng.choice([-3600.0, -5.0, 0.0, 5.0, 3600.0])

    def strike(self, point: str) -> None:
        """Make a fault, by chance, while a process passes a failpoint. Raises Killed if it kills that process."""
        process = self.world.current
        if process is None or not process.alive or self.world.now >= self.end:
            return
        is_between = self._foreign is not None and point in SENDING and self._rng.random() < BETWEEN
        if is_between and self._foreign is not None and self.allows(f"foreign at {point}"):
            self._foreign.write()
        if not point.startswith(self._struck) or self._rng.random() >= self._strike_chance:
            return
        member = self._members.get(process.name)
        if member is None or member.process is not process:
            return
        kind = self._strike_kind or self._rng.choice(["kill", "pause", *self._aimed])
        if not self.allows(f"{kind} at {point}"):
            return
        if kind == "kill":
            self._kill_process(member)
            raise Killed
        if kind == "pause":
            self._pause_here(process)
        elif kind == "far":
            self._far(process)
        else:
            self._choose_server(kind)
            getattr(self, f"_{kind}")()

    def _pause_here(self, process: Process) -> None:
        process.pause()
        self._later(30, process.resume, 3)
        if (strand := self.world.strand) is not None:
            strand.sleep(0.0)  # returns once the process is resumed

    # The network

    def _links(self) -> list[Link]:
        return [link for nats in self._servers for link in nats.connections]

    def _cut(self) -> None:
        for link in self._links():
            if self._rng.random() < 0.5:
                link.cut()

    def _delay(self) -> None:
        """Delay the packets of one process for a while."""
        process, lag = self._member().process, self._rng.choice([0.3, 2.0, 8.0])
        if process is not None:
            found = [*process.links]
            for link in found:
                link.lag = lag
            self._later(20, lambda: _near(found))

    def _far(self, process: Process) -> None:
        """Delay messages of the process beyond the end of its lease; the process that took over may die then."""
        found, lag = [*process.links], self._rng.uniform(8, 16)
        for link in found:
            link.lag = lag
        if self._rng.random() < 0.5:
            self.world.at(lag + self._rng.uniform(0, 0.5), self.kill_ingress)
        self._later(25, lambda: _near(found), 15)

    def _blackhole(self) -> None:
        process = self._member().process
        for link in self._links():
            if link.process is process:
                link.swallows = True

    # The server

    def _restart(self) -> None:
        if self._nats.is_up:
            self._nats.stop()
            self._later(12, self._nats.start)

    def _answers(self) -> None:
        self._set_chance("lost_answers", self._rng.choice([0.1, 0.4]))

    def _drops(self) -> None:
        """Lose deliveries of consumers, as a cluster does."""
        # A short loss of all takes the last one before a pause, too.
        self._set_chance("lost_deliveries", *self._rng.choice([(0.15, 10.0), (1.0, 2.0)]))

    def _late_api(self) -> None:
        self._set_chance("late_requests", self._rng.choice([0.05, 0.3]))

    def _set_chance(self, name: str, chance: float, most: float = 10.0) -> None:
        """Set a chance of the server for a while."""
        nats = self._nats
        setattr(nats, name, chance)
        self._later(most, lambda: setattr(nats, name, 0.0))

    def _streams(self) -> list[str]:
        """One stream, or all."""
        names = sorted(self._nats.streams)
        return names if self._rng.random() < 0.3 else [self._rng.choice(names)]

    def _leader(self) -> None:
        self._nats.depose(self._streams(), self.world.now + self._rng.uniform(0, 8), 0.0)

    def _advisories(self) -> None:
        """Take the leader from the stream of advisories."""
        if self.allows("advisories"):
            self._servers[0].depose(["ADVISED"], self.world.now + self._rng.uniform(1, 8), 0.0)

    def _kept(self) -> None:
        """Take the leader from the target, or from the bucket with the state of ingress."""
        names = [name for name in ("KV_FLOE_STATE", TARGET) if name in self._nats.streams]
        self._nats.depose(names and [self._rng.choice(names)], self.world.now + self._rng.uniform(2, 10), 0.0)

    def _stale(self) -> None:
        """Elect another leader, while the old one still answers on open connections."""
        until = self.world.now + self._rng.uniform(0, 8)
        self._nats.depose(self._streams(), until, until + self._rng.uniform(0, 5))

    def _tail(self) -> None:
        """Cut the power of the centre: the server loses the last messages of the target, of the open intent at most.

        The state of the target in its bucket was synced; messages since then were not. Processes of ingress die with
        it: one that had seen an acknowledgement of these would close its intent, and stop (E-TARGET-BEHIND).
        """
        target, bucket = self._nats.streams.get(TARGET), self._nats.streams.get("KV_FLOE_STATE")
        if target is None or bucket is None or not self._nats.is_up:
            return
        states = bucket.by_subject.get(STATE.encode(), [])
        text = bucket.messages[states[-1]].payload if states else b""
        if (base := re.search(rb'"intent": ?\{"base": ?(\d+)', text)) is None:
            return
        self.kill_ingress()
        self._nats.stop()
        lost = target.lose_tail(self._rng.randint(int(base[1]), max(int(base[1]), target.last)))
        self.count["messages of a lost tail"] += lost
        self._later(5, self._nats.start)

    # The store

    def _mood(self, most: float, **changes: float | bool) -> None:
        self._objects.mood = StoreMood(**changes)  # type: ignore[arg-type]
        self._later(most, lambda: setattr(self._objects, "mood", StoreMood()))

    def _store_refuses(self) -> None:
        self._mood(15, refused=self._rng.choice([0.2, 1.0]))

    def _store_loses(self) -> None:
        self._mood(15, lost=self._rng.choice([0.1, 0.5]))

    def _store_late(self) -> None:
        self._mood(15, late=self._rng.choice([0.1, 0.4]), lost=0.05)

    def _swallow(self) -> None:
        """Lose the next write to the store on its way. It gets no answer."""
        self._objects.swallows_next = True

    def _store_slow(self) -> None:
        self._mood(20, slow=True)

    def _store_silent(self) -> None:
        self._mood(15, silent_until=self.world.now + self._rng.uniform(1, 15))

    def _store_hides(self) -> None:
        self._mood(15, hidden=self._rng.choice([0.2, 0.6]))

    def calm(self) -> None:
        """Take every fault back; from now on nothing breaks."""
        self.end = 0.0
        self._objects.mood, self._objects.swallows_next = StoreMood(), False
        for nats in self._servers:
            nats.lost_answers = nats.late_requests = nats.lost_deliveries = 0.0
            nats.leaderless.clear()
            if not nats.is_up:
                nats.start()
        for member in self._members.values():
            if member.process is not None:
                member.process.resume()
                _near(member.process.links)
            member.start()
