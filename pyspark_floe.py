"""`spark.read.format("floe")` and `spark.readStream.format("floe")`, without an import.

Spark 4 imports every module on its path whose name begins with `pyspark_`, in every session that uses a data source of
Python, and takes their `DefaultSource`. So this one is light, and raises nothing where something is missing: what it
needs is loaded when a table of the archive is.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
    from pyspark.sql.types import StructType

    from compaction.source import FloeDataSource

with suppress(Exception):  # no PySpark, or one without data sources: nothing that could be registered
    from pyspark.sql.datasource import DataSource

    class DefaultSource(DataSource):
        """Floe's archive. Options: `docs/archive.md`."""

        @classmethod
        def name(cls) -> str:
            return "floe"

        def _source(self) -> FloeDataSource:
            from compaction.source import FloeDataSource

            return FloeDataSource(self.options)

        def schema(self) -> StructType:
            return self._source().schema()

        def reader(self, schema: StructType) -> DataSourceReader:
            return self._source().reader(schema)

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
            return self._source().streamReader(schema)
