"""Spark session of a run: made when there is work for it, with the settings that a merge depends on."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import pickle
import pwd
import re
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from common.archive.store import SegmentGone, SegmentStore
from common.clock import Clock, SystemClock
from common.doctor import DoctorFinding, ok, problem, skipped, warning
from common.errors import ConfigError, FloeError, Refused, SegmentCorrupt, Unavailable
from common.exits import INSTALL_ALL
from common.logs import get_logger
from common.metrics import version
from common.open import open_store
from common.service.process import stop_on_signals_sync
from common.service.progress import Progress, format_share
from common.settings.root import Settings, SparkSettings
from common.settings.types import duration_words
from compaction.plan import Output

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql import SparkSession

log = get_logger(__name__)

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")
Batches = Iterable[pa.RecordBatch]

# Users and clusters may not change these: each could lose rows, double work or open a port.
FIXED_CONF = {
    "spark.speculation": "false",
    "spark.files.ignoreMissingFiles": "false",
    "spark.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreInvalidPartitionPaths": "false",
    "spark.sql.parquet.fieldId.read.ignoreMissing": "false",
    "spark.ui.enabled": "false",
}
REFUSED_CONF = ("spark.speculation",)
DEFAULT_CONF = {
    "spark.sql.session.timeZone": "UTC",
    # A shuffle moves two numbers of each row, and only if segments overlap.
    "spark.sql.shuffle.partitions": "8",
}
_AUTHENTICATE, _SECRET, _SECRET_FILE = (f"spark.authenticate{end}" for end in ("", ".secret", ".secret.file"))
_CRYPTO = "spark.network.crypto.enabled"
# Tasks hold the store's secret: it is encrypted in transit and on an executor's disk.
_ENCRYPTION_CONF = {_CRYPTO: "true", "spark.io.encryption.enabled": "true"}
_ENCRYPTIONS = (_CRYPTO, "spark.ssl.rpc.enabled", "spark.authenticate.enableSaslEncryption")
_REDACTION = "spark.redaction.regex"
_CONFIDENTIAL = "(?i)secret|password|token|access[.]?key"  # Spark's own; it is added to a configured pattern
_PYTHON = "spark.pyspark.python"
_GATEWAY = "PYSPARK_GATEWAY_PORT"  # set if `spark-submit` has started Java, and with it this process
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOG_CONFIGURATION = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
_LOCAL = re.compile(r"local(\[(?P<cores>\*|\d+)\])?")
_TASK_FAILURES = 4
# Errors of tasks that the driver recognises.
_TASK_ERRORS = (SegmentCorrupt, SegmentGone, Refused)
DISTRIBUTION_ERROR_CODE = "E-COMMON"
POLL_INTERVAL_S = 0.5  # seconds between two checks for items that are done
RESULT_SCHEMA = "id long, result binary"


class Spark(AbstractContextManager["Spark"]):
    """Runner on Spark: its session is made on first use and stopped at the end of the context.

    `settings`: those that tasks get, the store with its secret; they are not logged. `check`: called before work is
    started, raises if the run is to stop.
    """

    def __init__(self, settings: Settings, check: Callable[[], None] = lambda: None) -> None:
        check_conf(settings.compaction.spark.conf)
        self.settings, self.check, self._spark = settings_of_tasks(settings), check, settings.compaction.spark
        self._session: SparkSession | None = None

    def session(self) -> SparkSession:
        """Return the session. Raises ConfigError if PySpark or Java is missing, or tasks would travel in clear."""
        # PySpark warns of versions of pandas, which Floe does not use.
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
        if self._session is None:
            session = start_session(self._spark.master, self._spark.conf)
            try:
                holds_secret = bool(self.settings.store.secret_access_key.get_secret_value())
                # The effective configuration: the cluster's own defaults count too.
                check_encrypted(self._spark.master, dict(session.sparkContext.getConf().getAll()), holds_secret)
            except ConfigError:
                session.stop()
                raise
            self._session = session
        return self._session

    def map(self, work: Callable[[SegmentStore, I], R], items: Sequence[I]) -> list[R]:
        """Run `work` as `Runner.map`. Raises ConfigError (E-COMMON) for executors with other code, Unavailable."""
        session = self.session()
        self.check()
        finished = session.sparkContext.accumulator(0)  # bit n: item n is done; counted once, by the last stage
        task = make_task(pickle.dumps((self.settings, work, list(items))), version(), finished)
        item_log = ItemLog(work.__name__, items, SystemClock())

        def log_done() -> None:
            for number in range(finished.value.bit_length()):
                if finished.value >> number & 1:
                    item_log.add_done(number)

        try:
            with closing(item_log), self.cancelled_on_stop(log_done):
                rows = session.range(0, len(items), 1, len(items)).mapInArrow(task, RESULT_SCHEMA).collect()
        except Exception as error:  # Spark raises its own, py4j's and the tasks' errors
            raise spark_error(work.__name__, error) from error
        log.info("items finished", action="items_finished", work=work.__name__, items=len(items))
        # Results of our own executors, over Spark's connection.
        return [pickle.loads(row.result) for row in sorted(rows, key=lambda row: row.id)]  # noqa: S301

    @contextmanager
    def cancelled_on_stop(self, report: Callable[[], None]) -> Iterator[None]:
        """Cancel the work of the block once the run is to stop, also if that was requested before Spark started.

        `report`: called every POLL_INTERVAL_S seconds, in a thread, as long as the driver waits in the block; and at
        its end.
        """
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(POLL_INTERVAL_S):
                try:
                    self.check()
                except FloeError:
                    self.cancel()
                report()

        watching = threading.Thread(target=watch, name="spark-poll", daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()
            report()

    def cancel(self) -> None:
        """Cancel all running jobs, from another thread: a caller that waits for one gets an error."""
        if self._session is not None:
            self._session.sparkContext.cancelAllJobs()

    def __exit__(self, *_: object) -> None:
        if self._session is not None:
            self._session.stop()


def settings_of_tasks(settings: Settings) -> Settings:
    """Return what a process needs that merges: the store with its secret, the spool, the storage classes of levels."""
    levels = settings.compaction.model_copy(update={"spark": SparkSettings()})  # which may have secrets
    return Settings(store=settings.store, spool_dir=settings.spool_dir, compaction=levels)


def check_conf(conf: Mapping[str, str]) -> None:
    """Raise ConfigError for a setting that would double the work of tasks; log a warning of each overridden one."""
    for name, value in FIXED_CONF.items():
        found = conf.get(name, value)
        if found.lower() == value:
            continue
        if name in REFUSED_CONF:
            raise ConfigError(f"compaction.spark.conf.{name}: expected {value}, found {found}")
        log.warning("spark setting overridden", action="spark_setting_overridden", name=name, found=found, used=value)


def spark_conf(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    own = {"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}
    if _LOCAL.fullmatch(master):
        own |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    java = conf.get(_JAVA_OPTIONS, "")
    if "log4j" not in java:
        java = f"{java} {_LOG_CONFIGURATION}".strip()
    # YARN and Kubernetes make a secret of their own; a `spark://` cluster needs a configured one.
    has_secret = master == "yarn" or master.startswith("k8s:") or _SECRET in conf or _SECRET_FILE in conf
    if not _is_on(conf, _AUTHENTICATE, has_secret):
        encryption = {}
    elif _is_on(conf, "spark.ssl.rpc.enabled"):
        encryption = {_AUTHENTICATE: "true"}
    else:
        encryption = {_AUTHENTICATE: "true"} | _ENCRYPTION_CONF
    redaction = f"{conf[_REDACTION]}|{_CONFIDENTIAL}" if conf.get(_REDACTION) else _CONFIDENTIAL
    return DEFAULT_CONF | own | encryption | dict(conf) | {_JAVA_OPTIONS: java, _REDACTION: redaction} | FIXED_CONF


def _is_on(conf: Mapping[str, str], name: str, otherwise: bool = False) -> bool:
    return conf.get(name, str(otherwise)).lower() == "true"


def check_encrypted(master: str, conf: Mapping[str, str], holds_secret: bool) -> None:
    """Raise ConfigError if the store's secret would travel to executors in clear, or to an impostor.

    `holds_secret`: tasks hold one. Otherwise a warning is logged that others may read along.
    """
    is_authentic = _is_on(conf, _AUTHENTICATE)
    if master.startswith("local") or (is_authentic and any(_is_on(conf, name) for name in _ENCRYPTIONS)):
        return
    if holds_secret:
        name, todo = (
            (_CRYPTO, "remove it from compaction.spark.conf")
            if is_authentic
            else (_AUTHENTICATE, f"set compaction.spark.conf.{_SECRET_FILE} to a file that holds the cluster's secret")
        )
        raise ConfigError(
            f"compaction.spark.conf.{name}: expected true with {master}, found false; "
            "the store's secret would travel in clear",
            hint=f"{todo}, or leave store.access_key_id and its secret out: executors then use a role of their own",
        )
    hint = (
        "without authentication or encryption, others on the cluster's network can read the data; "
        f"set compaction.spark.conf.{_SECRET_FILE} to a file that holds the secret of the cluster"
    )
    log.warning("spark unencrypted", action="spark_unencrypted", master=master, hint=hint)


def with_retries(master: str) -> str:
    """Return `master` with retries: `local[N]` runs a failed task once, `local[N,M]` repeats it, as a cluster does."""
    match = _LOCAL.fullmatch(master)
    return f"local[{match['cores'] or 1},{_TASK_FAILURES}]" if match else master


def start_session(master: str, conf: Mapping[str, str]) -> SparkSession:
    """Start a session. Raises ConfigError without a PySpark and a Java that start, Unavailable if Spark fails."""
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.errors import PySparkException
        from pyspark.java_gateway import launch_gateway
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigError(f"engine spark: {error}", hint=_INSTALL, code="E-SPARK") from error
    _set_environment(master, conf)
    named = {"spark.app.name": "floe compaction", "spark.master": with_retries(master)}
    wanted: dict[str, Any] = named | spark_conf(master, _with_secret(master, conf))
    shown = {name: value for name, value in wanted.items() if not re.search(_CONFIDENTIAL, name)}
    try:
        if shown != wanted or is_user_unknown():
            # PySpark would put all of them on Java's command line, which every user of the host can read.
            gateway = launch_gateway(SparkConf().setAll(list(shown.items())))  # type: ignore[no-untyped-call]
            if is_user_unknown():
                users = gateway.jvm.org.apache.hadoop.security.UserGroupInformation
                users.setLoginUser(users.createRemoteUser(SPARK_USER))  # before Hadoop queries the host for one
            SparkContext(conf=SparkConf().setAll(list(wanted.items())), gateway=gateway)
        return SparkSession.builder.config(map=wanted).getOrCreate()
    except Exception as error:
        if isinstance(error, PySparkException) and "JAVA" in str(error).upper():
            raise ConfigError(
                "engine spark: Java ended before Spark was up",
                hint="see its output above; check spark.driver.memory, spark.driver.extraJavaOptions and "
                "JAVA_TOOL_OPTIONS, or use --engine local",
                code="E-SPARK",
            ) from error
        # Also py4j's errors: the JVM runs, but the master may not.
        raise spark_error("start", error) from error


def _with_secret(master: str, conf: Mapping[str, str]) -> Mapping[str, str]:
    """Return `conf` with the secret from its file: Spark itself reads that on Kubernetes only. Raises ConfigError."""
    path = conf.get(_SECRET_FILE)
    if path is None or _SECRET in conf or master.startswith("k8s:"):
        return conf
    try:
        secret = Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"compaction.spark.conf.{_SECRET_FILE}: {path}: {why}") from None
    if not secret:
        raise ConfigError(f"compaction.spark.conf.{_SECRET_FILE}: {path}: expected a secret, found none")
    return {name: value for name, value in conf.items() if name != _SECRET_FILE} | {_SECRET: secret}


SPARK_USER = "floe"  # the name for a user without one


def is_user_unknown() -> bool:
    """True if this host has no name for the user, as with a number from OpenShift: Java and Hadoop need one."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return True
    return False


