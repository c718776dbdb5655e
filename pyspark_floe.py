"""Registration of `spark.read.format("floe")` and `spark.readStream.format("floe")`, without an import by the user.

Spark 4 imports every module on its path with a name that begins with `pyspark_`, in every session that uses a Python
data source, and registers its `DefaultSource`. So this module is light and raises nothing if a dependency is missing:
the rest is imported when a table of the archive is loaded.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
    from pyspark.sql.types import StructType

    from compaction.source import FloeDataSource

with suppress(Exception):  # no PySpark, or a version without data sources: nothing to register
    from pyspark.sql.datasource import DataSource

    class DefaultSource(DataSource):
        """Data source of Floe's archive. Options: `docs/guides/query.md`."""

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
