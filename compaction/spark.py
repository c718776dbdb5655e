"""The Spark session of a run: made when there is work for it, with the settings that a merge depends on."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from common.clock import Clock, SystemClock
from common.doctor import DoctorFinding, is_bad, skipped, warns, well
from common.errors import ConfigError, FloeError, Unavailable
from common.logs import get_logger
from common.metrics import version
from common.open import open_store
from common.segments.store import SegmentStore
from common.settings.root import Settings
from common.settings.types import duration_words

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql import SparkSession

log = get_logger(__name__)

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")
Batches = Iterable[pa.RecordBatch]

# Not for a user or a cluster to change: each of them could lose rows, double work or open a port.
FIXED = {
    "spark.speculation": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.ui.enabled": "false",
}
REFUSED = ("spark.speculation",)
DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    # What is shuffled is two numbers of each row, and only where segments overlap.
    "spark.sql.shuffle.partitions": "8",
}
_AUTHENTICATE = "spark.authenticate"
_SECRETS = ("spark.authenticate.secret", "spark.authenticate.secret.file")
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOG_CONFIGURATION = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
_LOCAL = re.compile(r"local(\[(?P<cores>\*|\d+)\])?")
_TASK_FAILURES = 4
# Text that tasks raise and the driver looks for.
DISTRIBUTION_PROBLEM = "E-COMMON"
LOOK = 0.5  # seconds between two looks at which items are done
RESULT = "id long, result binary"
_RESULT_FIELDS: list[Any] = [pa.field("id", pa.int64()), pa.field("result", pa.binary())]


class Spark:
    """Spark as a place where work is done: its session is made on first use and stopped at the end of the context.

    `settings` travel to the executors, secrets included, and into no log. `check`: called before work is begun,
    raises where the run is to stop.
    """

    def __init__(self, settings: Settings, check: Callable[[], None] = lambda: None) -> None:
        check_conf(settings.compaction.spark.conf)
        self.settings, self.check = settings, check
        self._session: SparkSession | None = None

    def session(self) -> SparkSession:
        """Raises ConfigError where PySpark or Java is missing."""
        # It warns of versions of pandas, which Floe does not use.
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
        if self._session is None:
            self._session = start(self.settings.compaction.spark.master, self.settings.compaction.spark.conf)
        return self._session

    def map(self, work: Callable[[SegmentStore, I], R], items: Sequence[I]) -> list[R]:
        """As `Runner.map`. Raises ConfigError (E-COMMON) for executors with other code, Unavailable."""
        session = self.session()
        self.check()
        finished = session.sparkContext.accumulator(0)  # bit n: item n is done; counted once, by the last stage
        task = task_of(pickle.dumps((self.settings, work, list(items))), version(), finished)
        try:
            with _watched(finished, ItemsDone(work.__name__, items, SystemClock()), self._cancel_if_asked):
                rows = session.range(0, len(items), 1, len(items)).mapInArrow(task, RESULT).collect()
        except Exception as error:  # Spark raises its own, py4j's and the tasks' errors
            raise spark_error(work.__name__, error) from error
        log.info("items done", action="items_done", work=work.__name__, items=len(items))
        # What our own executors answered, over Spark's connection.
        return [pickle.loads(row.result) for row in sorted(rows, key=lambda row: row.id)]  # noqa: S301

    def _cancel_if_asked(self) -> None:
        # Whoever asked may have come before the job was there to be cancelled.
        try:
            self.check()
        except FloeError:
            self.cancel()

    def cancel(self) -> None:
        """End what runs now, from another thread: whoever waits for it gets an error."""
        if self._session is not None:
            self._session.sparkContext.cancelAllJobs()

    def __enter__(self) -> Spark:
        return self

    def __exit__(self, *_: object) -> None:
        if self._session is not None:
            self._session.stop()


def check_conf(conf: Mapping[str, str]) -> None:
    """Raises ConfigError for a setting that would double the work of tasks; warns of those overridden."""
    for name, value in FIXED.items():
        found = conf.get(name, value)
        if found.lower() == value:
            continue
        if name in REFUSED:
            raise ConfigError(f"compaction.spark.conf.{name}: expected {value}, found {found}")
        log.warning("spark setting overridden", action="spark_conf", name=name, found=found, used=value)


def spark_conf(master: str, conf: Mapping[str, str]) -> dict[str, Any]:
    own = {"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}
    if _LOCAL.fullmatch(master):
        own |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    java = conf.get(_JAVA_OPTIONS, "")
    if "log4j" not in java:
        java = f"{java} {_LOG_CONFIGURATION}".strip()
    # Authentication between driver and executors, where there can be: the store's secrets travel there. YARN and
    # Kubernetes make a secret of their own; a cluster of `spark://` has one that must be given.
    if master == "yarn" or master.startswith("k8s:") or any(name in conf for name in _SECRETS):
        own[_AUTHENTICATE] = "true"
    return DEFAULTS | own | dict(conf) | {_JAVA_OPTIONS: java} | FIXED


def warn_of_open(master: str, conf: Mapping[str, Any]) -> None:
    if not master.startswith("local") and str(conf.get(_AUTHENTICATE, "false")).lower() != "true":
        log.warning(
            "spark without authentication: the store's secrets travel to executors that anybody may pose as; "
            "set compaction.spark.conf.spark.authenticate.secret to that of the cluster",
            action="spark_open",
            master=master,
        )


def with_retries(master: str) -> str:
    """`local[N]` runs a failed task only once; the form `local[N,M]` repeats it, as a cluster does."""
    match = _LOCAL.fullmatch(master)
    return f"local[{match['cores'] or 1},{_TASK_FAILURES}]" if match else master


def start(master: str, conf: Mapping[str, str]) -> SparkSession:
    """Raises ConfigError where PySpark or Java is missing, Unavailable where Spark fails."""
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigError(
            f"engine spark: {error}", hint="install floe-jetstream[spark], or use --engine local", code="E-SPARK"
        ) from error
    _set_environment(master, conf)
    warn_of_open(master, spark_conf(master, conf))
    try:
        builder = SparkSession.builder.appName("floe compaction").master(with_retries(master))
        return builder.config(map=spark_conf(master, conf)).getOrCreate()
    except Exception as error:
        if isinstance(error, PySparkException) and "JAVA" in str(error).upper():
            raise ConfigError(
                "engine spark: Java does not start",
                hint="install Java 17 or 21 and set JAVA_HOME, or use --engine local",
                code="E-SPARK",
            ) from error
        # Also py4j's errors: the JVM runs, but the master may not.
        raise spark_error("start", error) from error


def _set_environment(master: str, conf: Mapping[str, str]) -> None:
    """Executors of this host run this interpreter and this code, whatever `python3` on the PATH is."""
    if "spark.pyspark.python" not in conf:
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if _LOCAL.fullmatch(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    root = str(Path(__file__).parents[1])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])


def spark_error(what: str, error: Exception) -> FloeError:
    text = str(error)
    if DISTRIBUTION_PROBLEM in text:
        found = text[text.index(DISTRIBUTION_PROBLEM) :].splitlines()[0]
        return ConfigError(
            found.removeprefix(DISTRIBUTION_PROBLEM).lstrip(": "),
            hint="run executors in an environment of their own that has this version of floe-jetstream",
            code=DISTRIBUTION_PROBLEM,
        )
    log.debug("spark failed", action="spark_failed", what=what, error=text)
    line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return Unavailable(f"spark {what}: {line[:300]}", hint="see Spark's log; run it again", code="E-SPARK")


@runtime_checkable
class SizedItem(Protocol):
    """An item whose log line says more than its number. `size`: stored bytes that are read for it."""

    @property
    def size(self) -> int: ...
    def log_context(self) -> dict[str, object]: ...


class ItemsDone:
    """Logs each of `items` that is done, which it is of how many, and how long the rest takes about.

    `work`: the name of what is done with them. Made when the work begins; each item is told once.
    """

    def __init__(self, work: str, items: Sequence[object], clock: Clock) -> None:
        self._work, self._items, self._clock = work, items, clock
        self._begun, self._done = clock.monotonic(), set[int]()

    def done(self, number: int) -> None:
        """The item of this number, from 0, is done."""
        if number in self._done:
            return
        self._done.add(number)
        count, of, item = len(self._done), len(self._items), self._items[number]
        seconds = self._clock.monotonic() - self._begun
        context = {**item.log_context(), "bytes": item.size} if isinstance(item, SizedItem) else {}
        left = duration_words(seconds * (of - count) / count) if count < of else "0 s"
        log.info("item done", action="item_done", work=self._work, item=count, of=of, left=left, **context)


@contextmanager
def _watched(finished: Accumulator[int], said: ItemsDone, look_too: Callable[[], None]) -> Iterator[None]:
    """Has each item said when its task has ended, while the driver waits for all of them; `look_too` is called as
    often.
    """
    ended = threading.Event()

    def look() -> None:
        bits = finished.value
        for number in range(bits.bit_length()):
            if bits >> number & 1:
                said.done(number)

    def watch() -> None:
        while not ended.wait(LOOK):
            look()
            look_too()

    watching = threading.Thread(target=watch, name="spark-items", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
        look()


def task_of(
    payload: bytes, expected: str, finished: Accumulator[int] | None = None
) -> Callable[[Batches], Iterator[pa.RecordBatch]]:
    """The function that tasks run. It imports nothing of Floe before it knows whose `common` it would get.

    `finished`: gets the bit of each item that is done.
    """
    marker = DISTRIBUTION_PROBLEM

    def task(batches: Batches) -> Iterator[pa.RecordBatch]:
        import importlib
        import os.path

        def root(name: str) -> str:
            return os.path.dirname(os.path.dirname(str(importlib.import_module(name).__file__)))

        try:
            is_one = root("common") == root("compaction")
            found = str(importlib.import_module("common.metrics").version())
        except (ImportError, AttributeError) as error:
            is_one, found = False, str(error)
        if not is_one or found != expected:
            raise RuntimeError(
                f"{marker}: common in executors: expected that of floe-jetstream {expected}, found {found}"
            )
        for done in importlib.import_module("compaction.spark").run_items(payload, batches):
            if finished is not None:
                finished.add(sum(1 << number for number in done.column(0).to_pylist()))
            yield done

    return task


def run_items(payload: bytes, batches: Batches) -> Iterator[pa.RecordBatch]:
    """Runs in an executor. The batches hold the numbers of the items."""
    settings, work, items = pickle.loads(payload)  # noqa: S301 - from our own driver
    store = open_store(settings)
    try:
        for batch in batches:
            numbers: list[Any] = batch.column(0).to_pylist()
            for number in numbers:
                answer = {"id": [number], "result": [pickle.dumps(work(store, items[number]))]}
                yield pa.RecordBatch.from_pydict(answer, schema=pa.schema(_RESULT_FIELDS))
    finally:
        store.close()


# What `floe doctor` asks

JAVA_VERSIONS = (17, 21)
ASK_TIMEOUT = 20.0  # seconds for another program to tell its version


def examine_spark(settings: Settings, is_asked: bool) -> list[DoctorFinding]:
    """Whether Spark can start here; starts no session. Blocking.

    `is_asked`: compaction is what this host is for; else what is missing is only a warning.
    """
    bad, meaning = (is_bad if is_asked else warns), "`floe compact` with `engine: spark` cannot start on this host"
    found = [_java(bad, meaning)]
    try:
        import pyspark
    except ImportError as error:
        todo = "pip install 'floe-jetstream[spark]'\nor set `compaction.engine: local`"
        found.append(bad("spark", "pyspark", f"cannot be imported: {error}", meaning, todo))
    else:
        found.append(well("spark", "pyspark", pyspark.__version__))
    return [*found, _workers_python(settings, bad)]


def _java(bad: Callable[..., DoctorFinding], meaning: str) -> DoctorFinding:
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else "java"
    told = _told([program, "-version"])
    match = re.search(r'version "(\d+)', told)
    if match and int(match[1]) in JAVA_VERSIONS:
        return well("spark", "java", told.splitlines()[0])
    todo = "sudo apt-get install -y openjdk-17-jre-headless\nor set JAVA_HOME, or `compaction.engine: local`"
    seen = told.splitlines()[0] if told else "none"
    return bad("spark", "java", f"expected Java 17 or 21, found {seen} ({program})", meaning, todo)


def _workers_python(settings: Settings, bad: Callable[..., DoctorFinding]) -> DoctorFinding:
    """The interpreter of the workers: this one, unless Spark's settings name another."""
    spark = settings.compaction.spark
    ours, theirs = sys.version.split()[0], spark.conf.get("spark.pyspark.python", "")
    if not theirs and _LOCAL.fullmatch(spark.master):
        return well("spark", "python", f"{ours}, this one")
    if not _LOCAL.fullmatch(spark.master):
        meaning = (
            "the workers are on other hosts: each needs this version of Python (of two numbers) and of floe-jetstream"
        )
        return skipped("spark", "python", f"{spark.master}: {theirs or sys.executable} on each worker", meaning)
    found = _told([theirs, "-c", "import sys, common.metrics; print(sys.version.split()[0], common.metrics.version())"])
    expected = f"{ours.rpartition('.')[0]}."
    if found.startswith(expected) and found.split()[1:] == [version()]:
        return well("spark", "python", f"{found.split()[0]}, {theirs}")
    meaning = "workers that run another Python, or another Floe, end the job with E-COMMON or E-SPARK"
    todo = "take spark.pyspark.python out of compaction.spark.conf, or install this floe-jetstream there"
    seen = found.splitlines()[-1] if found else "none"
    return bad(
        "spark",
        "python",
        f"{theirs}: expected {expected}x with floe-jetstream {version()}, found {seen}",
        meaning,
        todo,
    )


def _told(words: list[str]) -> str:
    """What a program prints, on both outputs; empty where it does not start."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=ASK_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr).strip()