def _set_environment(master: str, conf: Mapping[str, str]) -> None:
    """Set the environment of Spark. Executors run the interpreter that is configured, else, on this host, this one and
    this code, regardless of `python3` on the PATH.
    """
    if _PYTHON in conf:
        os.environ["PYSPARK_PYTHON"] = conf[_PYTHON]  # PySpark itself reads only this variable
    elif _GATEWAY not in os.environ:
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if _LOCAL.fullmatch(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if is_user_unknown():
        java = f"-Duser.name={SPARK_USER} -Duser.home={tempfile.gettempdir()} {os.environ.get('SPARK_SUBMIT_OPTS', '')}"
        os.environ |= {"SPARK_SUBMIT_OPTS": java.strip(), "SPARK_USER": SPARK_USER}
    root = str(Path(__file__).parents[1])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])


def spark_error(what: str, error: Exception) -> FloeError:
    text = str(error)
    if DISTRIBUTION_ERROR_CODE in text:
        found = text[text.index(DISTRIBUTION_ERROR_CODE) :].splitlines()[0]
        return ConfigError(
            found.removeprefix(DISTRIBUTION_ERROR_CODE).lstrip(": "),
            hint="run executors in an environment of their own that has this version of floe-jetstream",
            code=DISTRIBUTION_ERROR_CODE,
        )
    log.debug("spark failed", action="spark_failed", what=what, error=text)
    # For a task's error, take the text after the stack. Py4j's first line only names the call.
    lines = text.rpartition("Traceback (most recent call last):")[2].splitlines()
    texts = (line.removeprefix(": ") for line in lines if not line.startswith("An error occurred while"))
    line = next((line for line in texts if line[:1].strip()), type(error).__name__)
    if known := re.match(r"(common[\w.]*)\.(\w+): (.*)", line):
        kind = getattr(sys.modules.get(known[1]), known[2], Exception)
        for each in _TASK_ERRORS:
            if issubclass(kind, each):
                return each(f"spark {what}: {known[3]}")
    return Unavailable(f"spark {what}: {line[:300]}", hint="see Spark's log; run it again", code="E-SPARK")


