"""Random archives against a naive model: the results of compaction and of verify.

The model reads the files with pyarrow, parses their names itself, and works on plain sets of sequences. An archive
has overlaps, empty segments, several levels, late rows, missing rows, forks, damaged files, foreign objects,
two incarnations, gaps accepted and not.
"""

import json
import random
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.archive.checks import find_foreign_keys
from common.archive.documents import AcceptedGap, ChainDocument, ChainStore, StreamDocument
from common.archive.segment import Reason
from common.chain import Chain
from common.sequences import SequenceRange
from compaction.run import Compaction, LocalRunner, RunReport, Selection
from compaction.verify import ChainReport, VerifyProblem, known_chains, verify_chains
from tests.support.compaction import CHAIN, Archive, TestPolicy, rows

LOW = TestPolicy(min_age=0, max_wait=-1, min_count=2, max_count=4, min_size=10**9, max_size=10**9)
POLICIES = [LOW, replace(LOW, from_=1, to=2)]
NEXT = CHAIN.next_incarnation()
DEAD = range(20, 27)  # of these the source has no message
_NAME = re.compile(r"level=(\d)/(\d{20})-(\d{20})-[0-9a-f]{16}\.parquet")

Content = tuple[Any, ...]
Row = tuple[int, Content]


# Random archives


def alive(first: int, last: int) -> list[int]:
    return [n for n in range(first, last + 1) if n % 3 and n not in DEAD]


