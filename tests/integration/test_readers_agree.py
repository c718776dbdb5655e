"""Row counts, order and values of one archive, as pyarrow, Spark, DuckDB and Polars read its cover."""

import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from common.archive.columns import SCHEMA
from common.archive.documents import ChainDocument, ChainStore
from common.chain import Chain
from common.nats.headers import parse_block
from common.objects.open import open_objects
from common.segments_cli import segments
from common.settings.loader import load
from tests.support.basics import SharedS3, seeded
from tests.support.compaction import Archive, begun, rows, run
from tests.support.segments import batch_of, message
from tests.support.spark import finished, spark_session

ROOT = Path(__file__).parents[2]
DUCKDB_1_4 = ROOT / ".venv" / "duckdb-1.4"  # with httpfs, by `make setup`
#: Two partitions, the next incarnation, another site and feed with names that look like something else.
CHAINS = [
    Chain("007", "orders$é", 1, 2),
    Chain("us-east", "NODES", 0, 0),
    Chain("us-east", "NODES", 0, 1),
    Chain("us-east", "NODES", 1, 0),
]
END = 120
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fill(archive: Archive) -> None:
    """Fill each chain with 1..END without a hole: level 0 with an empty segment, and overlapping ones of all levels.

    Every thirteenth message is deleted; subjects that are not UTF-8, repeated headers and empty values are among them.
    """
    random = seeded()

    def put(chain: Chain, first: int, last: int, level: int = 0) -> None:
        kept = [n for n in range(first, last + 1) if n % 13 and not 81 <= n <= 90]
        archive.put(first, last, rows(kept, sample_key="node"), chain=chain, level=level)

    for chain in CHAINS:
        for first, last in ((1, 20), (21, 40), (41, 60), (61, 80), (81, 90), (91, END)):
            put(chain, first, last)
        put(chain, 1, 40, level=1)
        put(chain, 31, 55, level=1)
        for _ in range(3):
            first = random.randint(1, END - 1)
            put(chain, first, random.randint(first + 1, END), level=random.randint(0, 2))


def configured(folder: Path, store: str) -> Path:
    config = folder / "floe.yaml"
    config.write_text(f"store: {store}\n")
    config.chmod(0o600)
    return config


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    found = begun(tmp_path, *CHAINS)
    fill(found)
    configured(tmp_path, f"{{url: 'file://{found.folder}/store'}}")
    return found


Table = list[dict[str, Any]]


def naive(archive: Archive) -> Table:
    """Every row of every segment, each sequence once: without a cover or any code of Floe but the layout."""
    found = {}
    for info in archive.objects.list("data/"):
        if (name := archive.layout.parse_segment(info.key)) is None:
            continue
        for row in pq.read_table(pa.BufferReader(archive.objects.get(info.key) or b"")).to_pylist():
            found[name.chain, row["sequence"]] = {**name.chain.log_context(), **row}
    return [row for _, row in sorted(found.items(), key=lambda item: item[0])]


def plain(table: pa.Table) -> Table:
    """The rows in their order, without the level."""
    chain = [("site", pa.string()), ("feed", pa.string()), ("incarnation", pa.int32()), ("partition", pa.int32())]
    schema = pa.schema([*chain, *SCHEMA.remove_metadata()])
    return table.select(schema.names).cast(schema).to_pylist()


def with_pyarrow(archive: Archive) -> Table:
    return [{**chain.log_context(), **row} for chain in CHAINS for row in archive.read(chain).to_pylist()]


def spark_reader(archive: Archive, reader: Any) -> Any:
    return reader.format("floe").option("config", f"{archive.folder}/floe.yaml")


def with_spark(archive: Archive) -> Table:
    return plain(spark_reader(archive, spark_session().read).load().toArrow())


def with_stream(archive: Archive) -> Table:
    """The rows of each chain in the order of arrival."""
    batches: list[pa.Table] = []
    reader = spark_reader(archive, spark_session().readStream).option("max_rows_per_batch", 250)
    writer = reader.load().writeStream.foreachBatch(lambda frame, _: batches.append(frame.toArrow()))
    writer = writer.option("checkpointLocation", f"{archive.folder}/checkpoint").trigger(availableNow=True)
    finished(writer.start)
    assert len(batches) > 2
    found = plain(pa.concat_tables(batches))
    return sorted(found, key=lambda row: (row["site"], row["feed"], row["incarnation"], row["partition"]))


def made(archive: Archive, form: str, *options: str) -> Path:
    """Write the output of `floe segments ls` to a file."""
    path = archive.folder / f"view.{form}"
    words = ["ls", *options, "--cover", "--format", form, "-c", f"{archive.folder}/floe.yaml"]
    result = CliRunner().invoke(segments, words)
    assert result.exit_code == 0, result.output
    path.write_text(result.stdout)
    return path


def with_duckdb(archive: Archive) -> Table:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'").execute(made(archive, "duckdb").read_text())
        return plain(connection.sql("SELECT * FROM messages").to_arrow_table())


