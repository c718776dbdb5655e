"""`spark.read.format("floe")`, and the same rows from other engines on the same files."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql.streaming import StreamingQuery

from common.archive.columns import record_batch
from common.archive.documents import ChainDocument, ChainStore
from common.chain import Chain
from tests.support.compaction import CHAIN, Archive, begun, rows, run
from tests.support.spark import counted_bytes, counting_source, finished, spark_session

pytestmark = pytest.mark.spark
OTHER = Chain("eu-west", "NODES", 1, 2)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    """1..100 at level 0, 1..60 of it at level 1 too, a late overlap; another chain with 10 rows."""
    found = Archive(tmp_path_factory.mktemp("archive"))
    for chain in (CHAIN, OTHER):
        ChainStore(found.objects, found.layout).create_chain(chain, ChainDocument((), 1, 1))
    for first in range(1, 100, 20):
        found.put(first, first + 19, rows(range(first, first + 20), sample_key="node"))
    found.put(1, 60, rows(range(1, 61), sample_key="node"), level=1)
    found.put(55, 75, rows(range(55, 76), sample_key="node"))
    found.put(1, 10, chain=OTHER)
    return found


def frame(archive: Archive, **options: object):
    reader = spark_session().read.format("floe").option("url", f"file://{archive.folder}/store")
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()


ONE = {"site": "us-east", "feed": "NODES", "incarnation": 0, "partition": 0}


def test_parts_left_open_by_options_are_columns(archive: Archive):
    found = frame(archive)
    assert found.columns[:4] == ["site", "feed", "incarnation", "partition"]
    assert {(*row,) for row in found.select(found.columns[:4]).distinct().collect()} == {
        ("us-east", "NODES", 0, 0),
        ("eu-west", "NODES", 1, 2),
    }
    assert (found.count(), frame(archive, site="eu-west").columns[:3]) == (110, ["feed", "incarnation", "partition"])
    assert frame(archive, incarnation=1).count() == 10
    assert frame(archive, **ONE, columns="sequence,payload").columns == ["sequence", "payload"]


def test_a_missing_name_or_a_wrong_option_is_an_error_with_the_valid_ones(archive: Archive):
    with pytest.raises(AnalysisException, match=r"did you mean us-east\? there are eu-west, us-east"):
        frame(archive, site="us-esat").count()
    with pytest.raises(Exception, match="option since: expected a time such as"):
        frame(archive, since="soon").count()
    with pytest.raises(Exception, match="no column 'payloads'"):
        frame(archive, columns="payloads").count()


def test_headers_are_parsed_on_request_in_order_with_repeats(archive: Archive):
    [row] = frame(archive, **ONE, headers_parsed="true", from_sequence=7, to_sequence=7).collect()
    assert [(h.name, h.value) for h in row.headers_parsed] == [("X-N", "7"), ("X-N", " again")]
    [bare] = frame(archive, **ONE, headers_parsed="true", from_sequence=9, to_sequence=9).collect()
    assert bare.headers_parsed is None


def at(sequence: int) -> str:
    """The time of a row of `rows`."""
    return f"2023-11-14T22:13:20.{sequence * 1_001:09d}Z"


QUERIED_RANGES = [
    ({"from_sequence": 35, "to_sequence": 64}, range(35, 65)),
    ({"since": at(35), "until": at(65)}, range(35, 65)),
    ({"since": at(35), "to_sequence": 40, "level": 0}, range(35, 41)),
    ({"from_sequence": 1000}, ()),
    ({"level": 1}, range(1, 61)),
]


@pytest.mark.parametrize(("options", "wanted"), QUERIED_RANGES)
def test_exactly_the_rows_that_are_asked_for_are_read(archive: Archive, options: dict, wanted: Sequence[int]):
    assert frame(archive, **ONE, **options).orderBy("sequence").toArrow().column("sequence").to_pylist() == [*wanted]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Archive, int]:
    """Five segments of 4 MB, each in four row groups, a second between two messages; and their size in bytes."""
    found, total = Archive(tmp_path_factory.mktemp("large")), 0
    ChainStore(found.objects, found.layout).create_chain(CHAIN, ChainDocument((), 1, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.archive.writer.row_group_bytes", lambda _level: 2**20)
        for first in range(1, 1000, 200):
            sequences, noise = list(range(first, first + 200)), random.Random(first)
            times = [(1_700_000_000 + n) * 10**9 for n in sequences]
            subjects = [b"rare.%d" % n if n // 50 == 10 else b"usual.%d" % n for n in sequences]
            batch = record_batch(sequences, times, subjects, [None] * 200, [noise.randbytes(20_000) for _ in sequences])
            total += found.put(first, first + 199, batch).size
    return found, total


@pytest.mark.parametrize(
    ("options", "rows_found", "most"),
    [
        ({"since": "2023-11-14T22:21:40Z", "until": "2023-11-14T22:22:00Z"}, 20, 0.2),
        ({"from_sequence": 510, "to_sequence": 529}, 20, 0.12),
        ({"subject": "rare.*"}, 50, 0.2),
        ({"columns": "sequence,subject"}, 1000, 0.1),
        ({"filter": "subject = 'rare.507'"}, 1, 0.2),
        ({"filter": "sequence >= 510 AND sequence < 530 AND subject LIKE 'rare.%'"}, 20, 0.2),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("switch")
def test_only_requested_rows_are_read(
    large: tuple[Archive, int], tmp_path: Path, options: dict, rows_found: int, most: float
):
    archive, total = large
    spark_session().dataSource.register(counting_source(tmp_path))
    condition, reader = options.get("filter"), spark_session().read.format("floe_counted")
    reader = reader.option("url", f"file://{archive.folder}/store").option("pushdown", str(bool(condition)))
    for name, value in options.items():
        reader = reader if name == "filter" else reader.option(name, str(value))
    found = reader.load()
    assert (found.where(condition) if condition else found).count() == rows_found
    assert 0 < counted_bytes(tmp_path) < most * total


@pytest.fixture
def switch() -> Iterator[None]:
    """Spark's own switch for filters of Python data sources."""
    spark_session().conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield
    spark_session().conf.unset("spark.sql.python.filterPushdown.enabled")


