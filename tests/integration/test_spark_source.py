"""`spark.read.format("floe")`, and that other engines read the same from the same files."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException

from common.chain import Chain
from common.segments.columns import record_batch
from common.segments.documents import ChainDocument, ChainStore
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


def test_a_name_that_is_not_there_or_a_wrong_option_is_an_error_that_says_what_is(archive: Archive):
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


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"from_sequence": 35, "to_sequence": 64}, range(35, 65)),
        ({"since": at(35), "until": at(65)}, range(35, 65)),
        ({"since": at(35), "to_sequence": 40, "level": 0}, range(35, 41)),
        ({"from_sequence": 1000}, ()),
        ({"level": 1}, range(1, 61)),
    ],
)
def test_exactly_the_rows_that_are_asked_for_are_read(archive: Archive, options: dict, wanted: Sequence[int]):
    found = frame(archive, **ONE, **options).orderBy("sequence").toArrow()
    assert found.column("sequence").to_pylist() == [*wanted]


def test_a_filter_of_subjects(archive: Archive):
    wanted = frame(archive, **ONE).where("subject = 'nodes.1' OR subject LIKE 'bad.%'").orderBy("sequence").toArrow()
    found = frame(archive, **ONE, subject="nodes.1 bad.>").orderBy("sequence").toArrow()
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
