"""The demo's last step: reads every chain in three places, by Floe's own code and by Spark, and compares them."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field

from common.archive.segment import Reason, SegmentRef
from common.archive.store import SegmentStore
from common.chain import Chain
from common.cli import print_json
from common.errors import FloeError
from common.exits import exit_with_code
from common.nats.client import FloeClient
from common.open import open_chains, open_store
from common.sequences import Stretch, cover
from common.settings import loader
from compaction.spark import Spark
from infra.demo.world import (
    ADVISORIES,
    AWKWARD,
    NODES,
    SITES,
    STREAMS,
    SUBJECT_PREFIX,
    TARGET_STREAM,
    DemoWorld,
    run_command,
)
from infra.oracle import (
    OracleResult,
    TargetTraces,
    Trace,
    allow_left_out,
    archive_holes,
    archived_messages,
    compare,
    prefix_subject,
    read_source_trace,
    read_stream,
    read_target_traces,
    sum_comparisons,
)

MIB = 2**20
COLUMNS = ("chain", "source", "left out", "archive", "target", "restored", "segments", "ratio", "behind")


@dataclass(frozen=True, slots=True)
class ArchivedChain:
    """One chain of the archive, read through the cover rule. `segments`: how many by level.

    `stored_bytes`: of the segments that the cover takes; `merged_bytes`: of those that have been merged into others.
    `left_out`: messages left out on purpose, according to the ledgers of those segments.
    """

    trace: Trace = field(default_factory=Trace)
    segments: Mapping[int, int] = field(default_factory=dict)
    stored_bytes: int = 0
    merged_bytes: int = 0
    left_out: int = 0
    holes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChainReadings:
    """The messages of one chain in three places.

    `delays`: milliseconds from source to target, unsorted. `restored`: messages that were restored if the site lost its
    server, else None.
    """

    chain: Chain
    source: Trace
    archived: ArchivedChain
    target: Trace
    delays: Sequence[int] = ()
    restored: int | None = None

    def comparisons(self) -> list[OracleResult]:
        """Compare the archive with the source, the target with the archive, and the target with the source.

        Messages that the source has deleted since, by a limit or by hand, are still in the archive and the target;
        between those two nothing may differ. The number of missing messages must be the ledgers' number of sampled-out
        ones.
        """
        name = f"{self.chain.site}/{self.chain.feed}"
        return [
            self._from_source(self.archived.trace, f"{name} source to archive"),
            compare(self.archived.trace, self.target, name=f"{name} archive to target"),
            self._from_source(self.target, f"{name} source to target"),
        ]

    def _from_source(self, found: Trace, name: str) -> OracleResult:
        return allow_left_out(compare(self.source, found, name=name, may_be_gone=True), self.archived.left_out)

    def compression_ratio(self) -> float:
        """Return the bytes of the messages over those of their segments; 0 without segments."""
        stored = self.archived.stored_bytes
        return self.archived.trace.raw_bytes / stored if stored else 0.0

    def delay_quantile(self, fraction: float) -> float:
        """Return the seconds that `fraction` (0 to 1) of the messages did not exceed; 0 without messages."""
        ordered = sorted(self.delays)
        return ordered[min(int(len(ordered) * fraction), len(ordered) - 1)] / 1000 if ordered else 0.0

    def row(self) -> tuple[str, ...]:
        return (
            f"{self.chain.site}/{self.chain.feed}",
            f"{len(self.source):,}",
            f"{self.archived.left_out:,}",
            f"{len(self.archived.trace):,}",
            f"{len(self.target):,}",
            "–" if self.restored is None else f"{self.restored:,}",
            "+".join(str(self.archived.segments.get(level, 0)) for level in (0, 1)),
            f"{self.compression_ratio():.1f}x",
            f"{self.delay_quantile(0.5):.1f} s",
        )


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result of a demo. `problems`: everything wrong besides messages; `seconds`: the duration of the whole."""

    readings: tuple[ChainReadings, ...]
    published: int
    publishing_seconds: float
    seconds: float
    problems: tuple[str, ...] = ()

    def comparison(self) -> OracleResult:
        """Return the total over all chains: of the three comparisons of a chain, the worst counts."""
        return sum_comparisons(worst_comparison(readings.comparisons()) for readings in self.readings)

    @property
    def is_ok(self) -> bool:
        return self.comparison().is_ok and not self.problems and bool(self.readings)

    def rows(self) -> list[tuple[str, ...]]:
        return [readings.row() for readings in self.readings]

    def summary_lines(self) -> tuple[str, ...]:
        target = sum(len(r.target) for r in self.readings)
        archived = [readings.archived for readings in self.readings]
        raw, stored = sum(each.trace.raw_bytes for each in archived), sum(each.stored_bytes for each in archived)
        waiting, left_out = sum(each.merged_bytes for each in archived), sum(each.left_out for each in archived)
        gone = sum(readings.comparisons()[0].gone for readings in self.readings)
        latest = max((readings.delay_quantile(1.0) for readings in self.readings), default=0.0)
        return (
            f"{self.published:,} messages published in {self.publishing_seconds:.0f} s, {target:,} arrived",
            f"{left_out:,} of them were sampled out: source = stored + sampled out, by the segments' ledgers",
            f"{gone:,} of them are no longer in the sources: deleted, or over a limit per subject",
            f"{raw / MIB:.1f} MiB of messages became {stored / MIB:.1f} MiB of segments;"
            f" {waiting / MIB:.1f} MiB of merged ones wait for the end of their grace",
            f"behind: the median delay of a chain; all messages arrived within {latest:.1f} s",
        )

    def to_json(self) -> dict[str, object]:
        comparison = self.comparison()
        return {
            "ok": self.is_ok,
            "verdict": comparison.summary(),
            **{k: v for k, v in asdict(comparison).items() if k not in ("name", "examples")},
            "lost": comparison.lost,
            "examples": list(comparison.examples),
            "problems": list(self.problems),
            "published": self.published,
            "publishing_seconds": round(self.publishing_seconds, 3),
            "seconds": round(self.seconds, 3),
            "chains": [_chain_json(readings) for readings in self.readings],
        }