class ItemLog:
    """Log of the items that are done, with the count of all and an estimate for the rest; if that is not shown, a line
    of progress on stderr, until `close`.

    `work`: the name of the work, `verb_…`. Made when the work begins; each item counts once.
    """

    def __init__(self, work: str, items: Sequence[object], clock: Clock) -> None:
        self._work, self._items, self._clock = work, items, clock
        self._begun, self._done = clock.monotonic(), set[int]()
        self._progress = Progress()

    def add_done(self, number: int) -> None:
        """Record that the item of this number, from 0, is done."""
        if number in self._done:
            return
        self._done.add(number)
        count, of, item = len(self._done), len(self._items), self._items[number]
        seconds = self._clock.monotonic() - self._begun
        context = item.log_context() if isinstance(item, Output) else {}
        left = duration_words(seconds * (of - count) / count) if count < of else "0 s"
        log.info("item finished", action="item_finished", work=self._work, item=count, of=of, left=left, **context)
        if not logging.getLogger(__name__).isEnabledFor(logging.INFO):
            text = f"{format_share(count, of, seconds)}  {self._work.partition('_')[0]} {count:,} of {of:,}"
            self._progress.update(text, self._clock.monotonic())

    def close(self) -> None:
        self._progress.end_line()


def with_engine(settings: Settings, master: str | None, engine: str | None) -> Settings:
    """Return `settings` with another master and another engine; None: as they are."""
    present = settings.compaction
    spark = present.spark.model_copy(update={"master": master or present.spark.master})
    compaction = present.model_copy(update={"spark": spark, "engine": engine or present.engine})
    return settings.model_copy(update={"compaction": compaction})


