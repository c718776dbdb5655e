"""One Spark session for a whole test run: it takes seconds to start."""

from __future__ import annotations

import os
import signal
import time
import warnings
from functools import cache
from pathlib import Path

from pyspark.sql import SparkSession

from common.segments.store import SegmentStore
from common.settings.root import Settings
from compaction.source import register
from compaction.spark import Spark, start
from tests.support.basics import PATIENCE

CONF = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.ui.showConsoleProgress": "false",
    # For jobs of a few rows, compiling them well costs more than it saves.
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark.sql.codegen.wholeStage": "false",
}


@cache
def spark_session() -> SparkSession:
    """The session, started on first use with the settings that Floe itself starts one with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # py4j and pyspark warn of what is theirs
        session = start("local[2]", CONF)
        register(session)
    return session


class SharedSpark(Spark):
    """What a run takes for its own session; it does not stop it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._session = spark_session()

    def __exit__(self, *_: object) -> None:
        pass


# Work for executors, who import it from here.


def wait_for_file(_store: SegmentStore, path: str) -> str:
    """Work that ends at once where `path` is empty, else once that file exists."""
    deadline = time.monotonic() + PATIENCE
    while path and not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}: nobody made it")
        time.sleep(0.05)
    return path


def kill_once(_store: SegmentStore, marker: Path) -> str:
    """The first executor to try this dies as a killed one does."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return "done"
    os.kill(os.getpid(), signal.SIGKILL)
    return "unreachable"


def failing(_store: SegmentStore, _item: int) -> None:
    """An error that nobody foresaw."""
    raise RuntimeError("something nobody foresaw")
