"""A zoo of streams: each is archived by a real egress, lost and restored. It comes back complete, or the plan has the
difference in numbers.

Every kind lives twice: up to a moment T, and on. Between the two egress is drained, so that it captures the state then;
and again at the end. A kind is restored to its end or to T, and compared with its contents at that time.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import nats
import pytest

from common.archive.segment import Message
from common.clock import parse_time
from common.nats.api import create_consumer, query, stream_info
from common.sequences import SequenceRange
from egress.deps import open_context
from egress.partition import partitions_of
from egress.resolve import decide_incarnation, load_case, plan_incarnation
from ingress.recovery.plan import RestorePlan
from ingress.recovery.restore import RestoreReport
from tests.integration.test_egress_partitions import until_cut
from tests.support import restoring as back
from tests.support.basics import PATIENCE, soon, unique
from tests.support.egress import SITE, Bench, Running, feed_of

pytestmark = pytest.mark.servers

HOUR = 3_600_000_000_000
AT_ONCE = 6  # concurrent restores


LATER = {"start_sequence": 11, "capture_deletes": "10m"}
SAMPLED = {"inspect_subject_token": 2, "inspect_duration": "1h"}


def named(text: Any, stream: str, source: str = "") -> Any:
    """`text`, or a structure of texts, with the name of the stream in the place of ZOO."""
    return json.loads(json.dumps(text).replace("ZOO", stream).replace("SOURCE", source))


@dataclass
class Pen:
    """A stream of the zoo, and the operations on it."""

    bench: Bench
    stream: str
    feed: dict[str, Any]

    async def put(
        self, count: int, subject: str = "", headers: Mapping[str, str] | None = None, text: str = "", keys: int = 5
    ) -> None:
        """Publish `count` messages: on `subject`, or on `keys` subjects in turn."""
        block = None
        if headers:
            block = "".join(["NATS/1.0\r\n", *(f"{name}: {value}\r\n" for name, value in headers.items()), "\r\n"])
        for n in range(count):
            where = subject.replace("ZOO", self.stream) or f"{self.stream}.k{n % keys}"
            body = text.encode() if text else b"%d" % n * (n % 9)
            raw = block.encode() if block else None
            answer, _ = await self.bench.client.request_raw(where.encode(), body, raw, timeout=PATIENCE)
            assert b'"error"' not in answer, answer

    async def delete(self, *sequences: int) -> None:
        for sequence in sequences:
            await self.bench.client.api(f"STREAM.MSG.DELETE.{self.stream}", {"seq": sequence})

    async def purge(self, **of: Any) -> None:
        of = named(of, self.stream)
        await self.bench.client.api(f"STREAM.PURGE.{self.stream}", of)

    async def edit(self, **config: Any) -> None:
        """Change the configuration, which `egress` captures while it runs."""
        found = (await query(self.bench.client, f"STREAM.INFO.{self.stream}"))["config"]
        await self.bench.client.api(f"STREAM.UPDATE.{self.stream}", {**found, **config})


Act = Callable[[Pen], Awaitable[None]]


def puts(count: int = 30, **keys: Any) -> Act:
    async def act(pen: Pen) -> None:
        await pen.put(count, **keys)

    return act


def acts(*every: Act) -> Act:
    async def act(pen: Pen) -> None:
        for each in every:
            await each(pen)

    return act


def deletes(*sequences: int) -> Act:
    return lambda pen: pen.delete(*sequences)


def purges(**of: Any) -> Act:
    return lambda pen: pen.purge(**of)


def edits(**config: Any) -> Act:
    return lambda pen: pen.edit(**config)


def takes(consumer: str, count: int, acked: int | None = None) -> Act:
    async def act(pen: Pen) -> None:
        await back.consume(pen.bench, pen.stream, consumer, count, acked)

    return act


def left(count: int) -> Act:
    """Wait until the stream holds `count` messages: the others have expired."""

    async def act(pen: Pen) -> None:
        async def are_left() -> bool:
            return (await back.state(pen.bench, pen.stream))["messages"] == count

        await soon(are_left, every=0.2)

    return act


@dataclass
class Kind:
    """A kind of stream. `before`: the acts before egress runs; `then`: those with all archived, before egress is
    drained at T; `between`: those at T; `after`, `last`: the same as the first two behind T. `lost`: those behind all
    that, when egress has ended. `feed`: keys of its feed; `asks`: of the restore, `to_t`: up to T.

    `missing`, `extra`: of the line of the plan that has the number of the messages that do not come back, or that come
    back though they were deleted; empty if there are none. `notes`: further texts of the plan. `incarnation`, `cut`:
    the last incarnation, and its number of partitions.
    """

    config: dict[str, Any] = field(default_factory=dict)
    before: Act = field(default_factory=puts)
    then: Act | None = None
    after: Act = field(default_factory=partial(puts, 10))
    last: Act | None = None
    lost: Act | None = None
    feed: dict[str, Any] = field(default_factory=lambda: {"capture_deletes": "10m"})
    consumers: dict[str, dict[str, Any]] = field(default_factory=dict)
    asks: dict[str, Any] = field(default_factory=dict)
    to_t: bool = False
    name: str = "ZOO"
    between: Act | None = None
    incarnation: int = 0
    cut: int = 1
    missing: str = ""
    extra: str = ""
    notes: Sequence[str] = ()
    positions: bool = True
    same_state: bool = True
    same_config: bool = True


@dataclass
class Truth:
    """Messages and properties of a stream."""

    rows: list[Message]
    state: dict[str, Any]
    config: dict[str, Any]
    positions: dict[str, tuple[int, ...]]
    at_ns: int


async def truth(bench: Bench, stream: str) -> Truth:
    """The stream, once its servers agree: each removes acknowledged messages by itself."""

    async def agreed() -> tuple[Any, ...] | None:
        now = parse_time((await query(bench.client, f"STREAM.INFO.{stream}"))["ts"])
        readings = [await each(bench, stream) for each in (back.contents, back.state, back.config, back.positions)]
        return (now, *readings) if len(readings[0]) == readings[1]["messages"] else None

    now, rows, state, config, positions = await soon(agreed)
    state["first_seq"] = max(1, state["first_seq"])  # 0 if it never held a message, until it is restored
    positions = {name: at for name, at in positions.items() if not name.startswith(("floe", "passing"))}
    return Truth(rows, state, config, positions, now)


NEVER = {"capture_deletes": "never"}
EXPLICIT = {"ack_policy": "explicit"}


async def counters(pen: Pen) -> None:
    for n in range(20):
        await pen.put(1, f"{pen.stream}.c{n % 3}", {"Nats-Incr": f"+{n}"}, text="")


async def batches(pen: Pen) -> None:
    for batch in range(3):
        for n in range(1, 4):
            commit = {"Nats-Batch-Commit": "1"} if n == 3 else {}
            await pen.put(1, f"{pen.stream}.a", {"Nats-Batch-Id": f"b{batch}", "Nats-Batch-Sequence": str(n), **commit})


def rolls(what: str = "sub") -> Act:
    return acts(puts(20), puts(1, subject="ZOO.k1", headers={"Nats-Rollup": what}), puts(8))


async def odd(pen: Pen) -> None:
    for n in range(9):
        await pen.put(
            1, f"{pen.stream}.é{n}", {"A": "1", "a": "2", "Nats-Msg-Id": f"m{n}", "Nats-Expected-Stream": pen.stream}
        )
        await pen.put(1, f"{pen.stream}.e", text="")


async def schedules(pen: Pen) -> None:
    await pen.put(10, f"{pen.stream}.out")
    await pen.put(
        1, f"{pen.stream}.s", {"Nats-Schedule": "@at 2199-01-01T00:00:00Z", "Nats-Schedule-Target": f"{pen.stream}.out"}
    )


def kv(history: int, **config: Any) -> dict[str, Any]:
    """The configuration of a bucket that clients make, without its name and subjects."""
    given = {"max_msgs_per_subject": history, "allow_rollup_hdrs": True, "deny_delete": True, "discard": "new"}
    return {**given, "allow_direct": True, **config}


async def keys(pen: Pen) -> None:
    bucket = f"$KV.{pen.stream.removeprefix('KV_')}"
    for n in range(30):
        if n % 11 == 7:
            await pen.put(1, f"{bucket}.k{n % 6}", {"KV-Operation": "DEL"}, text="")
        elif n % 13 == 9:
            await pen.put(1, f"{bucket}.k{n % 6}", {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}, text="")
        else:
            await pen.put(1, f"{bucket}.k{n % 6}", text=f"v{n}")


async def cleared(pen: Pen) -> None:
    """Purge markers by their subjects, as `nats kv compact` does."""
    await pen.purge(filter=f"$KV.{pen.stream.removeprefix('KV_')}.k1")


def stored(*removed: str, **put: bytes) -> Act:
    async def act(pen: Pen) -> None:
        client = await nats.connect(str(pen.bench.url))
        objects = await client.jetstream(timeout=PATIENCE).object_store(pen.stream.removeprefix("OBJ_"))
        for name in removed:
            await objects.delete(name)
        for name, content in put.items():
            await objects.put(name, content)
        await client.close()

    return act


def two(count: int) -> Act:
    return acts(puts(count, subject="ZOO.0.a"), puts(count, subject="ZOO.1.a"))


def retires(first: int) -> Act:
    async def act(pen: Pen) -> None:
        pen.bench.chains.raise_floor(pen.bench.chain(pen.stream), first)

    return act


def loses(which: Callable[[SequenceRange], bool]) -> Act:
    async def act(pen: Pen) -> None:
        for ref in (ref for ref in pen.bench.refs(pen.stream) if which(ref.coverage)):
            pen.bench.objects.delete(ref.key)

    return act


async def cuts(pen: Pen) -> None:
    await until_cut(pen.bench, pen.feed | feed_of(pen.stream, 2))


def set_back(sequence: int) -> Act:
    """Let the stream end at `sequence` again, as on a server with an older copy of its disk."""

    async def act(pen: Pen) -> None:
        held = [row for row in await back.contents(pen.bench, pen.stream) if row.sequence <= sequence]
        await back.comes_back(pen.bench, pen.stream, held, to_sequence=sequence)

    return act


def resolves(sequence: int | None = None) -> Act:
    """Decide as `floe egress resolve --new-incarnation` does."""

    async def act(pen: Pen) -> None:
        settings = pen.bench.settings(pen.feed)
        async with open_context(settings) as context:
            cases = [await load_case(context, each) for each in partitions_of(SITE, settings.egress.feeds[0])]
            await decide_incarnation(context, cases, plan_incarnation(cases, sequence))

    return act


async def forks(pen: Pen) -> None:
    """Recreate the stream and archive it, then bring the former one back."""
    bench, held = pen.bench, await back.contents(pen.bench, pen.stream)
    await bench.recreate(pen.stream, [b"x"] * 4, storage="file")
    async with bench.egress(pen.feed):
        await bench.archived_to(pen.stream, 4, incarnation=1)
    await back.comes_back(bench, pen.stream, held, incarnation=0)


SET_BACK: dict[str, Any] = {"between": acts(set_back(20), puts(15), resolves()), "incarnation": 1}

ALL_CONSUMERS: dict[str, dict[str, Any]] = {
    "clean": EXPLICIT,
    "all": {"ack_policy": "all"},
    "none": {"ack_policy": "none"},
    "filtered": {**EXPLICIT, "filter_subjects": ["ZOO.k1", "ZOO.k2"]},
    "start": {**EXPLICIT, "deliver_policy": "by_start_sequence", "opt_start_seq": 7},
    "last": {**EXPLICIT, "deliver_policy": "last_per_subject", "filter_subject": "ZOO.>"},
    "new": {**EXPLICIT, "deliver_policy": "new"},
    "paused": {**EXPLICIT, "pause_until": "2199-01-01T00:00:00Z"},
    "patient": {**EXPLICIT, "max_deliver": 5, "backoff": [10**9, 2 * 10**9]},
    "limited": {**EXPLICIT, "max_ack_pending": 7, "max_waiting": 9, "inactive_threshold": HOUR, "metadata": {"a": "b"}},
    "grouped": {**EXPLICIT, "priority_groups": ["a"], "priority_policy": "overflow"},
    "push": {**EXPLICIT, "deliver_subject": "zoo.nobody.here"},
}

INTEREST: dict[str, Any] = {"config": {"retention": "interest"}, "before": puts(0)}
INTEREST["then"] = acts(puts(30), takes("app", 10))
KINDS: dict[str, Kind] = {
    # Limits and settings
    "plain": Kind(),
    "odd messages": Kind(before=odd),
    "described and kept": Kind(
        {"compression": "s2", "description": "é", "metadata": {"own": "x"}, "max_age": HOUR, "deny_purge": True},
        before=puts(text="larger than any of later"),
        last=edits(max_msg_size=9),
    ),
    "max_msgs": Kind({"max_msgs": 20}, after=puts(20), feed=NEVER, notes=["are not sent: max_msgs 20"]),
    "max_bytes": Kind({"max_bytes": 1500}),
    "one of each": Kind({"max_msgs_per_subject": 1, "allow_rollup_hdrs": True}, before=rolls("all"), after=rolls()),
    "full": Kind({"max_msgs": 40, "max_msgs_per_subject": 8, "discard": "new", "discard_new_per_subject": True}),
    "begins at 1000": Kind({"first_seq": 1000}),
    "never used": Kind({"first_seq": 1000}, before=puts(0), after=puts(0)),
    "never used from 1": Kind(before=puts(0), after=puts(0)),
    "sealed": Kind(last=edits(sealed=True)),
    "expired before the next": Kind(
        {"allow_msg_ttl": True, "max_msgs_per_subject": 2},
        before=puts(1, keys=1),
        then=acts(puts(1, keys=1, headers={"Nats-TTL": "2s"}), left(1)),
        after=puts(1, keys=1),
    ),
    "ttl": Kind(
        {"allow_msg_ttl": True, "subject_delete_marker_ttl": 60 * 10**9, "max_age": HOUR},
        before=puts(headers={"Nats-TTL": "1h"}),
    ),
    "transformed": Kind(
        {"subject_transform": {"src": ">", "dest": "t.>"}, "republish": {"src": ">", "dest": "zoo.again.ZOO.>"}},
        asks={"allow_elsewhere": True},
    ),
    "counters": Kind({"allow_msg_counter": True}, before=counters, after=counters),
    "batches": Kind({"allow_atomic": True}, before=batches),
    "schedules": Kind(
        {"allow_msg_schedules": True, "allow_msg_ttl": True}, before=schedules, after=puts(3, subject="ZOO.out")
    ),
    # Deleted messages
    "deleted": Kind(then=deletes(3, 4, 17)),
    "deleted since": Kind(lost=deletes(5, 6), extra="messages deleted since"),
    "deleted, not captured": Kind(then=deletes(3, 4, 17), feed=NEVER, extra="no deletions were captured"),
    "purged": Kind(last=purges()),
    # Retention
    "work queue": Kind({"retention": "workqueue"}),
    "interest of two": Kind(**INTEREST, consumers={"app": EXPLICIT, "late": EXPLICIT}, last=takes("late", 4)),
    "interest, not captured": Kind(**INTEREST, consumers={"app": EXPLICIT}, last=takes("app", 12), feed=NEVER),
    # Buckets
    "KV of history": Kind(kv(5), before=keys, after=keys, name="KV_ZOO"),
    "KV compacted": Kind(kv(5), before=keys, after=puts(0), then=cleared, name="KV_ZOO"),
    "objects": Kind(
        kv(1, max_msgs_per_subject=-1, deny_delete=False),
        before=stored(o0=b"x" * 200_000, o1=b"y" * 200_000, o2=b"z"),
        after=stored("o1", o2=b"new" * 1000),
        name="OBJ_ZOO",
        feed={},
    ),
    # Neighbours
    "sources": Kind(
        {"sources": [{"name": "SOURCE"}], "subjects": []}, before=puts(0), after=puts(0), asks={"allow_elsewhere": True}
    ),
    "mirror": Kind(
        {"mirror": {"name": "SOURCE"}},
        before=puts(0),
        after=puts(0),
        same_config=False,
        notes=["mirror is left out", "the stream the subject"],
    ),
    # Consumers
    "consumers": Kind(
        consumers=ALL_CONSUMERS,
        then=acts(takes("clean", 12), takes("all", 4), takes("filtered", 3)),
        asks={"allow_elsewhere": True},
    ),
    "not acknowledged": Kind(
        consumers={"app": EXPLICIT},
        then=takes("app", 10, 4),
        positions=False,
        notes=["consumer app: 6 messages delivered and not acknowledged", "so all after 4 are delivered again"],
    ),
    # Limits that were changed
    "max_msgs lifted": Kind({"max_msgs": 20}, then=puts(15), after=acts(edits(max_msgs=-1), puts(10))),
    "max_bytes lifted, by default": Kind(
        {"max_bytes": 1500}, then=puts(15), after=acts(edits(max_bytes=-1), puts(10)), feed={}
    ),
    "max_age lifted": Kind(
        {"max_age": 2 * 10**9}, before=puts(0), then=puts(30), after=acts(left(0), edits(max_age=0), puts(10))
    ),
    "max_bytes lowered": Kind(after=acts(edits(max_bytes=1500), puts(10))),
    # Up to T
    "T, deleted later": Kind(
        then=deletes(5),
        after=puts(0),
        last=acts(deletes(6, 7), purges(seq=4)),
        to_t=True,
        notes=["deletions are those of", "before the point in time"],
    ),
    "T, deleted before and later": Kind(then=deletes(5), last=deletes(6, 7, 33), to_t=True),
    "T, read later": Kind(
        consumers={"app": EXPLICIT}, then=takes("app", 10), after=puts(0), last=takes("app", 15), to_t=True
    ),
    "T, KV put anew while egress was away": Kind(
        kv(3), before=keys, after=keys, name="KV_ZOO", to_t=True, notes=["had left the stream before"], same_state=False
    ),
    # Histories
    "set back": Kind(
        **SET_BACK,
        notes=["0000/0 reaches 30, and 0001 continues it only up to 20: 10 sequences of 21..30 of another history"],
    ),
    "partitions set back": Kind(
        {"subjects": ["ZOO.0.>", "ZOO.1.>"]},
        before=two(9),
        between=acts(set_back(12), two(3), resolves()),
        after=puts(0),
        feed={**feed_of("ZOO", 2), "capture_deletes": "10m"},
        incarnation=1,
        cut=2,
    ),
    "forked": Kind(between=acts(forks, puts(5), resolves()), incarnation=2),
    "set back, begun later": Kind(
        between=acts(set_back(20), puts(15), resolves(26)),
        incarnation=1,
        missing="that it continues is the same stream only up to 20",
    ),
    "cut anew": Kind(before=two(9), then=deletes(4), between=cuts, after=two(5), incarnation=1, cut=2),
    "T, before it was set back": Kind(**SET_BACK, to_t=True),
    # Lost from the archive
    "retired": Kind(lost=retires(11), missing="after retention of the archive, and the stream at 1"),
    "a hole": Kind(then=puts(5), lost=loses(lambda coverage: coverage.last == 30), missing="no segment covers 1..30"),
    "a lost tail": Kind(lost=loses(lambda coverage: coverage.last == 40), missing="31..40 is missing, up to"),
    # Parts of a stream
    "in the middle": Kind(feed=LATER, missing="begins at 11, and the stream at 1"),
    "in the middle, purged since": Kind(feed=LATER, then=purges(seq=21)),
    "sampled": Kind(feed=SAMPLED, before=puts(30, text="{}"), missing="messages left out (sampled_out)"),
    "partitions that leave out": Kind(
        before=acts(two(9), puts(5, subject="ZOO.other")),
        after=puts(2, subject="ZOO.0.b"),
        cut=2,
        feed={**feed_of("ZOO", 2), "capture_deletes": "10m"},
        missing="the feed is filtered",
    ),
}


# The zoo


async def made(bench: Bench, kind: Kind, source: str, **config: Any) -> Pen:
    stream = kind.name.replace("ZOO", unique("Z"))
    subjects = {"KV_": [f"$KV.{stream[3:]}.>"], "OBJ": [f"$O.{stream[4:]}.C.>", f"$O.{stream[4:]}.M.>"]}
    given = {"subjects": subjects.get(stream[:3], [f"{stream}.>"]), "storage": "file", **kind.config, **config}
    if "mirror" in given:
        del given["subjects"]
    await bench.client.api(f"STREAM.CREATE.{stream}", {"name": stream, **named(given, stream, source)})
    for name, consumer in kind.consumers.items():
        await create_consumer(bench.client, stream, {"durable_name": name, **named(consumer, stream)})
    return Pen(bench, stream, named({"stream": stream, **kind.feed}, stream))


async def frozen(bench: Bench, pens: Mapping[str, Pen], acts: Callable[[Kind], Act | None], *, is_later: bool) -> None:
    """Let egress archive all of them, run the `acts` of each with all archived, and drain."""
    feeds = [p.feed | (feed_of(p.stream, 2) if is_later and KINDS[k].cut == 2 else {}) for k, p in pens.items()]
    leases = {"lease_bucket": f"{bench.lease_bucket}_ZOO", "lease_ttl": "20s"}  # not lost under the load of all kinds
    async with bench.egress(*feeds, shutdown_timeout=f"{PATIENCE:.0f}s", **leases) as running:
        for pen in pens.values():
            await soon(partial(is_read, running, pen.stream))

        async def work(name: str, pen: Pen) -> None:
            kind = KINDS[name]
            parts, number = (kind.cut if is_later or "partitions" in pen.feed else 1), kind.incarnation * is_later
            chains = [bench.chain(pen.stream, number).with_partition(part) for part in range(parts)]
            await soon(lambda: archived(bench, chains, pen), every=0.2)
            if (act := acts(kind)) is not None:
                await act(pen)

        await asyncio.gather(*(work(name, pen) for name, pen in pens.items()))


def is_read(running: Running, stream: str) -> bool:
    return running.state(stream) in ("reading", "idle")


async def archived(bench: Bench, chains: Sequence[Any], pen: Pen) -> bool:
    info = await stream_info(bench.client, pen.stream)
    documents = [bench.chains.read_chain(chain) for chain in chains]
    firsts = [document.first for document in documents if document is not None]
    ends = [max((r.coverage.last for r in bench.store.list(chain)), default=0) for chain in chains]
    return len(firsts) == len(chains) and all(
        end >= info.last_sequence or first > info.last_sequence for first, end in zip(firsts, ends, strict=True)
    )


def problems(kind: Kind, held: Truth, found: Truth, plan: RestorePlan, report: RestoreReport) -> Iterator[str]:
    """The differences of a restored stream that the plan does not state."""
    was, now = ({row.sequence: row for row in each.rows} for each in (held, found))
    lost, extra, lines = was.keys() - now.keys(), now.keys() - was.keys(), [*plan.notes, *plan.lossy]
    if altered := [sequence for sequence in was.keys() & now.keys() if was[sequence] != now[sequence]]:
        yield f"altered: {altered[:5]}"
    for count, text, what in ((len(lost), kind.missing, "missing"), (len(extra), kind.extra, "not deleted")):
        if bool(count) != bool(text):
            yield f"{count} {what}, told: {text or 'nothing'!r}: {sorted(lost | extra)[:5]} …"
        elif count and not any(text in line and is_number(line, count) for line in lines):
            yield f"{count} {what}, and no line that has {text!r} and this number"
    if bool(lost) != bool(plan.lossy):
        yield f"{len(lost)} missing, lossy: {plan.lossy}"
    if kind.same_state and not lost and not extra and held.state != found.state:
        yield f"state {held.state}, restored {found.state}"
    if kind.same_config and held.config != found.config:
        differing = {
            key for key in held.config.keys() | found.config.keys() if held.config.get(key) != found.config.get(key)
        }
        yield f"configuration: { ({key: (held.config.get(key), found.config.get(key)) for key in differing}) }"
    if kind.positions and held.positions != found.positions:
        yield f"consumers {held.positions}, restored {found.positions}"
    yield from (f"not told: {text}" for text in kind.notes if not any(text in line for line in lines))
    if report.exit_code:
        yield f"exit {report.exit_code}: {[*report.lines()]}"


def is_number(line: str, count: int) -> bool:
    """True if `line` has this number, or an upper bound of it."""
    numbers = [int(text.replace(",", "")) for text in re.findall(r"(?<![\d.])\d[\d,]*(?![\d.])", line)]
    bounds = [int(text.replace(",", "")) for text in re.findall(r"(?:up to|at most) (\d[\d,]*)", line)]
    return count in numbers or any(bound >= count for bound in bounds)


async def visited(bench: Bench, kinds: Mapping[str, Kind], **config: Any) -> dict[str, list[str]]:
    """The problems of each kind that has some, with `config` in each of them."""
    source = await bench.filled([b"%d" % n for n in range(30)], storage="file", **config)
    pens = {name: await made(bench, kind, source, **config) for name, kind in kinds.items()}

    async def every(acts: Callable[[Kind], Act | None]) -> None:
        todo = [(act, pen) for name, pen in pens.items() if (act := acts(kinds[name])) is not None]
        await asyncio.gather(*(act(pen) for act, pen in todo))

    await every(lambda kind: kind.before)
    await frozen(bench, pens, lambda kind: kind.then, is_later=False)
    at_t = {name: await truth(bench, pen.stream) for name, pen in pens.items()}
    await every(lambda kind: kind.between)
    await every(lambda kind: kind.after)
    await frozen(bench, pens, lambda kind: kind.last, is_later=True)
    await every(lambda kind: kind.lost)
    at_end = {name: await truth(bench, pen.stream) for name, pen in pens.items()}
    for pen in pens.values():
        await bench.delete_stream(pen.stream)
    turns, wrong = asyncio.Semaphore(AT_ONCE), dict[str, list[str]]()

    async def compare(name: str, kind: Kind, pen: Pen) -> None:
        async with turns:
            held = at_t[name] if kind.to_t else at_end[name]
            asked = {**kind.asks, **({"to_time_ns": held.at_ns} if kind.to_t else {})}
            plan = await back.planned(bench, pen.stream, **asked)
            report = await back.restored(bench, pen.stream, allow_lossy=bool(plan.lossy), **asked)
            found = [*problems(kind, held, await truth(bench, pen.stream), plan, report)]
            if found:
                wrong[name] = [*found, f"plan: {[*plan.notes, *plan.lossy]}"]

    await asyncio.gather(*(compare(name, kinds[name], pen) for name, pen in pens.items()))
    return wrong


async def test_a_stream_comes_back_as_it_was_or_the_plan_has_the_difference(bench: Bench) -> None:
    wrong = await visited(bench, KINDS)
    assert not wrong, "\n".join(f"{name}:\n  " + "\n  ".join(texts) for name, texts in wrong.items())


HERD = ("plain", "deleted", "max_msgs", "KV of history", "consumers", "interest of two", "work queue", "cut anew")


@pytest.mark.timing  # three servers with late heartbeats elect leaders for minutes
async def test_a_stream_of_three_servers_comes_back(clustered: Bench) -> None:
    wrong = await visited(clustered, {n: KINDS[n] for n in (*HERD, "begins at 1000", "T, read later")}, num_replicas=3)
    assert not wrong, wrong


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let egress drain with time for its captures, as the capture at T is compared."""
    monkeypatch.setattr("egress.captures.DRAIN_TIMEOUT_S", PATIENCE)
