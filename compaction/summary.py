"""What the archive holds, asked of Spark: one row for each chain, as JSON.

    python -m compaction.summary -c central.yaml

Reads every row of the cover through `spark.read.format("floe")`, so it counts what any other query would see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from common.chain import Chain
from common.service.exits import end_with
from common.service.output import print_json
from common.settings import loader
from common.settings.root import Settings
from compaction.spark import Spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

CHAIN_COLUMNS = ("site", "feed", "incarnation", "partition")


def summarise(settings: Settings) -> list[dict[str, object]]:
    """For each chain: messages, distinct sequences and subjects, bytes of payloads, first and last sequence.

    Empty where the archive holds no message. Raises ConfigError where PySpark or Java is missing, Unavailable
    where Spark fails.
    """
    from compaction.source import source_of

    with Spark(settings.compaction.spark.master, settings.compaction.spark.conf) as spark:
        session = spark.session()
        session.dataSource.register(source_of(settings, "floe"))
        return [_document(row) for row in _counted(session.read.format("floe").load()).collect()]


def _counted(archive: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return (
        archive.groupBy(*CHAIN_COLUMNS)
        .agg(
            f.count("*").alias("messages"),
            f.count_distinct("sequence").alias("sequences"),
            f.count_distinct("subject").alias("subjects"),
            f.sum(f.octet_length("payload")).alias("payload_bytes"),
            f.min("sequence").alias("first"),
            f.max("sequence").alias("last"),
        )
        .orderBy(*CHAIN_COLUMNS)
    )


def _document(row: Row) -> dict[str, object]:
    counts = {name: value for name, value in row.asDict().items() if name not in CHAIN_COLUMNS}
    return {"chain": str(Chain(row.site, row.feed, row.incarnation, row.partition)), **counts}


@click.command()
@click.option("-c", "--config", "path", required=True, help="The configuration that names the store.")
def main(path: str) -> None:
    """Count the messages of the archive with a Spark query."""
    print_json(summarise(loader.load(path)))


if __name__ == "__main__":
    with end_with():
        main(standalone_mode=False)
