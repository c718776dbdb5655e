"""`spark.readStream.format("floe")` in queries of Structured Streaming: restarts, compaction, holes, each row once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming import StreamingQuery

from common.segments.documents import ChainDocument, ChainStore
from tests.support.basics import eventually
from tests.support.compaction import CHAIN, OTHER, Archive, begun, run
from tests.support.spark import spark_session

pytestmark = pytest.mark.spark


class Sink:
    """A query from the archive into a folder of Parquet, which Spark writes exactly once."""

    def __init__(self, archive: Archive) -> None:
        self._archive, self.folder = archive, archive.folder / "sink"

    def start(self, trigger: dict[str, object], **options: object) -> StreamingQuery:
        reader = spark_session().readStream.format("floe").option("url", f"file://{self._archive.folder}/store")
        for name, value in options.items():
            reader = reader.option(name, str(value))
        writer = reader.load().writeStream.format("parquet")
        writer = writer.option("checkpointLocation", f"{self._archive.folder}/checkpoint")
        return writer.trigger(**trigger).start(str(self.folder))

    def run(self, **options: object) -> StreamingQuery:
        """All that is there now."""
        query = self.start({"availableNow": True}, **options)
        query.awaitTermination()
        return query

    def found(self) -> list[tuple[str, int]]:
        if not (self.folder / "_spark_metadata").exists():
            return []
        frame = spark_session().read.schema("site string, sequence long").parquet(str(self.folder))
        return sorted((row.site, row.sequence) for row in frame.collect())


def all_of(*parts: tuple[str, range]) -> list[tuple[str, int]]:
    return sorted((site, sequence) for site, sequences in parts for sequence in sequences)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return begun(tmp_path, CHAIN)


def test_a_query_goes_on_from_its_checkpoint_through_compaction_holes_and_new_chains(archive: Archive):
    sink = Sink(archive)
    for first in (1, 11, 21, 41):
        archive.put(first, first + 9)
    query = sink.run(max_rows_per_batch=12)
    assert sink.found() == all_of(("us-east", range(1, 31))), "up to the hole"
    last = query.lastProgress["sources"][0]
    assert json.loads(last["endOffset"])[str(CHAIN)] == 31
    assert json.loads(last["latestOffset"]) == {str(CHAIN): 51}, "where the archive ends"
    archive.age_all(1000)
    run(archive.folder)
    assert "1:1..30" in archive.ranges()
    archive.put(31, 40)
    ChainStore(archive.objects, archive.layout).create_chain(OTHER, ChainDocument((), 1, 1))
    archive.put(1, 5, chain=OTHER)
    archive.put(11, 15, chain=OTHER)
    sink.run()
    assert sink.found() == all_of(("us-east", range(1, 51)), ("eu-west", range(1, 6)))
    archive.put(6, 10, chain=OTHER)
    archive.age_all(1000)
    run(archive.folder)
    sink.run(max_segments_per_batch=1)
    assert sink.found() == all_of(("us-east", range(1, 51)), ("eu-west", range(1, 16)))


def test_a_running_query_takes_what_comes_while_compaction_deletes(archive: Archive):
    sink, end = Sink(archive), 0
    archive.put(1, 10)
    asked = {"since": "2023-11-14T22:13:20.000005005Z", "subject": "nodes.>"}  # from 5 on, without `bad.…`
    query = sink.start({"processingTime": "0 seconds"}, **asked)
    try:
        for _ in range(3):
            for _ in range(3):
                end += 10
                archive.put(end - 9, end)
            archive.age_all(1000)
            run(archive.folder)
            wanted = [("us-east", n) for n in range(5, end + 1) if n % 17]
            eventually(lambda wanted=wanted: sink.found() == wanted)
    finally:
        query.stop()
    assert [each for each in archive.ranges() if each.startswith("1:")] != []
    archive.put(end + 1, end + 5)
    sink.run(**asked)
    whole = archive.read()
    wanted = [row for row in whole.to_pylist() if row["sequence"] >= 5 and row["subject_raw"] is None]
    found = spark_session().read.parquet(str(sink.folder)).select(whole.schema.names).orderBy("sequence")
    assert found.toArrow().to_pylist() == wanted


def test_what_is_planned_and_then_lost_ends_the_query_by_name(archive: Archive):
    ref = archive.put(1, 10)
    archive.path(ref.key).write_bytes(bytes(ref.size))
    with pytest.raises(StreamingQueryException, match=ref.key):
        Sink(archive).run()