def worst_comparison(comparisons: Sequence[OracleResult]) -> OracleResult:
    return max(comparisons, key=lambda c: (c.lost + c.repeated + c.out_of_order + c.altered + c.unexpected, c.found))


def _chain_json(readings: ChainReadings) -> dict[str, object]:
    archived = readings.archived
    return {
        "chain": str(readings.chain),
        "source": len(readings.source),
        "left_out": archived.left_out,
        "archive": len(archived.trace),
        "target": len(readings.target),
        "restored": readings.restored,
        "segments": {str(level): count for level, count in sorted(archived.segments.items())},
        "raw_bytes": archived.trace.raw_bytes,
        "stored_bytes": archived.stored_bytes,
        "waiting_bytes": archived.merged_bytes,
        "seconds_behind": {"median": readings.delay_quantile(0.5), "most": readings.delay_quantile(1.0)},
    }


def read_archive(world: DemoWorld) -> dict[Chain, ArchivedChain]:
    """Read all chains in the bucket, with subjects as in the target."""
    settings = loader.load(str(world.central_config))
    with closing(open_store(settings)) as store:
        return {chain: _read_chain(store, chain) for chain in open_chains(settings).chains()}


def _read_chain(store: SegmentStore, chain: Chain) -> ArchivedChain:
    refs = store.list(chain)
    taken = {stretch.segment.key: stretch.segment.size for stretch in cover(refs, 1)}
    return ArchivedChain(
        Trace.of(archived_messages(store, chain), prefix_subject(SUBJECT_PREFIX)),
        Counter(ref.level for ref in refs),
        sum(taken.values()),
        sum(ref.size for ref in refs if ref.key not in taken),
        sum(_left_out(store, stretch) for stretch in cover(refs, 1)),
        tuple(str(hole) for hole in archive_holes(store, chain)),
    )


def _left_out(store: SegmentStore, stretch: Stretch[SegmentRef]) -> int:
    footer = store.footer(stretch.segment)
    chosen = sum(footer.ledger.counts.get(reason, 0) for reason in (Reason.SAMPLED_OUT, Reason.TOO_OLD))
    if stretch.rows == footer.coverage or not chosen:
        return chosen
    with store.open(stretch.segment, rows=stretch.rows) as reader:
        # The ledger has no numbers for a part of a segment. The sampled stream deletes nothing, so all other sequences
        # were left out.
        return len(stretch.rows) - sum(batch.num_rows for batch in reader.batches(stretch.rows))


async def read_source(clients: Mapping[str, FloeClient], chain: Chain) -> Trace:
    """Read the source of a chain, with subjects as in the target."""
    return await read_source_trace(clients[chain.site], chain.feed, prefix_subject(SUBJECT_PREFIX))


