"""Compaction with Spark: merges and proofs in executors."""

import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.errors import ConfigError, Unavailable
from common.settings.root import Settings
from compaction import spark
from compaction.failures import Failure
from compaction.plan import Supersession, supersession_of_merge
from compaction.run import Compaction, RunReport, Selection, prove_rows
from tests.support.basics import eventually
from tests.support.compaction import CHAIN, DUE, OTHER, Archive, begun, rows
from tests.support.spark import SharedSpark, failing, kill_once, spark_session, wait_for_file


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return begun(tmp_path, CHAIN, OTHER)


def settings(archive: Archive) -> Settings:
    return Settings.model_validate(
        {"store": {"url": f"file://{archive.folder}/store"}, "spool_dir": str(archive.folder / "spool")}
    )


def run(archive: Archive) -> RunReport:
    return Compaction(archive.store, [DUE], 0, SharedSpark(settings(archive))).run(Selection())


def prove(archive: Archive, *supersessions: Supersession) -> list[Failure | None]:
    return SharedSpark(settings(archive)).map(prove_rows, supersessions)


pytestmark = pytest.mark.spark


def test_each_item_is_logged_when_done(archive: Archive, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    go = tmp_path / "go"

    spark_session()  # its start is not part of the wait

    def let_go() -> None:
        try:
            eventually(lambda: "item_finished" in caplog.text)
        finally:
            go.touch()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(let_go)
        assert SharedSpark(settings(archive)).map(wait_for_file, [str(go), ""]) == [str(go), ""]
        watching.result()
    assert sum("item_finished" in logged for logged in caplog.messages) == 2


def test_several_chains_are_merged_and_proved_in_one_run_that_logs_how_much_is_left(
    archive: Archive, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    for chain in (CHAIN, OTHER):
        for first in range(1, 40, 10):
            archive.put(first, first + 9, age=700, chain=chain)
    archive.put(35, 60, age=700)
    before = {chain: archive.read(chain) for chain in (CHAIN, OTHER)}
    assert (run(archive).failures, archive.ranges()) == ([], ["0:35..60", "1:1..60"])
    assert archive.ranges(OTHER) == ["0:31..40", "1:1..40"]
    assert {chain: archive.read(chain) for chain in (CHAIN, OTHER)} == before
    logged = [each for each in caplog.messages if "item_finished" in each and "merge_output" in each]
    assert len(logged) == 2
    assert all(each in "".join(logged) for each in ("us-east", "NODES", "left"))
    assert run(archive) == RunReport()


# The proof: outputs that it refuses


def test_a_missing_row_a_changed_one_and_a_moved_null_are_found(archive: Archive):
    lower, overlapping = ([archive.put(1, a), archive.put(z, 100)] for a, z in ((50, 51), (60, 41)))
    good = archive.put(1, 100, level=1)
    lacking = archive.put(1, 100, rows([n for n in range(1, 101) if n != 50]), level=2)
    changed = archive.put(1, 100, rows(range(1, 101), salt="x"), level=3)
    other_key = archive.put(1, 100, rows(range(1, 101), sample_key="k"), level=4)
    proofs = [supersession_of_merge(upper, lower) for upper in (good, lacking, changed, other_key)]
    verdicts = prove(
        archive, *proofs, supersession_of_merge(good, overlapping), supersession_of_merge(lacking, overlapping)
    )
    assert [verdict and verdict.exit_code for verdict in verdicts] == [None, 3, 3, 3, None, 3]
    assert "E-ROWS-MISSING" in verdicts[1].line
    assert "sequence 50 " in verdicts[1].line


def test_a_segment_that_cannot_be_read_fails_its_own_proof_only(archive: Archive):
    ranges = [(1, 50), (51, 100), (101, 150)]
    lower, upper = ([archive.put(*rows, level=level) for rows in ranges] for level in (0, 1))
    archive.store.delete(lower[0])
    archive.path(upper[2].key).write_bytes(bytes(upper[2].size))
    verdicts = prove(archive, *(supersession_of_merge(u, [s]) for u, s in zip(upper, lower, strict=True)))
    assert [verdict is None for verdict in verdicts] == [False, True, False]
    gone, damaged = verdicts[0], verdicts[2]
    assert (gone.is_stale, gone.exit_code, damaged.damaged) == (True, 3, {upper[2].key})


# Tasks


def test_a_killed_executor_is_replaced(archive: Archive):
    assert SharedSpark(settings(archive)).map(kill_once, [archive.folder / "marker"]) == ["done"]


def test_an_unforeseen_error_ends_the_run_as_retryable(archive: Archive):
    with pytest.raises(Unavailable, match="spark failing"):
        SharedSpark(settings(archive)).map(failing, [1])


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
def test_an_executor_with_another_version_of_common_refuses_to_work(archive: Archive):
    frame = spark_session().range(0, 1, 1, 1).mapInArrow(spark.make_task(b"", "0.0.0"), "id long, result binary")
    with pytest.raises(Exception, match="E-COMMON") as caught:
        frame.collect()
    error = spark.spark_error("merge", caught.value)
    assert (type(error), error.exit_code) == (ConfigError, 78)
    assert "expected that of floe-jetstream 0.0.0" in error.as_text()


# The session


def test_speculation_is_refused_and_missing_files_are_errors():
    with pytest.raises(ConfigError, match=r"spark.speculation: expected false, found true"):
        spark.check_conf({"spark.speculation": "true"})
    spark.check_conf({"spark.sql.files.ignoreCorruptFiles": "true"})
    found = spark.spark_conf(
        "spark://host:7077", {"spark.sql.files.ignoreMissingFiles": "true", "spark.ui.enabled": "true"}
    )
    assert spark.FIXED_CONF.items() <= found.items()
    assert "spark.driver.host" not in found
    assert spark.spark_conf("local[*]", {})["spark.driver.bindAddress"] == "127.0.0.1"


ON = {"spark.authenticate": "true"}


CLUSTERS = [
    ("yarn", {}, None),
    ("k8s://https://k8s:6443", {}, None),
    ("spark://host:7077", {"spark.authenticate.secret": "s"}, None),
    ("spark://host:7077", ON, None),
    ("spark://host:7077", ON | {"spark.ssl.rpc.enabled": "true"}, None),
    ("spark://host:7077", {}, "spark.authenticate"),
    ("yarn", {"spark.network.crypto.enabled": "false"}, "spark.network.crypto.enabled"),
    ("local[*]", {}, None),
]


@pytest.mark.parametrize(("master", "conf", "missing"), CLUSTERS)
def test_a_secret_is_refused_if_tasks_are_sent_in_clear_else_a_warning_is_given(
    master: str, conf: dict[str, str], missing: str | None, caplog: pytest.LogCaptureFixture
):
    found = spark.spark_conf(master, conf)
    spark.check_encrypted(master, found, holds_secret=False)
    assert ("without authentication or encryption" in caplog.text) is (missing is not None)
    if missing is None:
        spark.check_encrypted(master, found, holds_secret=True)
        return
    with pytest.raises(ConfigError, match=rf"conf\.{missing}: expected true with {master}, found false"):
        spark.check_encrypted(master, found, holds_secret=True)


def test_secrets_stay_hidden_with_more_redactions():
    text = spark.spark_conf("yarn", {"spark.redaction.regex": "salary"})["spark.redaction.regex"]
    theirs, _, ours = text.partition("|(?i)")
    assert theirs == "salary"
    for name in ("spark.authenticate.secret", "spark.ssl.keyPassword", "spark.hadoop.fs.s3a.access.key"):
        assert re.search(ours, name, re.IGNORECASE)


def test_tasks_are_given_the_store_and_the_spool_and_no_other_secret(archive: Archive):
    secrets = {name: f"canary-of-{name}-4711" for name in ("store", "nats", "spark")}
    whole = {
        "store": {"url": "s3://bucket", "access_key_id": "key", "secret_access_key": secrets["store"]},
        "spool_dir": str(archive.folder / "spool"),
        "nats": {"user": "floe", "password": secrets["nats"]},
        "compaction": {"spark": {"conf": {"spark.authenticate.secret": secrets["spark"]}}},
    }
    given = pickle.dumps(spark.Spark(Settings.model_validate(whole)).settings)
    assert [name for name, secret in secrets.items() if secret.encode() in given] == ["store"]


def test_local_tasks_are_retried_as_a_cluster_s_are():
    started = {"local": "local[1,4]", "local[*]": "local[*,4]", "local[3,1]": "local[3,1]", "yarn": "yarn"}
    assert {master: spark.with_retries(master) for master in started} == started


def test_no_secret_is_in_the_plan_that_spark_shows(archive: Archive, capfd: pytest.CaptureFixture[str]):
    secret, config = "canary-4711", archive.folder / "floe.yaml"
    fields = f"access_key_id: key, secret_access_key: {secret}"
    config.write_text(f"store: {{url: 'file://{archive.folder}/store', prefix: data, {fields}}}\n")
    config.chmod(0o600)
    archive.put(1, 10)
    frame = spark_session().read.format("floe").option("config", str(config)).load()
    frame.explain(extended=True)
    assert frame.count() == 10
    assert secret not in capfd.readouterr().out