@dataclass
class RandomArchive:
    """An archive in a folder, with a record of the damage that its files do not show."""

    archive: Archive
    rng: random.Random
    harm: float  # the share of segments with a defect
    damaged: dict[str, bytes] = field(default_factory=dict)
    foreign: dict[str, bytes] = field(default_factory=dict)
    ends: dict[Chain, int] = field(default_factory=dict)
    tails: dict[Chain, int] = field(default_factory=dict)
    firsts: dict[Chain, int] = field(default_factory=dict)
    accepted: dict[Chain, set[int]] = field(default_factory=lambda: defaultdict(set))

    @property
    def chains(self) -> ChainStore:
        return ChainStore(self.archive.objects, self.archive.layout)

    def fill(self) -> None:
        rng = self.rng
        self._begin(CHAIN)
        position = 1
        while rng.random() < 0.9 and position < 60:  # as egress writes them, but for a hole or an overlap now and then
            position += rng.choice([0, 0, 0, 0, 0, 2, -1])
            first, position = max(1, position), position + rng.randint(2, 9)
            self.put(CHAIN, SequenceRange(first, max(first, position - 1)))
        for _ in range(rng.randint(1, 6)):
            self.put(CHAIN)
        if rng.random() < 0.4:
            end = rng.randint(0, 75)
            self.chains.create_stream(NEXT, StreamDocument({}, "2026-01-01T00:00:00Z", {0: end} if end else {}))
            self.ends[CHAIN] = end
            self._begin(NEXT)
            for _ in range(rng.randint(0, 4)):
                self.put(NEXT)
        for ref in [*self.archive.listed(), *self.archive.listed(NEXT)]:
            if rng.random() < self.harm / 2:
                self.damage(ref.key)
        folder = self.archive.layout.segments_prefix(CHAIN, 0)
        for key in ("data/README", f"{folder}1.parquet", "data/_floe/x", f"{folder}{1:020d}-{1:020d}-0.parquet"):
            if rng.random() < 0.3:
                self.archive.objects.put(key, b"junk")
                self.foreign[key] = b"junk"

    def _begin(self, chain: Chain) -> None:
        rng, first = self.rng, self.rng.choice([1, 1, 4])
        self.chains.create_chain(chain, ChainDocument((), 1, first))
        self.firsts[chain] = first
        if rng.random() < 0.5:
            self.tails[chain] = rng.randint(1, 85)
            self.chains.write_tail(chain, self.tails[chain])
        for _ in range(rng.choice([0, 0, 1, 2])):
            self.accept(chain)

    def accept(self, chain: Chain) -> None:
        begin = self.rng.randint(1, 75)
        gap = SequenceRange(begin, begin + self.rng.randint(0, 9))
        self.chains.accept_gap(chain, AcceptedGap(gap))
        self.accepted[chain] |= {*range(gap.first, gap.last + 1)}

    def put(self, chain: Chain, coverage: SequenceRange | None = None) -> None:
        """Put a segment of some kind; without a coverage, anywhere and of any level."""
        rng, level = self.rng, 0
        kind = rng.choice(["unread", "lacking", "lacking", "forked"]) if rng.random() < self.harm else "honest"
        if coverage is not None:
            first, last = coverage.first, coverage.last
        elif rng.random() < 0.1:
            first, last = sorted(rng.choices(DEAD, k=2))
        else:
            first, level = rng.randint(1, 60), rng.choice([0, 0, 0, 1, 1, 2])
            last = first + rng.randint(0, 14)
        held = alive(first, last)
        salted = {rng.choice(held)} if kind == "forked" and held else set()
        more: dict[str, Any] = {}
        if kind in ("lacking", "unread") and held:
            begin = rng.randrange(len(held))
            left_out = held[begin : begin + rng.randint(1, 4)]
            held = [n for n in held if n not in left_out]
            if kind == "unread":
                reason = rng.choice([Reason.GONE_BEFORE_READ, Reason.GONE_FROM_HOLE])
                deleted = last - first + 1 - len(held) - len(left_out)
                more["ledger"] = {reason: len(left_out), **({Reason.DELETED: deleted} if deleted else {})}
                more["unread"] = SequenceRange(left_out[0], left_out[-1])
        batches = [rows([n], salt="x" if n in salted else "") for n in held]
        batch = joined(batches) if batches else rows([])
        ref = self.archive.put(first, last, batch, level=level, age=700, chain=chain, **more)
        self.damaged.pop(ref.key, None)  # the same was there

    def damage(self, key: str) -> None:
        """Damage a file as a disk, a tool or a person does."""
        path, rng = self.archive.path(key), self.rng
        if not (data := path.read_bytes()):
            return
        place = rng.randrange(len(data))
        flipped = data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
        found = rng.choice([b"nothing", flipped, flipped, data[:place], bytes(len(data))])
        path.write_bytes(found)
        self.archive.age(key, 700)
        self.damaged[key] = found

    def compact(self) -> RunReport:
        store = self.archive.store
        size = self.rng.choice([1, 3, 1000])
        return Compaction(store, POLICIES, 0, LocalRunner(store), window=size, batch=size).run(Selection())

    def verify(self, *, deep: bool) -> list[ChainReport]:
        window = self.rng.choice([1, 4, 2000])
        return verify_chains(self.archive.store, self.chains, known_chains(self.chains), deep=deep, window=window)


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    [batch] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return batch


# The model


@dataclass(frozen=True)
class File:
    """A readable segment. `gone`: its ledger's count of unread messages; `of_hole`: some of them are of a hole."""

    key: str
    level: int
    first: int
    last: int
    rows: dict[int, Content]
    unread: range = range(0)
    gone: int = 0
    of_hole: bool = False

    @property
    def coverage(self) -> set[int]:
        return {*range(self.first, self.last + 1)}

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]


def files(world: RandomArchive, chain: Chain) -> list[File]:
    """Return the sound segments of a chain."""
    root, found = world.archive.folder / "store", []
    prefix = world.archive.layout.partition_prefix(chain)
    for path in sorted((root / prefix).rglob("*.parquet")):
        key = str(path.relative_to(root))
        if key in world.damaged or not (match := _NAME.fullmatch(key.removeprefix(prefix))):
            continue
        file = pq.ParquetFile(path)
        table, footer = file.read(use_threads=False), json.loads(file.metadata.metadata[b"floe.segment"])
        names = [name for name in table.schema.names if name != "sequence"]
        contents = zip(*(table.column(name).to_pylist() for name in names), strict=True)
        held = dict(zip(table.column("sequence").to_pylist(), contents, strict=True))
        begin, end = footer.get("unread") or (1, 0)
        counts = [footer["ledger"].get(reason, 0) for reason in ("gone_before_read", "gone_from_hole")]
        level, last, first = map(int, match.groups())
        found.append(File(key, level, first, last, held, range(begin, end + 1), sum(counts), bool(counts[1])))
    return found


