"""`spark.read.format("floe")`, and that other engines read the same from the same files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import duckdb
import polars
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

from common.chain import Chain
from common.segments.columns import record_batch
from common.segments.documents import ChainDocument, ChainStore
from common.segments.segment import Reason
from common.sequences import SequenceRange
from tests.support.compaction import CHAIN, Archive, rows
from tests.support.spark import counted_bytes, counting_source, spark_session

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


def as_table(found) -> pa.Table:
    return found.orderBy("sequence").toArrow()


def test_spark_reads_every_column_as_pyarrow_does_and_each_sequence_once(archive: Archive):
    found = as_table(frame(archive, **ONE))
    assert found.schema.names == archive.read().schema.names
    for name in found.schema.names:
        assert found.column(name).to_pylist() == archive.read().column(name).to_pylist(), name


def test_what_the_options_leave_open_are_columns(archive: Archive):
    found = frame(archive)
    assert found.columns[:4] == ["site", "feed", "incarnation", "partition"]
    assert {(*row,) for row in found.select(found.columns[:4]).distinct().collect()} == {
        ("us-east", "NODES", 0, 0),
        ("eu-west", "NODES", 1, 2),
    }
    assert found.count() == 110
    assert frame(archive, site="eu-west").columns[:3] == ["feed", "incarnation", "partition"]
    assert frame(archive, incarnation=1).count() == 10


def test_a_range_of_sequences_is_read_alone(archive: Archive):
    found = as_table(frame(archive, **ONE, from_sequence=35, to_sequence=64))
    assert found.column("sequence").to_pylist() == list(range(35, 65))


def test_nothing_to_read_is_an_empty_table(archive: Archive):
    assert frame(archive, **ONE, from_sequence=1000).count() == 0


def test_a_name_that_is_not_there_is_an_error_that_says_what_is(archive: Archive):
    with pytest.raises(AnalysisException, match=r"did you mean us-east\? there are eu-west, us-east"):
        frame(archive, site="us-esat").count()


def test_rows_of_a_late_segment_are_not_masked(tmp_path: Path):
    late = Archive(tmp_path)
    ChainStore(late.objects, late.layout).create_chain(CHAIN, ChainDocument((), 1, 1))
    expired = {"ledger": {Reason.GONE_BEFORE_READ: 50}, "unread": SequenceRange(1, 50)}
    late.put(1, 120, rows(range(51, 121)), **expired)
    late.put(1, 100)
    assert frame(late, **ONE, columns="sequence").count() == 120


def test_columns_are_read_alone(archive: Archive):
    found = frame(archive, **ONE, columns="sequence,subject")
    assert found.columns == ["sequence", "subject"]
    assert found.count() == 100


def test_headers_are_parsed_on_request_in_order_with_repeats(archive: Archive):
    [row] = frame(archive, **ONE, headers_parsed="true", from_sequence=7, to_sequence=7).collect()
    assert [(h.name, h.value) for h in row.headers_parsed] == [("X-N", "7"), ("X-N", " again")]
    [bare] = frame(archive, **ONE, headers_parsed="true", from_sequence=9, to_sequence=9).collect()
    assert bare.headers_parsed is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence": 1}, "option sequence: expected one of"),
        ({"from_sequence": 0}, "option from_sequence: expected a number from 1"),
        ({"from_sequence": 9, "to_sequence": 8}, "expected at least from_sequence 9, found 8"),
        ({"columns": "payloads"}, "no column 'payloads'"),
        ({"pushdown": "yes"}, "expected true or false"),
        ({"config": "somewhere.yaml"}, "option config: excludes url"),
        ({"since": "soon"}, "option since: expected a time such as"),
        ({"from": "latest"}, "option from: only for readStream"),
    ],
)
def test_wrong_options_are_named(archive: Archive, options: dict, message: str):
    with pytest.raises(Exception, match=message):
        frame(archive, **options).count()


def test_a_configuration_file_names_the_store(archive: Archive, tmp_path: Path):
    config = tmp_path / "floe.yaml"
    config.write_text(f"store: {{url: 'file://{archive.folder}/store'}}\n")
    config.chmod(0o600)
    found = spark_session().read.format("floe").option("config", str(config)).load()
    assert found.count() == 110


def test_only_one_level(archive: Archive):
    assert frame(archive, **ONE, level=1).count() == 60
    assert frame(archive, **ONE, level=0).count() == 100, "each sequence once within the level too"
    assert frame(archive, **ONE, level=2).count() == 0


def at(sequence: int) -> str:
    """The time of a row of `rows`."""
    return f"2023-11-14T22:13:20.{sequence * 1_001:09d}Z"


def test_a_range_of_time_gives_exactly_its_rows(archive: Archive):
    found = as_table(frame(archive, **ONE, since=at(35), until=at(65)))
    assert found.column("sequence").to_pylist() == list(range(35, 65))
    assert frame(archive, from_time=at(35), to_time=at(65)).count() == 30
    assert frame(archive, since="2h").count() == 0
    assert frame(archive, **ONE, since=at(35), to_sequence=40, level=0).count() == 6


def test_a_filter_of_subjects(archive: Archive):
    wanted = frame(archive, **ONE).where("subject = 'nodes.1' OR subject LIKE 'bad.%'").orderBy("sequence").toArrow()
    found = as_table(frame(archive, **ONE, subject="nodes.1 bad.>"))
    assert found.to_pylist() == wanted.to_pylist()
    columns = frame(archive, **ONE, subject="nodes.1 bad.>", columns="sequence,payload")
    assert columns.columns == ["sequence", "payload"]
    assert columns.count() == wanted.num_rows


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Archive, int]:
    """Five segments of 4 MB, each in four row groups, a second between two messages; and their bytes."""
    found, total = Archive(tmp_path_factory.mktemp("large")), 0
    ChainStore(found.objects, found.layout).create_chain(CHAIN, ChainDocument((), 1, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.segments.writer.row_group_bytes", lambda _level: 2**20)
        for first in range(1, 1000, 200):
            sequences, noise = list(range(first, first + 200)), random.Random(first)
            times = [(1_700_000_000 + n) * 10**9 for n in sequences]
            subjects = [b"rare.%d" % n if n // 50 == 10 else b"usual.%d" % n for n in sequences]
            payloads = [noise.randbytes(20_000) for _ in sequences]
            batch = record_batch(sequences, times, subjects, [None] * 200, payloads)
            total += found.put(first, first + 199, batch).size
    return found, total


@pytest.mark.parametrize(
    ("options", "rows_found", "most"),
    [
        ({}, 1000, 1.01),
        ({"since": "2023-11-14T22:21:40Z", "until": "2023-11-14T22:22:00Z"}, 20, 0.2),
        ({"from_sequence": 510, "to_sequence": 529}, 20, 0.12),
        ({"subject": "rare.*"}, 50, 0.2),
        ({"columns": "sequence,subject"}, 1000, 0.1),
        ({"filter": "timestamp >= '2023-11-14 22:21:40' AND timestamp < '2023-11-14 22:22:00'"}, 20, 0.2),
        ({"filter": "subject = 'rare.507'"}, 1, 0.2),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("switch")
def test_only_what_is_asked_for_is_read(
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


def test_spark_refuses_a_source_with_filters_while_its_switch_is_off(archive: Archive):
    with pytest.raises(Exception, match="DATA_SOURCE_PUSHDOWN_DISABLED"):
        frame(archive, **ONE, pushdown="true").count()
    assert frame(archive, **ONE).where("sequence <= 5").count() == 5


@pytest.mark.usefixtures("switch")
@pytest.mark.parametrize(
    ("condition", "rows_found", "partitions"),
    [
        ("sequence >= 35 AND sequence < 40 AND subject LIKE 'nodes.%'", 5, 1),
        ("sequence IN (1, 100)", 2, 3),
        ("sequence = 81", 1, 1),
        ("sequence <= 61", 61, 2),
        ("sequence > 9223372036854775806", 0, 1),
        ("subject = 'nodes.1'", 19, 3),
    ],
)
def test_filters_that_are_pushed_down_read_fewer_segments_and_give_the_same_rows(
    archive: Archive, condition: str, rows_found: int, partitions: int
):
    pushed = frame(archive, **ONE, pushdown="true").where(condition)
    assert pushed.rdd.getNumPartitions() == partitions
    assert pushed.count() == frame(archive, **ONE).where(condition).count() == rows_found


@pytest.mark.usefixtures("switch")
def test_with_pushdown_spark_keeps_the_first_filter_of_a_dataframe_so_it_serves_one_query(archive: Archive):
    """Spark's own fault, which the documentation warns of: were it mended, the warning could go."""
    used_twice = frame(archive, **ONE, pushdown="true")
    assert used_twice.where("sequence <= 5").count() == 5
    assert used_twice.count() < 100
    assert frame(archive, **ONE, pushdown="true").count() == 100


