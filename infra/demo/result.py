"""What the demo found out: three readings of every chain, compared, and the figures beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from common.chain import Chain
from infra.oracle import Comparison, Trace, allow, compare, total

MIB = 2**20
COLUMNS = ("chain", "source", "left out", "archive", "target", "segments", "MiB", "ratio", "behind")


@dataclass(frozen=True, slots=True)
class Readings:
    """One chain as it stands in three places.

    `delays`: milliseconds from source to target, unsorted. `segments`: how many by level. `stored_bytes`: of
    the segments that account for the chain; `waiting_bytes`: of those that were merged into others since.
    `left_out`: messages that were left out by choice, as the ledgers of the segments say.
    """

    chain: Chain
    source: Trace
    archive: Trace
    target: Trace
    delays: Sequence[int] = ()
    segments: Mapping[int, int] = field(default_factory=dict)
    stored_bytes: int = 0
    waiting_bytes: int = 0
    left_out: int = 0

    def compared(self) -> list[Comparison]:
        """The archive against the source, the target against the archive, and the target against the source.

        What the source has deleted since, by a limit or by hand, is still in the archive and the target;
        between those two nothing may differ. As much must be missing as the ledgers say was sampled out.
        """
        name = f"{self.chain.site}/{self.chain.feed}"
        return [
            self._from_source(self.archive, f"{name} source to archive"),
            compare(self.archive, self.target, name=f"{name} archive to target"),
            self._from_source(self.target, f"{name} source to target"),
        ]

    def _from_source(self, found: Trace, name: str) -> Comparison:
        return allow(compare(self.source, found, name=name, may_be_gone=True), self.left_out)

    def ratio(self) -> float:
        """How many times smaller the segments are than their messages; 0 without segments."""
        return self.archive.raw_bytes / self.stored_bytes if self.stored_bytes else 0.0

    def delay(self, share: float) -> float:
        """Seconds behind that `share` (0 to 1) of the messages did not exceed; 0 without messages."""
        ordered = sorted(self.delays)
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)] / 1000 if ordered else 0.0

    def row(self) -> tuple[str, ...]:
        """This chain's line of the table."""
        return (
            f"{self.chain.site}/{self.chain.feed}",
            f"{len(self.source):,}",
            f"{self.left_out:,}",
            f"{len(self.archive):,}",
            f"{len(self.target):,}",
            "+".join(str(self.segments.get(level, 0)) for level in (0, 1)),
            f"{self.stored_bytes / MIB:.1f}",
            f"{self.ratio():.1f}x",
            f"{self.delay(0.5):.1f} s",
        )


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The end of a demo. `problems`: what else is wrong, beside messages; `seconds`: how long all took."""

    readings: tuple[Readings, ...]
    published: int
    publishing_seconds: float
    seconds: float
    problems: tuple[str, ...] = ()

    def comparison(self) -> Comparison:
        """All chains together: of the three comparisons of a chain the worst counts."""
        return total(worst(readings.compared()) for readings in self.readings)

    @property
    def ok(self) -> bool:
        return self.comparison().ok and not self.problems and bool(self.readings)

    def rows(self) -> list[tuple[str, ...]]:
        """The lines of the table."""
        return [readings.row() for readings in self.readings]

    def figures(self) -> tuple[str, ...]:
        """What the table leaves out, each as a sentence."""
        target = sum(len(r.target) for r in self.readings)
        raw, stored = (
            sum(r.archive.raw_bytes for r in self.readings),
            sum(r.stored_bytes for r in self.readings),
        )
        waiting = sum(readings.waiting_bytes for readings in self.readings)
        left_out = sum(readings.left_out for readings in self.readings)
        gone = sum(readings.compared()[0].gone for readings in self.readings)
        latest = max((readings.delay(1.0) for readings in self.readings), default=0.0)
        return (
            f"{self.published:,} messages published in {self.publishing_seconds:.0f} s, {target:,} arrived",
            f"{left_out:,} of them were sampled out: source = stored + sampled out, by the segments' ledgers",
            f"{gone:,} of them the sources no longer hold: deleted, or over a limit per subject",
            f"{raw / MIB:.1f} MiB of messages are {stored / MIB:.1f} MiB of segments;"
            f" {waiting / MIB:.1f} MiB of merged ones wait until their grace is over",
            f"behind: half of a chain's messages at most as the table says, all at most {latest:.1f} s",
        )

    def to_json(self) -> dict[str, object]:
        """The same for programs."""
        comparison = self.comparison()
        return {
            "ok": self.ok,
            "verdict": comparison.line(),
            **{k: v for k, v in asdict(comparison).items() if k not in ("name", "examples")},
            "lost": comparison.lost,
            "examples": list(comparison.examples),
            "problems": list(self.problems),
            "published": self.published,
            "publishing_seconds": round(self.publishing_seconds, 3),
            "seconds": round(self.seconds, 3),
            "chains": [_chain_json(readings) for readings in self.readings],
        }


def worst(comparisons: Sequence[Comparison]) -> Comparison:
    """The comparison with the most damage; of equals the last."""
    return max(
        comparisons, key=lambda c: (c.lost + c.repeated + c.out_of_order + c.altered + c.unexpected, c.found)
    )


def _chain_json(readings: Readings) -> dict[str, object]:
    return {
        "chain": str(readings.chain),
        "source": len(readings.source),
        "left_out": readings.left_out,
        "archive": len(readings.archive),
        "target": len(readings.target),
        "segments": {str(level): count for level, count in sorted(readings.segments.items())},
        "raw_bytes": readings.archive.raw_bytes,
        "stored_bytes": readings.stored_bytes,
        "waiting_bytes": readings.waiting_bytes,
        "seconds_behind": {"median": readings.delay(0.5), "most": readings.delay(1.0)},
    }
