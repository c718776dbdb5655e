"""What `spark.read.format("floe")` may be asked: times as the commands take them, filters, what only streams have."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from common.clock import parse_time
from common.errors import UsageError
from common.segments.archive import MARGIN_NS
from common.segments.columns import SCHEMA, record_batch
from common.segments.reader import RowFilter
from compaction.source_options import OPTIONS, parse_options

NOW = 1_800_000_000.0
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "archive.md"


def parsed(**options: str):  # type: ignore[no-untyped-def]
    return parse_options({"url": "file:///tmp/a", **options}, NOW)


def test_times_are_read_as_the_commands_read_them() -> None:
    ago = (int(NOW) - 7200) * 10**9
    assert parsed(since="2h").wanted.begin == parsed(from_time="2h ago").wanted.begin == ago
    asked = parsed(since="2026-01-02T03:04:05Z", until="2026-01-02T03:04:06.5+00:00").wanted
    assert (asked.begin, asked.end) == (parse_time("2026-01-02T03:04:05Z"), parse_time("2026-01-02T03:04:06.5Z"))
    assert parsed().wanted == RowFilter()
    assert (parsed().margin_ns, parsed(time_margin="2h").margin_ns) == (MARGIN_NS, 7200 * 10**9)
    assert parsed(until="9999-01-01T00:00:00Z").wanted.end == 2**63 - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"since": "yesterday"}, "option since: expected a time such as"),
        ({"since": "2h", "from_time": "2h"}, "expected one of the options since and from_time, found both"),
        ({"since": "1h", "until": "2h"}, "option since: expected before "),
        ({"subject": "nodes.>.a"}, "option subject: expected filters such as"),
        ({"level": "10"}, "option level: expected a number from 0 to 9"),
        ({"time_margin": "long"}, "option time_margin: expected"),
        ({"from": "now"}, "option from: expected latest or earliest, found 'now'"),
        ({"from": "latest", "since": "2h"}, "option from: excludes since"),
        ({"max_rows_per_batch": "1", "max_segments_per_batch": "1"}, "max_rows_per_batch and max_segments_per_batch"),
        ({"max_rows_per_batch": "0"}, "expected a number from 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parsed(**options)


def test_what_only_one_way_of_reading_has_is_refused_by_the_other() -> None:
    with pytest.raises(UsageError, match="option max_rows_per_batch: only for readStream"):
        parsed(max_rows_per_batch="5").refuse(streams=False)
    with pytest.raises(UsageError, match="option until: only for read"):
        parsed(until="2h").refuse(streams=True)
    parsed(since="2h", subject="a.>").refuse(streams=True)


def test_the_page_has_a_row_for_every_option_and_column() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
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


@pytest.mark.parametrize(
    ("asked", "sequences"),
    [
        (RowFilter(), [1, 2, 3, 4, 5]),
        (RowFilter(begin=11, end=31), [3, 4]),
        (RowFilter(begin=10, end=40), [2, 3, 4]),
        (RowFilter(subjects=("nodes.*.temp",)), [1, 2]),
        (RowFilter(subjects=("nodes.>", "other")), [1, 2, 3, 5]),
        (RowFilter(subjects=("bad.*",)), [4]),
        (RowFilter(begin=30, subjects=("nodes.1",)), []),
    ],
)
def test_rows_by_time_and_subject(asked: RowFilter, sequences: list[int]) -> None:
    times, nothing = [10 * n for n in range(5)], [None] * 5
    batch = record_batch([1, 2, 3, 4, 5], times, SUBJECTS, nothing, [b""] * 5)
    assert asked.selected(batch).column("sequence").to_pylist() == sequences


@pytest.mark.parametrize(
    ("asked", "times", "subjects", "may"),
    [
        (RowFilter(begin=10), (0, 9), None, False),
        (RowFilter(begin=10), (0, 10), None, True),
        (RowFilter(end=10), (10, 20), None, False),
        (RowFilter(subjects=("b.c",)), (0, 1), None, True),
        (RowFilter(subjects=("b.c",)), (0, 1), (b"a", b"b.d"), True),
        (RowFilter(subjects=("b.c",)), (0, 1), (b"b.d", b"z"), False),
        (RowFilter(subjects=("b.*",)), (0, 1), (b"a", b"b.a"), True),
        (RowFilter(subjects=("b.*",)), (0, 1), (b"b.z", b"c"), True),
        (RowFilter(subjects=("b.*",)), (0, 1), (b"a", b"b"), False),
        (RowFilter(subjects=("b.*", "x.>")), (0, 1), (b"c", b"w"), False),
        (RowFilter(subjects=("*.c",)), (0, 1), (b"x", b"y"), True),
    ],
)
def test_row_groups_that_cannot_have_such_rows_are_left_out(
    asked: RowFilter, times: tuple[int, int], subjects: tuple[bytes, bytes] | None, may: bool
) -> None:
    assert asked.may_take(times, subjects) is may