def covered(segments: Iterable[File]) -> set[int]:
    return set().union(*(each.coverage for each in segments))


def cover(segments: list[File]) -> dict[int, File]:
    """Return the segment that accounts for each sequence: at each position the furthest reaching, then the higher."""
    taken: dict[int, File] = {}
    position = 1
    while ahead := [each for each in segments if each.last >= position]:
        position = max(position, min(each.first for each in ahead))
        best = max((s for s in ahead if s.first <= position), key=lambda s: (s.last, s.level, s.name))
        taken |= dict.fromkeys(range(position, best.last + 1), best)
        position = best.last + 1
    return taken


def contained(segments: list[File]) -> list[tuple[File, dict[int, File]]]:
    """Return each segment that others may supersede, with the segment that accounts for each of its sequences."""
    found, staying = [], list[File]()
    for level in range(9, -1, -1):
        above, same = cover(staying), [each for each in segments if each.level == level]
        for each in same:
            twins = [other for other in same if (other.first, other.last) == (each.first, each.last)]
            twin = max(twins, key=lambda other: other.name)
            if each.coverage <= above.keys():
                found.append((each, {n: above[n] for n in each.coverage}))
            elif twin is not each:
                found.append((each, dict.fromkeys(each.coverage, twin)))
            else:
                staying.append(each)
    return found


def runs(sequences: Iterable[int]) -> list[set[int]]:
    """Return sets of adjacent sequences."""
    found: list[set[int]] = []
    for n in sorted(sequences):
        if not found or n - 1 not in found[-1]:
            found.append(set())
        found[-1].add(n)
    return found


def forked(segments: list[File]) -> set[int]:
    """Return the sequences under which there are different messages."""
    contents: defaultdict[int, set[Content]] = defaultdict(set)
    for each in segments:
        for n, content in each.rows.items():
            contents[n].add(content)
    return {n for n, found in contents.items() if len(found) > 1}


def in_blocks(segments: list[File]) -> list[list[File]]:
    """Group segments that overlap, directly or by others."""
    found: list[list[File]] = []
    for each in sorted(segments, key=lambda s: s.first):
        if not found or each.first > max(other.last for other in found[-1]):
            found.append([])
        found[-1].append(each)
    return found


def of_kind(report: ChainReport, kind: str) -> list[VerifyProblem]:
    return [problem for problem in report.problems if problem.kind == kind]


def where(problems: Iterable[VerifyProblem]) -> set[int]:
    return {n for p in problems if p.rows for n in range(p.rows.first, p.rows.last + 1)}


# Comparison with the product


def check_report(world: RandomArchive, report: ChainReport, *, deep: bool) -> None:
    """Check that every complaint of the model is in the report, and nothing else."""
    chain, sound = report.chain, files(world, report.chain)
    accepted, end = world.accepted[chain], world.ends.get(chain)
    there = covered(sound)
    last = end if end is not None else max([0, world.tails.get(chain, 0), *there])
    missing = {*range(world.firsts[chain], last + 1)} - there - accepted
    assert where(of_kind(report, "hole")) == missing
    on_its_way = {n for n in missing if end is None and n > max(there, default=0)}
    assert where(p for p in of_kind(report, "hole") if p.finding == "delayed") == on_its_way
    behind = {n for n in there if end is not None and n > end} - accepted
    assert where(of_kind(report, "behind")) == behind
    prefix = world.archive.layout.partition_prefix(chain)
    damaged = {key for key in world.damaged if key.startswith(prefix)}
    named = {key for key in damaged for problem in of_kind(report, "damaged") if key in problem.text}
    assert (named, len(of_kind(report, "damaged")), of_kind(report, "document")) == (damaged, len(damaged), [])

    _check_unread(report, sound, accepted)
    upper = contained(sound)
    if deep:
        _check_forks(report, sound)
        _check_rows(report, sound, upper)
    levels = Counter(each.level for each in sound)
    findings = report.findings()
    assert (report.segments, findings["found"], findings["contained"]) == (dict(levels), len(sound), len(upper))
    for level, found in report.levels.items():
        of_level = covered(each for each in sound if each.level == level)
        assert {n for r in found.covered.stretches() for n in range(r.first, r.last + 1)} == of_level
    assert sum(findings[name] for name in ("delayed", "missing", "damaged", "divergent")) == len(report.problems)
    assert all(problem.text and problem.finding for problem in report.problems)


