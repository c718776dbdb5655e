"""Spark's daemon of Python workers, with their imports done: a worker is a fork of it and would repeat them."""

from importlib import import_module

# These imports take most of the processor time of a worker that does little.
for name in ("pyarrow.parquet", "pandas", "pyspark.sql.pandas.serializers", "compaction.run", "compaction.source"):
    import_module(name)

if __name__ == "__main__":
    from pyspark.daemon import manager

    manager()
