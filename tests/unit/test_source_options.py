"""The options of `spark.read.format("floe")`: times as in commands, filters, options of streams only."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import duckdb
import pytest

from common.archive.columns import SCHEMA, record_batch
from common.archive.reader import RowFilter
from common.archive.segment import SegmentRef
from common.archive.times import SKEW_MARGIN_NS
from common.archive.views import duckdb_view, object_address, polars_frame
from common.clock import parse_time
from common.errors import UsageError
from common.sequences import Stretch, cover
from common.settings.root import StoreSettings
from compaction.source_options import OPTIONS, parse_options
from tests.support.compaction import CHAIN, Archive, ref

NOW = 1_800_000_000.0
ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "guides" / "query.md", ROOT / "docs" / "reference" / "formats.md")


def parsed(**options: str):  # type: ignore[no-untyped-def]
    return parse_options({"url": "file:///tmp/a", **options}, NOW)


def test_times_are_read_as_the_commands_read_them() -> None:
    ago = (int(NOW) - 7200) * 10**9
    assert parsed(since="2h").row_filter.begin == parsed(from_time="2h ago").row_filter.begin == ago
    asked = parsed(since="2026-01-02T03:04:05Z", until="2026-01-02T03:04:06.5+00:00").row_filter
    assert (asked.begin, asked.end) == (parse_time("2026-01-02T03:04:05Z"), parse_time("2026-01-02T03:04:06.5Z"))
    assert parsed().row_filter == RowFilter()
    assert (parsed().margin_ns, parsed(time_margin="2h").margin_ns) == (SKEW_MARGIN_NS, 7200 * 10**9)
    assert parsed(until="9999-01-01T00:00:00Z").row_filter.end == 2**63 - 1


def test_wrong_options_are_named() -> None:
    for options, message in (
        ({"since": "yesterday"}, "option since: expected a time such as"),
        ({"since": "2h", "from_time": "2h"}, "expected one of the options since and from_time, found both"),
        ({"since": "1h", "until": "2h"}, "option since: expected before "),
        ({"subject": "nodes.>.a"}, "option subject: expected filters such as"),
        ({"from": "now"}, "option from: expected latest or earliest, found 'now'"),
        ({"from": "latest", "since": "2h"}, "option from: excludes since"),
        ({"max_rows_per_batch": "1", "max_segments_per_batch": "1"}, "max_rows_per_batch and max_segments_per_batch"),
        ({"sequence": "1"}, "option sequence: expected one of"),
        ({"from_sequence": "0"}, "option from_sequence: expected a number from 1"),
        ({"from_sequence": "9", "to_sequence": "8"}, "expected at least from_sequence 9, found 8"),
        ({"pushdown": "yes"}, "expected true or false"),
        ({"config": "somewhere.yaml"}, "option config: excludes url"),
    ):
        with pytest.raises(UsageError, match=message):
            parsed(**options)


def test_what_only_one_way_of_reading_has_is_refused_by_the_other() -> None:
    with pytest.raises(UsageError, match="option max_rows_per_batch: only for readStream"):
        parsed(max_rows_per_batch="5").check_allowed(streams=False)
    with pytest.raises(UsageError, match="option until: only for read"):
        parsed(until="2h").check_allowed(streams=True)
    parsed(since="2h", subject="a.>").check_allowed(streams=True)


def test_the_pages_have_a_row_for_every_option_and_column() -> None:
    lines = [line for page in PAGES for line in page.read_text().splitlines()]
    rows = [line.split("|")[1] for line in lines if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert named >= OPTIONS
    assert {*SCHEMA.names, "headers_parsed"} <= named


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_spark_imports_by_itself_is_light_and_raises_nothing_where_spark_is_missing() -> None:
    assert python("import pyspark_floe; print(pyspark_floe.DefaultSource.name())") == "floe\n"
    heavy = "{'common', 'compaction', 'pydantic', 'boto3', 'click'}"
    assert python(f"import sys, pyspark_floe; print({heavy} & sys.modules.keys())") == "set()\n"
    missing = "import sys; sys.modules['pyspark'] = None; import pyspark_floe"
    assert python(f"{missing}; print(hasattr(pyspark_floe, 'DefaultSource'))") == "False\n"


def test_it_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "pyspark_floe.py" in settings["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]


SUBJECTS = [b"nodes.1.temp", b"nodes.2.temp", b"nodes.1", b"bad.\xff", b"other"]


def test_rows_by_time_and_subject() -> None:
    for asked, sequences in (
        (RowFilter(begin=11, end=31), [3, 4]),
        (RowFilter(subjects=("nodes.*.temp",)), [1, 2]),
        (RowFilter(subjects=("nodes.>", "other")), [1, 2, 3, 5]),
        (RowFilter(subjects=("bad.*",)), [4]),
        (RowFilter(begin=30, subjects=("nodes.1",)), []),
    ):
        times, nothing = [10 * n for n in range(5)], [None] * 5
        batch = record_batch([1, 2, 3, 4, 5], times, SUBJECTS, nothing, [b""] * 5)
        assert asked.select(batch).column("sequence").to_pylist() == sequences


def test_row_groups_that_cannot_have_such_rows_are_left_out() -> None:
    for asked, times, subjects, may in (
        (RowFilter(begin=10), (0, 9), None, False),
        (RowFilter(begin=10), (0, 10), None, True),
        (RowFilter(subjects=("b.c",)), (0, 1), (b"a", b"b.d"), True),
        (RowFilter(subjects=("b.c",)), (0, 1), (b"b.d", b"z"), False),
        (RowFilter(subjects=("b.*",)), (0, 1), (b"a", b"b.a"), True),
        (RowFilter(subjects=("b.*",)), (0, 1), (b"a", b"b"), False),
        (RowFilter(subjects=("*.c",)), (0, 1), (b"x", b"y"), True),
    ):
        assert asked.may_take(times, subjects) is may


# Views for other engines

AT = {"url": "s3://frozen", "endpoint_url": "http://127.0.0.1:9000"}
S3 = StoreSettings(**AT, access_key_id="it", secret_access_key="hush")
Cover = list[Stretch[SegmentRef]]


def in_duckdb(found: Cover, store: StoreSettings) -> list[int]:
    with duckdb.connect() as connection:
        connection.execute(duckdb_view(found, store, "archive"))
        return [row[0] for row in connection.execute("SELECT sequence FROM archive").fetchall()]


def in_polars(found: Cover, store: StoreSettings) -> Any:
    scope: dict[str, Any] = {}
    exec(polars_frame(found, store, "archive"), scope)
    return scope["archive"].collect()


@pytest.mark.parametrize("folder", ["it's", "a [b] * ?", "100%25", 'two "words"\\'])
def test_files_are_named_as_they_are_called(tmp_path: Path, folder: str):
    archive = Archive(tmp_path / folder)
    archive.put(1, 10)
    archive.put(5, 20)
    store = StoreSettings(url=f"file://{archive.folder}/store".replace("%", "%25"))
    found = cover(archive.listed(), 1)
    assert Path(object_address(store, found[0].segment.key)).exists()
    assert in_duckdb(found, store) == list(range(1, 21))
    frame = in_polars(found, store)
    assert (frame["sequence"].to_list(), frame["level"].unique().to_list()) == (list(range(1, 21)), [0])


def test_an_archive_without_segments_has_every_column_and_no_row(tmp_path: Path):
    archive = Archive(tmp_path)
    store = StoreSettings(url=f"file://{tmp_path}/store")
    empty = in_polars([], store)
    archive.put(1, 3)
    found = cover(archive.listed(), 1)
    assert empty.is_empty()
    assert empty.schema == in_polars(found, store).schema
    with duckdb.connect() as connection:
        connection.execute(duckdb_view([], store, "empty")).execute(duckdb_view(found, store, "whole"))
        assert connection.execute("SELECT * FROM empty").fetchall() == []
        empty_types, types = (connection.sql(f"DESCRIBE {name}").fetchall() for name in ("empty", "whole"))
        assert empty_types == types


def test_more_cut_segments_than_a_statement_may_have_parts(tmp_path: Path):
    archive = Archive(tmp_path)
    for first in range(1, 13):
        archive.put(first, first + 1)
    found = cover(archive.listed(), 1) * 30  # other archives would have a different segment each time
    store = StoreSettings(url=f"file://{tmp_path}/store")
    text = duckdb_view(found, store, "archive")
    assert max(part.count("UNION ALL") for part in text.split("SELECT * FROM (")) <= 100
    assert in_duckdb(found, store) == in_polars(found, store)["sequence"].to_list() == [*range(1, 14)] * 30


def test_what_reaches_s3_is_in_the_file_and_no_secret():
    found = cover([ref(1, 10), ref(5, 20)], 1)
    view, frame = duckdb_view(found, S3, "archive"), polars_frame(found, S3, "archive")
    assert "hush" not in view + frame
    secret = (
        "-- CREATE OR REPLACE SECRET floe (TYPE s3, KEY_ID '…', SECRET '…', REGION 'us-east-1', "
        "ENDPOINT '127.0.0.1:9000', USE_SSL false, URL_STYLE 'path', SCOPE 's3://frozen');"
    )
    assert secret in view.splitlines()
    assert f"'s3://frozen/{found[0].segment.key}'" in view
    assert f'"s3://frozen/{found[0].segment.key}"' in frame
    assert "'aws_endpoint_url': 'http://127.0.0.1:9000', 'aws_allow_http': 'true'" in frame
    amazon = StoreSettings(url="s3://frozen", region="eu-west-1")
    assert "REGION 'eu-west-1', URL_STYLE 'vhost', SCOPE" in duckdb_view(found, amazon, "archive")
    assert "_options = {'aws_region': 'eu-west-1'}" in polars_frame(found, amazon, "archive")
    virtual = S3.model_copy(update={"addressing_style": "virtual", "endpoint_url": "https://s3.example.net"})
    assert "ENDPOINT 's3.example.net', USE_SSL true, URL_STYLE 'vhost'" in duckdb_view(found, virtual, "archive")
    assert "'aws_virtual_hosted_style_request': 'true'" in polars_frame(found, virtual, "archive")


def test_neighbours_that_are_taken_whole_are_read_together():
    view = duckdb_view(cover([ref(1, 10), ref(11, 20), ref(15, 30), ref(31, 40), ref(41, 50)], 1), S3, "archive")
    assert (view.count("read_parquet"), view.count("WHERE")) == (3, 1)
    assert "WHERE sequence BETWEEN 21 AND 30\nUNION ALL" in view
    assert "1 chain, each sequence once: floe segments ls --cover --format duckdb" in view.splitlines()[0]
    assert str(CHAIN) not in view