def _check_unread(report: ChainReport, sound: list[File], accepted: set[int]) -> None:
    """Check rows that came late, and rows that are gone."""
    conflicts, expected_late, expected_gone = forked(sound), set[int](), set[int]()
    allowed_late, allowed_gone = set[int](), set[int]()
    taken = cover(sound)
    for each in {segment.key: segment for segment in taken.values()}.values():
        part = {n for n, segment in taken.items() if segment is each and n in each.unread}
        others = {n for other in sound if other is not each for n in other.rows if n in part}
        is_forked = bool(conflicts & part)
        late = others - each.rows.keys()
        allowed_late |= others
        expected_late |= set() if is_forked else late
        for gap in runs(part - accepted) if each.of_hole else []:
            if min(each.gone, len(gap - {n for n in gap if n in each.rows or n in others})):
                allowed_gone |= gap
                expected_gone |= set() if is_forked else gap
    late_rows, gone_rows = where(of_kind(report, "late")), where(of_kind(report, "gone"))
    assert expected_late <= late_rows
    assert bool(late_rows) <= bool(allowed_late)
    assert expected_gone <= gone_rows <= allowed_gone


def _check_forks(report: ChainReport, sound: list[File]) -> None:
    forks, conflicts = of_kind(report, "fork"), forked(sound)
    keys = {each.key for each in sound}
    for block in in_blocks(sound):
        within = covered(block)
        assert bool(conflicts & within) == any(where([problem]) <= within for problem in forks), report
    for problem in forks:
        match = re.search(r"sequence (\d+) of .* content in (\S+) and another in (\S+)", problem.text)
        assert match, problem
        assert int(match[1]) in conflicts
        assert {match[2], match[3]} <= keys


def _check_rows(report: ChainReport, sound: list[File], upper: list[tuple[File, dict[int, File]]]) -> None:
    """Check rows that a segment has and those above it do not, or the other way round."""
    problems = of_kind(report, "rows")
    lacking, may_lack = set[str](), set[str]()
    for each, above in upper:
        missing = {n for n in each.rows if n not in above[n].rows}
        differs = any(above[n].rows.get(n) not in (None, content) for n, content in each.rows.items())
        lacking |= {each.key} if missing and not differs else set()
        may_lack |= {each.key} if missing else set()
    stated = {each.key for each in sound for p in problems if f" of {each.key} has no row" in p.text}
    assert lacking <= stated <= may_lack
    for problem in problems:
        if " has no row in " not in problem.text:
            [above] = [each for each in sound if problem.text.startswith(f"{each.key}: expected ")]
            below = [each for each, over in upper if {s.key for s in over.values()} == {above.key}]
            assert sum(len(each.rows) for each in below) != len(above.rows)


def check_compacted(world: RandomArchive, chain: Chain, before: list[File], report: RunReport) -> None:
    """Check that no row is lost or added, and that no segment was deleted unless others contained it."""
    after = files(world, chain)
    old, new = {each.key: each for each in before}, {each.key: each for each in after}
    all_rows: set[Row] = {row for each in before for row in each.rows.items()}
    assert ({row for each in after for row in each.rows.items()}, covered(after)) == (all_rows, covered(before))
    for key in old.keys() - new.keys():
        gone = old[key]
        above = [s for s in after if s.level > gone.level or (s.first, s.last) == (gone.first, gone.last)]
        assert gone.coverage <= covered(above), f"{key} was deleted and is not contained"
        assert gone.rows.items() <= {row for s in above for row in s.rows.items()}
    for key in new.keys() - old.keys():
        assert new[key].coverage <= covered(before), f"{key} spans a hole"
    conflicts = forked(before)
    seen = read(before)
    for n, content in read(after).items():
        assert seen.get(n, content) == content or n in conflicts
    for n in seen.keys() - read(after).keys():
        # If two disagree, the start of a cover decides which one it takes; both still exist.
        assert any(n in each.coverage and n not in each.rows and n not in each.unread for each in before), n
    for failure in report.failures:
        assert failure.damaged <= world.damaged.keys()
        if failure.chain == chain and failure.code == "E-FORK":
            assert int(failure.line.split("sequence ")[1].split()[0]) in conflicts