# Queries of Structured Streaming: restarts, compaction, holes, each row once


class Sink:
    """A query from the archive into a folder of Parquet, which Spark writes exactly once."""

    def __init__(self, archive: Archive) -> None:
        self._archive, self.folder = archive, archive.folder / "sink"

    def run(self, **options: object) -> StreamingQuery:
        """Run a query over everything that is there now."""
        reader = spark_session().readStream.format("floe").option("url", f"file://{self._archive.folder}/store")
        for name, value in {"subject": "nodes.>", **options}.items():
            reader = reader.option(name, str(value))
        writer = reader.load().writeStream.format("parquet")
        writer = writer.option("checkpointLocation", f"{self._archive.folder}/checkpoint")
        return finished(lambda: writer.trigger(availableNow=True).start(str(self.folder)))

    def found(self) -> list[tuple[str, int]]:
        if not (self.folder / "_spark_metadata").exists():
            return []
        frame = spark_session().read.schema("site string, sequence long").parquet(str(self.folder))
        return sorted((row.site, row.sequence) for row in frame.collect())


def all_of(*parts: tuple[str, range]) -> list[tuple[str, int]]:
    """The rows that the filter of the query lets through, by site."""
    return sorted((site, sequence) for site, sequences in parts for sequence in sequences if sequence % 17)


@pytest.fixture
def growing(tmp_path: Path) -> Archive:
    return begun(tmp_path, CHAIN)


def test_a_query_goes_on_from_its_checkpoint_through_compaction_holes_and_new_chains(growing: Archive):
    sink = Sink(growing)
    for first in (1, 11, 21, 41):
        growing.put(first, first + 9)
    query = sink.run(max_rows_per_batch=12)
    assert sink.found() == all_of(("us-east", range(1, 31))), "up to the hole"
    last = query.lastProgress["sources"][0]
    assert json.loads(last["endOffset"])[str(CHAIN)] == 31
    assert json.loads(last["latestOffset"]) == {str(CHAIN): 51}, "where the archive ends"
    growing.age_all(1000)
    run(growing.folder)
    assert "1:1..30" in growing.ranges()
    growing.put(31, 40)
    ChainStore(growing.objects, growing.layout).create_chain(OTHER, ChainDocument((), 1, 1))
    growing.put(1, 5, chain=OTHER)
    growing.put(11, 15, chain=OTHER)
    sink.run()
    assert sink.found() == all_of(("us-east", range(1, 51)), ("eu-west", range(1, 6)))
    growing.put(6, 10, chain=OTHER)
    growing.age_all(1000)
    run(growing.folder)
    sink.run(max_segments_per_batch=1)
    assert sink.found() == all_of(("us-east", range(1, 51)), ("eu-west", range(1, 16)))


def test_planned_segments_that_are_lost_end_the_query(growing: Archive):
    ref = growing.put(1, 10)
    growing.path(ref.key).write_bytes(bytes(ref.size))
    with pytest.raises(StreamingQueryException, match=ref.key):
        Sink(growing).run()