def test_a_segment_deleted_after_planning_is_read_elsewhere(archive: Archive, tmp_path: Path):
    """Compaction's grace is over while a reader still holds its plan."""
    other = Archive(tmp_path)
    ChainStore(other.objects, other.layout).create_chain(CHAIN, ChainDocument((), 1, 1))
    lower = [other.put(1, 50), other.put(51, 100)]
    planned = frame(other, **ONE)
    planned.count()
    other.put(1, 100, level=1)
    other.store.delete(lower[0])
    assert planned.count() == 100


def test_a_glob_counts_twice_what_stands_in_two_levels(archive: Archive):
    glob = f"{archive.folder}/store/data/site=us-east/**/*.parquet"
    assert duckdb.sql(f"SELECT count(*) FROM read_parquet('{glob}')").fetchall() == [(181,)]
    assert frame(archive, **ONE).count() == 100


def test_duckdb_and_polars_read_the_same_from_one_segment(archive: Archive):
    ref = max((s for s in archive.listed() if s.level == 1), key=lambda s: s.name)
    path, wanted = archive.path(ref.key), archive.table(ref)
    in_duckdb = duckdb.sql(f"SET TimeZone = 'UTC'; SELECT * FROM read_parquet('{path}', hive_partitioning = false)")
    assert in_duckdb.to_arrow_table().cast(wanted.schema).to_pylist() == wanted.to_pylist()
    in_polars = polars.read_parquet(path, hive_partitioning=False).to_arrow()
    assert in_polars.cast(wanted.schema).to_pylist() == wanted.to_pylist()
    in_spark = as_table(frame(archive, **ONE, to_sequence=60))
    assert in_spark.to_pylist() == wanted.to_pylist()


def test_engines_read_the_parts_of_a_key_as_columns(archive: Archive):
    parts = "site, feed, incarnation::INT, partition, level"
    files = f"{archive.folder}/store/data/site=*/**/*.parquet"
    found = duckdb.sql(f"SELECT DISTINCT {parts} FROM read_parquet('{files}')").fetchall()
    assert set(found) == {("us-east", "NODES", 0, 0, 0), ("us-east", "NODES", 0, 0, 1), ("eu-west", "NODES", 1, 2, 0)}
