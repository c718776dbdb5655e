"""Delivery to a target at a stop, a correction, a defect; the target after an error, and its gauges."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client import generate_latest

from common import errors
from common.archive.heartbeats import ChainHeartbeat, StoredHeartbeat
from common.chain import Chain
from common.clock import SystemClock, doubling_delays
from common.metrics import REGISTRY
from common.nats.protocol import ApiError, api_error
from common.observe.monitor import Health
from common.observe.page import render_page
from common.sequences import SequenceRange
from common.settings.ingress import IngressSettings, TargetSettings
from common.tasks import Stop
from ingress.chains.chain_state import ChainRegistry, ChainState
from ingress.chains.plan import ChainPlan, Phase
from ingress.checkpoint import Checkpoint, Intent, StateChanged, StateConflict, StoredState, TargetState, open_intent
from ingress.delivery import Delivery, ServerLimits
from ingress.errors import is_fatal_for_target, is_transient, most_important_error
from ingress.metrics import chain_metrics
from ingress.publishers.publisher import Outcome
from ingress.report import Lags, TargetReport
from ingress.rows.prepare import Preparer, SubjectFilters, SubjectRule, TargetLimits
from ingress.rows.rows import Block, PreparedBatch, Rows
from ingress.target import IngressTuning, TargetSupervisor
from ingress.verdict.verdict import Sending, Settled
from tests.support.basics import PATIENCE, metric_value, unique
from tests.support.clock import ManualClock
from tests.support.ingress import CHAIN, piece


def state(position: int, sequence: int = 0) -> TargetState:
    return TargetState(Checkpoint(sequence, "t0", {CHAIN: position}))


class World:
    """The surroundings of a delivery: a target that takes all, a backlog without end, a state of its own.

    `moves`: messages stored by another publisher, one at each read of the state.
    """

    is_shared, name = False, "fake"

    def __init__(self, moves: list[TargetState] | None = None, first: int = 1) -> None:
        self.stored, self.moves = StoredState(state(1), 1), moves or []
        self.next, self.published, self.stop_at = first, 0, 5
        self.stop = Stop()
        self.recall, self.sending = self, Sending()

    @property
    def state(self) -> Any:
        return self.stored.state

    def delivery(self, limits: Any = None) -> Delivery:
        return Delivery("T", self, self, self, self, ManualClock(), limits=limits)

    async def load_first(self) -> tuple[StoredState, None]:
        return self.stored, None

    async def save(self, after: TargetState, revision: int) -> StoredState:
        self.stored = StoredState(after, revision + 1)
        return self.stored

    async def settle(self, known: StoredState, _: Rows | None) -> Settled:
        return Settled(self.state.checkpoint.target_sequence, 0)

    async def check_moved(self, known: StoredState) -> None:
        if self.moves:
            raise StateChanged(StoredState(self.moves.pop(0), known.revision + 1))

    def check_lease(self) -> None: ...

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        self.published += 1
        if self.published == self.stop_at:
            self.stop.set()
        return Outcome(rows.count)

    async def take(self, stop: Stop, seconds: float) -> Rows | None:
        """Return at once if rows are ready, as the real ones do."""
        assert self.published < 50, "it never stops"
        self.next += 1
        return Rows([Block(piece(self.next - 1, self.next - 1))])

    def release(self, rows: Rows) -> None: ...
    def record_stored(self, positions: Any) -> None: ...
    def reset(self, positions: Any) -> None: ...


class Shared(World):
    """A world with `exclusive: false`; it sends an intent only if the intent records this."""

    is_shared = True

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        assert self.state.intent.is_shared
        return await super().publish(rows, base, stored)

    async def rows(self, intent: Intent, stored: int) -> Rows:
        return Rows([Block(each) for each in intent.pieces])


@pytest.mark.parametrize("before", [state(1), open_intent(state(1), [piece(1, 1)])])
async def test_an_intent_that_others_may_share_records_it_and_a_stop_in_a_backlog_closes_it(before: Any) -> None:
    """Include one opened with `exclusive: true`: after a switch back, its rows must not be counted."""
    world = Shared(first=before.intent.pieces[-1].rows.last + 1 if before.intent else 1)
    world.stored = StoredState(before, 1)
    await asyncio.wait_for(world.delivery().run(world.stop), PATIENCE)
    assert (world.published, world.state.checkpoint.positions) == (5, {CHAIN: 6})


class Limits:
    """A server that takes less at the first read; `refuses`: it also refuses the rows of an open intent."""

    def __init__(self, world: World, *, refuses: bool = False) -> None:
        self.world, self.refuses, self.renewed = world, refuses, 0

    def has_changed(self, _: Rows) -> bool:
        return not self.renewed

    async def renew(self, positions: Any) -> None:
        assert self.world.state.intent is None
        self.renewed += 1
        self.world.next = positions[CHAIN]

    def check(self, rows: Rows, stored: int) -> None:
        assert self.world.state.intent is not None
        if self.refuses:
            raise errors.Stopped("too large", code="E-OVERSIZE-INTENT")


async def test_rows_made_ready_for_another_server_get_into_no_intent_and_what_it_refuses_is_not_sent() -> None:
    world = World()
    limits = Limits(world)
    await asyncio.wait_for(world.delivery(limits).run(world.stop), PATIENCE)
    assert (limits.renewed, world.state.checkpoint.positions) == (1, {CHAIN: 6})

    refusing = World()
    with pytest.raises(errors.Stopped, match="too large"):
        await asyncio.wait_for(refusing.delivery(Limits(refusing, refuses=True)).run(refusing.stop), PATIENCE)
    assert refusing.published == 0


@pytest.mark.parametrize(("limit", "stored", "found"), [(99, 0, (CHAIN, 2, 100)), (99, 2, None), (100, 0, None)])
def test_the_first_row_above_a_limit_is_found(limit: int, stored: int, found: tuple[object, int, int] | None) -> None:
    payloads, sizes = pa.array([b"", b"", b""], pa.binary()), [10, 110, 120]
    batch = PreparedBatch([1, 2, 3], [1, 2, 3], [b"a"] * 3, b"", None, payloads, sizes, largest_message_bytes=100)
    rows = Rows([Block(piece(1, 3), batch)])
    assert (rows.largest_message_bytes, rows.first_above(limit, stored)) == (100, found)
    server: Any = SimpleNamespace(max_payload=limit)
    renewed: Any = SimpleNamespace(limits=server)  # by the check of a chain that had stopped
    assert ServerLimits(server, renewed, dict, "").has_changed(rows) is (limit < 100)


async def test_a_delivery_names_itself_before_its_first_rows_and_with_each_intent() -> None:
    async def refuse(_: StoredState) -> tuple[str, ...]:
        raise errors.Stopped("another centre", code="E-TARGET-TWICE")

    async def name(found: StoredState) -> tuple[str, ...]:
        return names.pop(0)

    world, names = World(), [(), ("a", "b")]  # the store does not answer at first
    delivery = world.delivery()
    delivery.name_writers = refuse
    with pytest.raises(errors.Stopped, match="another centre"):
        await delivery.run(world.stop)
    assert (world.published, world.next) == (0, 1)
    delivery.name_writers = name
    await asyncio.wait_for(delivery.run(world.stop), PATIENCE)
    assert (world.published, names, world.state.checkpoint.writers) == (5, [], ("a", "b"))


async def test_rows_that_do_not_continue_the_checkpoint_name_what_to_check() -> None:
    with pytest.raises(StateConflict) as error:
        await World(first=7).delivery().run(Stop())
    assert "floe status -c " in error.value.hint


async def test_corrections_of_single_chains_in_a_row_do_not_end_a_target() -> None:
    delivery = World(moves=[state(n) for n in (100, 200, 300, 400, 500)]).delivery()
    await delivery.begin()
    for _ in range(5):
        await delivery.wait_for_other_instance()
    assert delivery.state.checkpoint.positions == {CHAIN: 500}


async def test_endless_changes_show_another_writer() -> None:
    for moves in [state(n + 1, n) for n in (1, 2, 3)], [open_intent(state(1), [piece(1, n)]) for n in (1, 2, 3)]:
        delivery = World(moves).delivery()
        await delivery.begin()
        with pytest.raises(errors.OtherWriter) as error:
            await delivery.wait_for_other_instance()
        assert (error.value.exit_code, "floe checkpoint ls -c " in error.value.hint) == (4, True)


async def test_after_a_defect_a_target_begins_again_after_pauses_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    health, clock = Health(SystemClock()), SystemClock()

    async def occupy(stop: Stop) -> None: ...

    # Releasing a lease needs more of the sharing than this.
    sharing = SimpleNamespace(owner="me", slot=lambda key, observer: SimpleNamespace(wait_for_lease=occupy))
    near = {"health": health, "clock": clock, "sharing": sharing, "discovery": SimpleNamespace(sites=None)}
    deps = SimpleNamespace(**near, tuning=IngressTuning(), settings=IngressSettings())
    settings = TargetSettings.model_validate({"stream": "T", "sources": [{"site": "us", "feed": "NODES"}]})
    stop, began = Stop(), []

    async def check() -> None:
        began.append(clock.monotonic())
        if len(began) == 4:
            stop.set()
        raise KeyError("nobody foresaw this")

    monkeypatch.setattr("ingress.target.TARGET_PAUSES_S", doubling_delays(0.05, 30.0))
    monkeypatch.setattr("ingress.target.TargetRunner", lambda *_: SimpleNamespace(check=check))
    await TargetSupervisor(deps, settings).run(stop)

    assert all(b - a >= least for (a, b), least in zip(pairwise(began), (0.05, 0.1, 0.2), strict=True))
    shown = health.status()["parts"]["target T"]
    assert (shown["state"], shown["code"]) == ("stopped", "E-UNEXPECTED")
    assert all("nobody foresaw this" in each for each in (shown["why"], *health.problems()))


def test_what_ends_a_target_and_what_passes_by_itself() -> None:
    for error, passes, ends in (
        *((kind("x"), True, [False, False]) for kind in (errors.Unavailable, errors.OutcomeUnknown, errors.LeaseLost)),
        (ApiError(503, 0, "x"), True, [False, False]),
        (api_error({"code": 400, "err_code": 10005}, ""), True, [False, False]),  # some peers are not known yet
        *((kind("x"), False, [False, False]) for kind in (errors.Stopped, errors.DataError)),
        (errors.ConfigError("x", code="E-TARGET"), False, [True, False]),
        (errors.ConfigError("x", code="E-SOURCES"), False, [True, True]),
        (errors.OtherWriter("x"), False, [True, True]),
    ):
        found = [is_fatal_for_target(error, was_checked=each) for each in (False, True)]
        assert (is_transient(error), found) == (passes, ends)


def test_the_error_for_an_operator_comes_first() -> None:
    stop = errors.Stopped("x")
    within = BaseExceptionGroup("", [stop, ValueError("bug")])
    assert most_important_error(BaseExceptionGroup("", [errors.Unavailable("a"), within])) is stop


def chain_state(position: int, archived: int, plan: ChainPlan | None = None) -> ChainState:
    preparer = Preparer(CHAIN, SubjectRule(), TargetLimits(SubjectFilters([">"]), 1024))
    found = ChainState(CHAIN, preparer, position, archived=archived)
    found.plan = plan or ChainPlan(Phase.IDLE)
    return found


class Chains(dict[Chain, ChainState]):
    """The registry of some chains."""

    def __iter__(self) -> Any:
        return iter(self.values())


class Gauges(Lags):
    """The lags of one target, and the values of its gauges."""

    def __init__(self, per_chain: bool | str = True) -> None:
        self.target = unique("T")
        super().__init__(self.target, per_chain)

    def at(self, now: float, state: ChainState, position: int, *rest: Any, **more: Any) -> None:
        self.measure(Chains({CHAIN: state}), {CHAIN: position}, *(rest or ([], None)), now, **more)

    def shown(self, *names: str) -> list[float | None]:
        """Return the values for the chain, else those for the target."""
        of_chain = {"target": self.target, "site": CHAIN.site, "feed": CHAIN.feed, "partition": "0"}
        found = [[metric_value(f"floe_ingress_{n}", w) for w in (of_chain, {"target": self.target})] for n in names]
        return [whole if chain is None else chain for chain, whole in found]


@pytest.fixture
def lags() -> Iterator[Gauges]:
    made = Gauges()
    yield made
    made.forget()
    assert made.shown("lag_messages", "lag_seconds") == [None, None]


LATE = ChainPlan(Phase.LATE, (), SequenceRange(101, 110), 1000.0)


def test_messages_are_counted_where_they_are_decoded_and_sequences_where_not(lags: Gauges) -> None:
    # Stored below 101; 101..200 in the open intent and 201..300 decoded hold 7 and 5; the rest: not yet.
    lags.at(50.0, chain_state(301, 1000), 101, [Block(piece(201, 300, 5))], Intent(9, (piece(101, 200, 7),)))
    assert (lags.behind[CHAIN].sequences, lags.shown("lag_messages", "intent_open")) == (900, [712, 1])


def test_the_lag_grows_while_nothing_is_carried_and_is_0_when_all_is(lags: Gauges) -> None:
    for now, archived, seconds in ((1030.0, 200, 30), (1090.0, 300, 90)):
        lags.at(now, chain_state(101, archived, LATE), 101)
        assert lags.shown("lag_seconds", "waiting_seconds", "late_sequences") == [seconds, seconds, 10]
    lags.at(1100.0, chain_state(301, 300), 301)
    assert lags.shown("lag_seconds", "waiting_seconds", "late_sequences") == [0, None, 0]


def test_the_lag_stays_until_another_instance_carries() -> None:
    clock, lags = SystemClock(), Gauges()
    report = TargetReport(lags.target, Health(clock), clock, owner="me")
    report.lags.measure(Chains({CHAIN: chain_state(101, 300)}), {CHAIN: 101}, [], None, 1090.0)
    report.report_released()
    for nobody in (None, "me"):
        report.set_standby(nobody)
        assert lags.shown("lag_messages", "lag_seconds") == [200, 0]
    assert lags.shown("lag_last_success_timestamp_seconds") == [1090]
    report.set_standby("another")
    assert lags.shown("lag_messages", "lag_seconds") == [None, None]


def test_the_lag_of_rows_that_are_being_sent_is_theirs_and_exact_as_soon_as_a_time_is_known(lags: Gauges) -> None:
    lags.at(1050.0, chain_state(101, 300), 101)
    assert lags.shown("lag_seconds") == [0]
    lags.at(1060.0, chain_state(101, 300, LATE), 101)
    assert lags.shown("lag_seconds") == [60]
    lags.at(1050.0, chain_state(301, 300), 101, [], Intent(9, (piece(101, 200, 7),)), sending={CHAIN: 1000.0})
    assert lags.shown("lag_seconds") == [50]


def test_the_lag_grows_while_the_store_cannot_be_read(lags: Gauges) -> None:
    """Let the lag grow: the messages archived meanwhile are unknown, and 0 would mean that all are carried."""
    for is_read, now, seconds in ((False, 1000.0, 0), (False, 1060.0, 60), (True, 1100.0, 0)):
        lags.record_store_state(is_read=is_read, now=now)
        lags.at(now, chain_state(301, 300), 301)
        assert (lags.shown("lag_seconds"), lags.age(CHAIN)) == ([seconds], seconds)


def reported(chain: Chain) -> StoredHeartbeat:
    return StoredHeartbeat(ChainHeartbeat(state="reading", since=0.0, source_last=400, chain=chain), 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("per_chain", "count", "age"), [(True, 28, 0), ("moving", 4, None), (False, 4, 60)])
def test_a_chain_has_at_most_five_series(per_chain: Any, count: int, age: float | None) -> None:
    lags, names = Gauges(per_chain), tuple(each.name for each in chain_metrics.describe())
    states = [ChainState(CHAIN.with_partition(n), None, 401, archived=400) for n in range(9)]
    for state in states:
        state.adopt_plan(LATE if state is states[8] else ChainPlan(Phase.IDLE))
    chains = Chains({state.chain: state for state in states})
    lags.measure(chains, {states[8].chain: 101}, [], None, 1060.0, SimpleNamespace(heartbeat_of=reported))
    found = [line for line in generate_latest(REGISTRY).decode().splitlines() if f'target="{lags.target}"' in line]
    assert (list(lags.behind), sum(line.startswith(names) for line in found)) == ([states[8].chain], count)
    assert (sum("site=" in line for line in found) <= 5 * 9, lags.shown("lag_seconds")) == (True, [age])
    lags.forget()


def test_a_paused_chain_is_shown_as_paused() -> None:
    state = chain_state(101, 300)
    assert state.status({CHAIN: 101})["phase"] == "idle"
    state.pause()
    assert state.status({CHAIN: 101}).items() >= {"phase": "paused", "paused": True, "position": 101}.items()


def test_an_end_and_a_publisher_of_a_target_count_once(caplog: pytest.LogCaptureFixture) -> None:
    target, clock = unique("T"), SystemClock()
    health = Health(clock)
    report = TargetReport(target, health, clock, owner="me")

    def count() -> int:
        return sum(record.name == "ingress.report" for record in caplog.records)

    with caplog.at_level("INFO", logger="ingress.report"):
        for _ in range(2):  # by the check at the start, and by the process that carries
            report.report_publisher("single", {"fast": "nats-server 2.10"})
        assert count() == 1
        report.report_publisher("fast", {})
        assert count() == 2
        report.set_standby("other")
        report.report_publisher("fast", {})
        assert count() == 3
        report.report_ended(errors.ConfigError(f"target {target}: wrong", code="E-TARGET"))
        assert (count(), health.problems()) == (4, [f"target {target}: wrong"])


def carried(chains: list[Chain], unready: str = "", *, is_settled: bool = True, stops: int = 0) -> tuple[str, Health]:
    """Report the progress of a target that carries these chains; return its name and the health."""
    target, clock = unique("T"), SystemClock()
    health = Health(clock)
    sources = [{"site": sorted({chain.site for chain in chains}), "feed": "NODES"}]
    settings = TargetSettings.model_validate({"stream": target, "sources": sources})
    registry = ChainRegistry(settings, TargetLimits(SubjectFilters([">"]), 1024))
    assert all(registry.add(chain) for chain in chains)
    for chain in chains[:stops]:
        registry.get(chain).stop(errors.Stopped("x"), 0.0)
    state = SimpleNamespace(checkpoint=SimpleNamespace(positions={}, target_sequence=0), intent=None)
    more = {"trouble": "", "unready_reason": unready, "sending_times": {}}
    delivery: Any = SimpleNamespace(state=state, is_settled=is_settled, **more)
    prefetcher: Any = SimpleNamespace(chains=registry, positions={}, ahead=[])
    TargetReport(target, health, clock).report_progress(delivery, prefetcher)
    return target, health


def test_a_site_with_many_chains_hides_no_other_from_the_status() -> None:
    of_site = [Chain("a-site", "NODES", 0, partition) for partition in range(1100)]
    target, health = carried([*of_site, CHAIN][::-1], stops=2)
    shown = health.status()["parts"][f"target {target}"]["chains"]
    assert (len(shown), health.chains(), {str(CHAIN), str(of_site[-1])} - shown.keys()) == (1000, sorted(shown), set())
    page = render_page(health.status(), ())
    assert (page.count(b'"chain">a-site/NODES'), b"chains not shown 900" in page) == (99, True)


@pytest.mark.parametrize("why", ["", "checking its state"])
def test_a_target_is_ready_unless_it_gives_a_reason(why: str) -> None:
    target, health = carried([CHAIN], why, is_settled=False)
    assert health.problems() == ([f"target {target}: {why}"] if why else [])