async def read_chains(
    clients: Mapping[str, FloeClient],
    archive: Mapping[Chain, ArchivedChain],
    sources: Mapping[Chain, Trace],
    restored: Mapping[Chain, int],
) -> tuple[list[ChainReadings], list[str]]:
    """Read all chains; return them, and the problems found. `sources`: traces of sources that were read before they
    were lost; `restored`: the number of their messages that were restored.
    """
    arrived = await read_target_traces(clients["central"], TARGET_STREAM)
    expected = [Chain(site, stream) for site in clients if site != "central" for stream in STREAMS]
    problems = _unexpected_chains(expected, archive, arrived)
    readings = []
    for chain in expected:
        source = sources.get(chain) or await read_source(clients, chain)
        held = archive.get(chain, ArchivedChain())
        problems += [f"{chain}: a hole in the archive: {hole}" for hole in held.holes]
        target, delays = arrived.traces.get(chain, Trace()), arrived.delays.get(chain, ())
        readings.append(ChainReadings(chain, source, held, target, delays, restored.get(chain)))
    return readings, problems


async def count_advisories(clients: Mapping[str, FloeClient]) -> str:
    counts: Counter[str] = Counter()
    for site, client in clients.items():
        if site != "central":
            await read_stream(client, ADVISORIES, lambda message: counts.update([json.loads(message.payload)["event"]]))
    return "advisories: " + ", ".join(f"{count:,} {event}" for event, count in counts.items())


def _unexpected_chains(expected: list[Chain], archive: Mapping[Chain, object], arrived: TargetTraces) -> list[str]:
    found = sorted({*archive, *arrived.traces} - set(expected))
    problems = [f"{chain}: a chain of no site" for chain in found]
    if arrived.foreign:
        problems.append(f"{arrived.foreign} messages in {TARGET_STREAM} without provenance")
    return problems


async def count_with_spark(
    world: DemoWorld, readings: list[ChainReadings], archived_since: Mapping[Chain, int]
) -> tuple[str, list[str]]:
    """Count the archive's rows with a Spark query, in another process; return a sentence about it, and the differences
    from `readings`.

    `archived_since`: messages by chain that were archived after those readings.
    """
    out = await run_command(world.folder, "spark query", "infra.demo.compare", str(world.central_config))
    try:
        rows = {Chain.parse(row["chain"]): row for row in json.loads(out)}
    except (ValueError, KeyError, TypeError) as error:
        raise FloeError(f"spark query: expected JSON, found {out[:80]!r}", code="E-DEMO") from error
    problems = []
    for reading in readings:
        counted = rows.get(reading.chain, {}).get("messages", 0)
        if counted != (expected := len(reading.archived.trace) + archived_since.get(reading.chain, 0)):
            problems.append(f"{reading.chain}: expected {expected} rows, Spark found {counted}")
    total = sum(row["messages"] for row in rows.values())
    senders = sum(row.get("subjects", 0) for chain, row in rows.items() if chain.feed == NODES)
    return f"Spark, reading the segments: {total:,} messages, {senders:,} nodes registered", problems


SPARK_QUERY = """
SELECT site, feed, incarnation, partition, count(*) AS messages, count(DISTINCT subject) AS subjects
FROM {archive} GROUP BY site, feed, incarnation, partition
"""


def spark_counts(config: str) -> list[dict[str, object]]:
    """Return the number of messages and of their subjects for each chain; empty if the archive holds no message.

    Raises ConfigError if PySpark or Java is missing, Unavailable if Spark does not start.
    """
    with Spark(loader.load(config)) as spark:
        session = spark.session()
        archive = session.read.format("floe").option("config", config).load()
        rows = session.sql(SPARK_QUERY, archive=archive).collect()
    chains = (str(Chain(row.site, row.feed, row.incarnation, row.partition)) for row in rows)
    return [
        {"chain": chain, "messages": row.messages, "subjects": row.subjects}
        for chain, row in zip(chains, rows, strict=True)
    ]


DRILL_FEED = (SITES[0], AWKWARD)  # the feed that holds every kind of message that is hard to carry


async def run_drill(world: DemoWorld) -> tuple[str, list[str]]:
    """Restore one feed into a scratch stream; return a sentence about it, and the differences from the archive.

    Raises FloeError if the drill fails, or its output cannot be read.
    """
    site, feed = DRILL_FEED
    command = ("floe", "drill", "-c", str(world.central_config), f"{site}/{feed}", "--json")
    out = await run_command(world.folder, "drill", *command)
    try:
        found = json.loads(out)
        rows, seconds, is_well = found["rows"], found["seconds"], found["ok"]
    except (ValueError, KeyError, TypeError) as error:
        raise FloeError(f"floe drill --json: expected a report, found {out[:80]!r}", code="E-DEMO") from error
    problems = [] if is_well and rows else [f"drill of {site}/{feed}: {out[:500]}"]
    return f"{site}/{feed}: {rows:,} messages restored into a scratch stream in {seconds:.1f} s", problems


if __name__ == "__main__":
    with exit_with_code():
        print_json(spark_counts(sys.argv[1]))