@contextmanager
def spark_until_stopped(settings: Settings, on_stop: Callable[[], None]) -> Iterator[Spark]:
    """Yield Spark for a command that ends with a signal: running work is cancelled, and `on_stop` is called.

    Raises Unavailable in place of any error once a signal has requested a stop.
    """
    spark = Spark(settings, check=lambda: stop.check())

    def cancel() -> None:
        spark.cancel()
        on_stop()

    with stop_on_signals_sync(cancel) as stop, spark:
        try:
            yield spark
        except FloeError:
            stop.check()  # cancelled work fails in many ways
            raise


def make_task(
    payload: bytes, expected: str, finished: Accumulator[int] | None = None
) -> Callable[[Batches], Iterator[pa.RecordBatch]]:
    """Return the function that tasks run. It imports nothing of Floe before it knows which `common` it would get.

    `finished`: gets the bit of each item that is done.
    """
    marker = DISTRIBUTION_ERROR_CODE

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
    """Run the work in an executor. The batches hold the numbers of the items."""
    settings, work, items = pickle.loads(payload)  # noqa: S301 - from our own driver
    # PySpark collects garbage after each task: some 75 ms, if it had to check all that is imported here.
    gc.freeze()
    store = open_store(settings)
    try:
        for batch in batches:
            numbers: list[Any] = batch.column(0).to_pylist()
            for number in numbers:
                result = pickle.dumps(work(store, items[number]))
                yield pa.RecordBatch.from_pydict({"id": [number], "result": [result]})
    finally:
        store.close()


# Requirements of Spark on this host

JAVA_VERSIONS = (17, 21)
PROGRAM_TIMEOUT_S = 20.0  # seconds for another program to print its version
_INSTALL = f"{INSTALL_ALL}, or use --engine local"