def read(segments: list[File]) -> dict[int, Content]:
    """Return the rows that a reader of the cover gets."""
    found: dict[int, Content] = {}
    for n, each in cover(segments).items():
        if n in each.rows:
            found[n] = each.rows[n]
        elif n in each.unread:
            found.update(row for other in segments for row in other.rows.items() if row[0] == n)
    return found


def check_kept(world: RandomArchive, report: RunReport) -> None:
    """Check that objects which compaction cannot use remain, except an output that is made again."""
    for merged in report.merged:
        world.damaged.pop(merged.ref.key, None)
    buried = {key for key in world.damaged if world.archive.objects.head(key) is None}
    for key in buried:  # damaged after it was proved to be in others, and before it was deleted
        name = world.archive.layout.parse_segment(key)
        above = [each for each in files(world, name.chain) if each.level > name.level]
        assert {*range(name.coverage.first, name.coverage.last + 1)} <= covered(above), key
        del world.damaged[key]
    for key, data in {**world.damaged, **world.foreign}.items():
        assert world.archive.objects.get(key) == data, key


def check_verify(world: RandomArchive) -> Counter[str]:
    """Check verify against the model: shallow and deep."""
    deep = world.verify(deep=True)
    for report in deep:
        check_report(world, report, deep=True)
    for report in world.verify(deep=False):
        check_report(world, report, deep=False)
    assert {report.chain for report in deep} == world.firsts.keys()
    assert {*find_foreign_keys(world.archive.objects, world.archive.layout).keys} == world.foreign.keys()
    return Counter(problem.kind for report in deep for problem in report.problems)


def archive_round(folder: Path, rng: random.Random) -> Counter[str]:
    """Take one archive through some runs of compaction, and grow it between them. Return counts of its features."""
    world = RandomArchive(Archive(folder), rng, rng.choice([0.0, 0.1, 0.3]))
    world.fill()
    counts = check_verify(world)
    for _ in range(4):
        before = {chain: files(world, chain) for chain in world.firsts}
        report = world.compact()
        check_kept(world, report)
        for chain in world.firsts:
            check_compacted(world, chain, before[chain], report)
        counts += check_verify(world)
        counts["merged"] += len(report.merged)
        counts["deleted"] += len(report.deleted)
        counts["failures"] += len(report.failures)
        if rng.random() < 0.3:
            world.put(rng.choice([*world.firsts]))
        if rng.random() < 0.2:
            world.accept(rng.choice([*world.firsts]))
        refs = [ref for chain in world.firsts for ref in world.archive.listed(chain)]
        if refs and rng.random() < 0.2:
            world.damage(rng.choice(refs).key)
        if refs and rng.random() < 0.1:
            key = rng.choice(refs).key  # by a person, or a rule of the bucket
            world.archive.objects.delete(key)
            world.damaged.pop(key, None)
    world.archive.store.close()
    return counts


async def archives(rng: random.Random, rounds: int) -> dict[str, int]:
    """Check so many archives, each of a seed of its own. Raises AssertionError, naming the seed."""
    counts: Counter[str] = Counter()
    for _ in range(rounds):
        seed = rng.getrandbits(32)
        with tempfile.TemporaryDirectory() as folder:
            try:
                counts += archive_round(Path(folder), random.Random(seed))
            except AssertionError as error:
                raise AssertionError(f"archive of seed {seed}: {error}") from error
    return {"rounds": rounds, **dict(sorted(counts.items()))}