def with_every_level(archive: Archive) -> Table:
    """The query of the docs that needs no Floe."""
    query = block("sql", "DISTINCT ON").replace("s3://floe", f"{archive.folder}/store")
    with duckdb.connect() as connection:
        return plain(connection.execute("SET TimeZone = 'UTC'").sql(query).to_arrow_table())


def with_polars(archive: Archive) -> Table:
    frame = runpy.run_path(str(made(archive, "polars")))["messages"]
    assert isinstance(frame, polars.LazyFrame)
    return plain(frame.collect().to_arrow())


READERS: list[Callable[[Archive], Table]] = [with_pyarrow, with_duckdb, with_polars, with_every_level]


@pytest.mark.spark
def test_every_reader_sees_the_same_rows_in_the_same_order(archive: Archive):
    wanted = naive(archive)
    assert len(wanted) == len(CHAINS) * (END - END // 13 - 10)
    assert [reader.__name__ for reader in (*READERS, with_spark, with_stream) if reader(archive) != wanted] == []
    archive.age_all(1000)
    run(archive.folder)
    assert [reader.__name__ for reader in READERS if reader(archive) != wanted] == [], "after a merge"


def test_the_columns_of_a_key_have_the_types_that_the_docs_name(tmp_path: Path):
    archive = begun(tmp_path, CHAINS[1], numbers := Chain("77", "12"))
    configured(tmp_path, f"{{url: 'file://{tmp_path}/store'}}")
    files = [archive.path(archive.put(1, 2, chain=chain).key) for chain in (CHAINS[1], numbers)]
    text = (ROOT / "docs" / "reference" / "formats.md").read_text()
    documented = {}
    for names, *types in re.findall(r"^\| (`.*?) \|" + r" (.*?) \|" * 5 + "$", text, re.MULTILINE):
        documented |= dict.fromkeys(re.findall("`(.*?)`", names), types[1:])

    def of_duckdb(source: str) -> dict[str, str]:
        return {name: kind for name, kind, *_ in duckdb.sql(f"DESCRIBE FROM {source}").fetchall()}

    def of_polars(frame: polars.LazyFrame) -> dict[str, str]:
        return {name: str(kind) for name, kind in frame.collect_schema().items()}

    duckdb.sql(made(archive, "duckdb").read_text())
    views = [of_duckdb("messages"), of_polars(runpy.run_path(str(made(archive, "polars")))["messages"])]
    assert (views[0]["timestamp"], views[0]["subject_raw"]) == ("TIMESTAMP WITH TIME ZONE", "BLOB")
    for path in files:
        alone = of_duckdb(f"read_parquet('{path}')"), of_polars(polars.scan_parquet(path, hive_partitioning=True))
        for name in ("site", "feed", "incarnation", "partition", "level"):
            wanted = [re.split("[;,]", each)[0] for each in documented[name]]
            if path == files[1] and name in ("site", "feed"):
                wanted[2:] = ["BIGINT", "Int64"]
                assert all("if all are numbers" in each for each in documented[name][2:])
            assert [each[name] for each in (*views, *alone)] == wanted, name


def block(fence: str, holding: str) -> str:
    """The one code block of the documentation that contains `holding`."""
    text = (ROOT / "docs" / "guides" / "query.md").read_text()
    [found] = [
        each for each in re.findall(rf"^```{fence}\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if holding in each
    ]
    return str(found)


@pytest.mark.spark
def test_the_queries_of_the_docs_find_the_messages_of_one_node_in_the_last_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    chain, now, hour_ns = Chain("us-east", "NODE_DATA"), time.time_ns(), 3600 * 10**9
    times = {n: now - (48 - n) * hour_ns - hour_ns // 2 for n in range(1, 48)}
    found = [
        message(n, b"row %d" % n, timestamp_ns=at, subject=b"nodes.n%d.t" % (17 + n % 4)) for n, at in times.items()
    ]
    begun(tmp_path, chain).put(1, 47, batch_of(found), chain=chain)
    configured(tmp_path, f"{{url: 'file://{tmp_path}/store'}}").rename(tmp_path / "central.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(polars.DataFrame, "__repr__", lambda frame: str(frame.rows()))
    page = (ROOT / "docs" / "guides" / "query.md").read_text()
    for kind, text in FENCE.findall(page.partition("## Messages of one node")[2].partition("\n## ")[0]):
        if kind == "python":
            body = ast.parse(text.replace("/etc/floe", str(tmp_path))).body
            exec(compile(ast.Interactive(body), "query.md", "single"), {"spark": spark_session()})
            shown = capsys.readouterr().out
        else:
            command, _, view = text.partition(" > ")
            shown = CliRunner().invoke(segments, shlex.split(command)[2:]).stdout
            if view:
                (tmp_path / view.strip()).write_text(shown)
                continue
        assert sorted(map(int, re.findall(r"row (\d+)", shown))) == [28, 32, 36, 40, 44], (text, shown)


def parsed(block: bytes | None) -> Table | None:
    """Names and values as text."""

    def text(raw: bytes) -> str:
        return raw.decode("utf-8", "backslashreplace")

    return None if block is None else [{"name": text(name), "value": text(value)} for name, value in parse_block(block)]


BLOCKS = [
    None,
    b"",
    b"NATS/1.0\r\n\r\n",
    b"NATS/1.0 100\r\nA: 1\r\nA: 1\r\na:2\r\n\r\n",
    "NATS/1.0\r\nÄ:  ö: \t\r\n: none\r\nno colon\r\nB:\r\nC: a\nb\r\n\r\n".encode(),
    b"NATS/1.0\r\nB: \xff\r\n\r\n",
]


def test_the_recipes_parse_headers_as_floe_does():
    wanted = [parsed(block) for block in BLOCKS]
    table = pa.table({"headers": pa.array(BLOCKS, pa.binary())})
    scope: dict[str, Any] = {"polars": polars, "messages": polars.LazyFrame(table)}
    exec(block("python", "headers_parsed"), scope)
    assert scope["parsed"].collect()["headers_parsed"].to_list() == wanted
    with duckdb.connect() as connection:
        connection.register("messages", table)
        macro, query = block("sql", "MACRO headers_of").rsplit(";\n\n", 1)
        found = connection.execute(macro).sql(query).to_arrow_table()
        wanted[-1] = [{"name": "B", "value": "\\xFF"}]
        assert found["headers_parsed"].to_pylist() == wanted


def test_the_recipes_find_the_newest_messages_and_the_traffic(archive: Archive):
    newest, sizes = dict[Any, Any](), dict[Any, list[int]]()
    for row in naive(archive):  # in order
        newest[row["site"], row["feed"], row["sample_key"] or row["subject"]] = row
        hour = row["timestamp"].replace(minute=0, second=0, microsecond=0)
        sizes.setdefault((row["site"], row["feed"], hour), []).append(len(row["payload"]))
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'").execute(made(archive, "duckdb").read_text())
        found = plain(connection.sql(block("sql", "arg_max")).to_arrow_table())
        traffic = connection.sql(block("sql", "date_trunc")).to_arrow_table().to_pylist()
    assert sorted(found, key=str) == sorted(newest.values(), key=str)
    counts = [(*key, len(each), sum(each)) for key, each in sorted(sizes.items())]
    assert [tuple(row.values()) for row in traffic] == counts


IN_DUCKDB_1_4 = """
import json, sys, duckdb, pyarrow.parquet
assert duckdb.__version__.startswith("1.4."), duckdb.__version__
connection = duckdb.connect(config={"extension_directory": sys.argv[1]})
*statements, query = json.load(sys.stdin)
for each in statements:
    connection.execute(each)
pyarrow.parquet.write_table(connection.sql(query).to_arrow_table(), sys.argv[2])
"""


@pytest.mark.servers
def test_the_recipes_of_the_docs_on_s3(s3: SharedS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bucket, keys = s3.new_bucket(), {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}
    secrets = f"access_key_id: {s3.access_key}, secret_access_key: {s3.secret_key}"
    config = configured(tmp_path, f"{{url: 's3://{bucket}', endpoint_url: '{s3.endpoint_url}', {secrets}}}")
    archive = Archive(tmp_path, open_objects(load(str(config)).store))
    for chain in CHAINS:
        ChainStore(archive.objects, archive.layout).create_chain(chain, ChainDocument((), 1, 1))
    fill(archive)
    wanted = naive(archive)
    files = {form: made(archive, form) for form in ("duckdb", "polars")}
    assert s3.secret_key not in "".join(path.read_text() for path in files.values())

    with monkeypatch.context() as patch:
        for name, value in keys.items():
            patch.setenv(name, value)
        found = runpy.run_path(str(files["polars"]))
        exec(block("python", "headers_parsed"), found)
        frame = found["parsed"].collect()
    assert plain(frame.to_arrow()) == wanted
    assert frame["headers_parsed"].to_list() == [parsed(row["headers"]) for row in wanted]

    if not DUCKDB_1_4.exists():
        pytest.skip("DuckDB with httpfs is not here: `make setup` installs it where there are wheels")
    view = files["duckdb"].read_text()
    settings = "".join(
        line.removeprefix("-- ") + "\n" for line in re.findall("^-- (?:INSTALL|CREATE).*", view, re.MULTILINE)
    )
    settings = settings.replace("KEY_ID '…'", f"KEY_ID '{s3.access_key}'").replace("'…'", f"'{s3.secret_key}'")
    macro, query = block("sql", "MACRO headers_of").rsplit(";\n\n", 1)
    target = tmp_path / "told.parquet"
    words = [sys.executable, "-c", IN_DUCKDB_1_4, f"{DUCKDB_1_4}/duckdb_ext/extensions", str(target)]
    statements = json.dumps(["SET TimeZone = 'UTC'", settings, view, macro, query])
    subprocess.run(words, input=statements, text=True, env={**os.environ, "PYTHONPATH": str(DUCKDB_1_4)}, check=True)
    table = pq.read_table(target)
    assert (plain(table), table["headers_parsed"].to_pylist()) == (wanted, [parsed(row["headers"]) for row in wanted])