def require_spark() -> None:
    """Raise ConfigError if PySpark or Java is missing or too old. Starts no session; blocking, for the time that
    `java -version` takes.
    """
    if _GATEWAY in os.environ:
        return
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError("engine spark: expected pyspark, found none", hint=_INSTALL, code="E-SPARK")
    with suppress(PackageNotFoundError):  # as with that of SPARK_HOME on PYTHONPATH
        found = distribution_version("pyspark")
        if not (4, 2) <= tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < (5,):
            text = f"engine spark: expected pyspark 4.2 or newer, below 5, found {found}"
            raise ConfigError(text, hint=_INSTALL, code="E-SPARK")
    home = os.environ.get("SPARK_HOME", "")
    if home and not Path(home, "bin", "spark-submit").exists():
        text = f"engine spark: SPARK_HOME={home}: expected Spark there, found no bin/spark-submit"
        raise ConfigError(text, hint="unset SPARK_HOME, or use --engine local", code="E-SPARK")
    if Path(os.environ.get("SPARK_CONF_DIR") or f"{home}/conf", "spark-env.sh").exists():
        return  # it may set another Java
    program, found, major = _java_found()
    if major < min(JAVA_VERSIONS):
        text = f"engine spark: expected Java 17 or 21, found {found or 'none'} ({program})"
        raise ConfigError(text, hint=f"{_install_java()}, or use --engine local", code="E-SPARK")


def _java_found() -> tuple[str, str, int]:
    """Return the program, the first line on its version, and the major version; empty and 0 if it does not start."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else "java"
    output = _read([program, "-version"])
    match = re.search(r'^.*version "(?:1\.)?(\d+).*$', output, re.MULTILINE)
    first = match[0] if match else output.partition("\n")[0]
    return (f"JAVA_HOME={home}" if home else program), first, int(match[1]) if match else 0


def _install_java() -> str:
    line = "sudo apt-get install -y openjdk-17-jre-headless"
    return f"{line} && unset JAVA_HOME" if os.environ.get("JAVA_HOME") else line


# Checks of `floe doctor`


def examine_spark(settings: Settings, is_required: bool) -> list[DoctorFinding]:
    """Check if Spark can start here; starts no session. Blocking.

    `is_required`: compaction is a purpose of this host; otherwise a missing part is only a warning.
    """
    bad = problem if is_required else warning
    meaning = "`floe compact` with `engine: spark` cannot start on this host"
    found = [_java(bad, meaning)]
    try:
        import pyspark
    except ImportError as error:
        todo = f"{INSTALL_ALL}\nor set `compaction.engine: local`"
        found.append(bad("spark", "pyspark", f"cannot be imported: {error}", meaning, todo))
    else:
        found.append(ok("spark", "pyspark", pyspark.__version__))
    return [*found, _workers_python(settings, bad)]


def _java(bad: Callable[..., DoctorFinding], meaning: str) -> DoctorFinding:
    program, found, major = _java_found()
    if major in JAVA_VERSIONS:
        return ok("spark", "java", found)
    todo = f"{_install_java()}\nor set JAVA_HOME, or `compaction.engine: local`"
    return bad("spark", "java", f"expected Java 17 or 21, found {found or 'none'} ({program})", meaning, todo)


def _workers_python(settings: Settings, bad: Callable[..., DoctorFinding]) -> DoctorFinding:
    """Check the interpreter of the workers: this one, unless Spark's settings name another."""
    spark = settings.compaction.spark
    ours, theirs = sys.version.split()[0], spark.conf.get(_PYTHON, "")
    if not theirs and _LOCAL.fullmatch(spark.master):
        return ok("spark", "python", f"{ours}, this one")
    if not _LOCAL.fullmatch(spark.master):
        meaning = (
            "the workers are on other hosts: each needs this version of Python (of two numbers) and of floe-jetstream"
        )
        return skipped("spark", "python", f"{spark.master}: {theirs or sys.executable} on each worker", meaning)
    found = _read([theirs, "-c", "import sys, common.metrics; print(sys.version.split()[0], common.metrics.version())"])
    expected = f"{ours.rpartition('.')[0]}."
    if found.startswith(expected) and found.split()[1:] == [version()]:
        return ok("spark", "python", f"{found.split()[0]}, {theirs}")
    meaning = "workers with another Python or another Floe end the job with E-COMMON or E-SPARK"
    todo = "remove spark.pyspark.python from compaction.spark.conf, or install this floe-jetstream there"
    seen = found.splitlines()[-1] if found else "none"
    return bad(
        "spark",
        "python",
        f"{theirs}: expected {expected}x with floe-jetstream {version()}, found {seen}",
        meaning,
        todo,
    )


def _read(words: list[str]) -> str:
    """Return the output of a program, stdout and stderr; empty if it does not start or end in time."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PROGRAM_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr).strip()
