"""Compaction on Spark's standalone cluster, its environment shipped as an archive: workers, tasks and jobs that die.

No secret is visible: not in command lines, in logs, pages and stored events of the cluster, or on the wire.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from common.archive.documents import ChainDocument, ChainStore
from common.objects.open import open_objects
from common.settings.root import StoreSettings
from infra.local.process import free_ports
from tests.scenarios.processes import ROOT, Service
from tests.support import canaries
from tests.support.basics import PATIENCE, SharedS3, eventually
from tests.support.compaction import CHAIN, OTHER, Archive, begun, left_over, run
from tests.support.spark_cluster import SPARK_HOME, CommandLines, SparkCluster, Wire

pytestmark = [pytest.mark.spark, pytest.mark.soak]

LEVEL = {"from": 0, "to": 1, "min_age": "1s", "max_wait": "1s", "min_count": 3, "min_size": "1G"}
MERGED = ["0:31..40", "1:1..40"]
IN_TASKS = ("open", "merge", "spool_full", "put", "read_back")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """One cluster for all tests. The first task process that its first worker starts stops in the middle of a merge."""
    with SparkCluster(tmp_path_factory.mktemp("cluster"), failpoints="compaction.merge=stop") as found:
        yield found


@pytest.fixture
def sound(cluster: SparkCluster) -> SparkCluster:
    """The cluster with two sound workers."""
    cluster.replace_worker(1)
    return cluster


def fill(archive: Archive) -> Mapping[str, pa.Table]:
    """Make two chains with a merge each, and return the rows that readers get of them."""
    for chain in (CHAIN, OTHER):
        for first in range(1, 40, 10):
            archive.put(first, first + 9, age=700, chain=chain)
    return seen(archive)


def seen(archive: Archive) -> dict[str, pa.Table]:
    return {str(chain): archive.read(chain) for chain in (CHAIN, OTHER)}


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return begun(tmp_path, CHAIN, OTHER)


def configured(cluster: SparkCluster, archive: Archive, conf: Mapping[str, str]) -> Path:
    return write(archive.folder / "floe.yaml", cluster, {"url": f"file://{archive.folder}/store"}, conf)


def compact(archive: Archive, config: Path, **env: str) -> Service:
    return Service(archive.folder, "compact", "compact", "-c", str(config)).start(**env)


def write(path: Path, cluster: SparkCluster, store: Mapping[str, str], conf: Mapping[str, str]) -> Path:
    spark = {"master": cluster.url, "conf": cluster.conf(conf)}
    compaction = {"levels": [LEVEL], "delete_grace": "0s", "allow_short_times": True, "spark": spark}
    document = {"store": dict(store), "spool_dir": str(path.parent / "spool"), "compaction": compaction}
    path.write_text(yaml.safe_dump(document))
    path.chmod(0o600)
    return path


def ended(service: Service) -> int:
    return service.wait(3 * PATIENCE)


@pytest.fixture
def secretive(s3: SharedS3, tmp_path: Path) -> tuple[Archive, dict[str, str]]:
    """An archive in a bucket, and the settings of its store with the secret in a file."""
    secret = tmp_path / "s3-secret"
    secret.write_text(s3.secret_key)
    secret.chmod(0o600)
    store = s3.store()
    archive = Archive(tmp_path, open_objects(StoreSettings.model_validate(store)))
    for chain in (CHAIN, OTHER):
        ChainStore(archive.objects, archive.layout).create_chain(chain, ChainDocument((), 1, 1))
    fill(archive)
    del store["secret_access_key"]
    return archive, {**store, "secret_access_key_file": str(secret)}


def through_wires(rpc: int, blocks: int) -> dict[str, str]:
    """Settings of a driver that executors reach through these two wires; its broadcasts are not compressed."""
    return {
        "spark.driver.host": Wire.HOST,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.port": str(rpc),
        "spark.driver.blockManager.port": str(blocks),
        "spark.broadcast.compress": "false",
    }


def test_a_worker_killed_in_mid_merge_costs_nothing_and_no_secret_is_seen(
    secretive: tuple[Archive, dict[str, str]], cluster: SparkCluster
):
    archive, store = secretive
    before = seen(archive)
    rpc, blocks = free_ports(2)
    config = write(archive.folder / "floe.yaml", cluster, store, through_wires(rpc, blocks))
    with CommandLines() as commands, Wire(rpc) as calls, Wire(blocks) as data:
        service = compact(archive, config)
        eventually(lambda: cluster.stopped(1) or not service.runs(), seconds=3 * PATIENCE)
        assert cluster.stopped(1), service.tail()
        cluster.kill_worker(1)
        assert ended(service) == 0, service.tail()
        shown = [cluster.page("/"), cluster.page("/json/")]

    assert archive.ranges() == archive.ranges(OTHER) == MERGED
    assert seen(archive) == before

    assert any("SparkSubmit" in each for each in commands.seen)
    for each in commands.seen:
        canaries.check(each, "a command line")
    assert len(data.recorded) > 1000
    spool = str(archive.folder / "spool")  # a task holds it beside the secret
    for each in (calls, data):
        assert spool.encode() not in each.recorded
        canaries.check(each.recorded.decode("latin-1"), "the wire")
    texts = cluster.kept()
    assert any("SparkListenerTaskEnd" in text for path, text in texts.items() if cluster.events in path.parents)
    assert any("Finished task" in text for path, text in texts.items() if cluster.work(2) in path.parents)
    for path, text in texts.items():
        canaries.check(text, str(path))
    for each in shown:
        canaries.check(each, "the master's page")


@pytest.mark.parametrize(
    ("step", "of_tasks"),
    [*((f"compaction.{each}", True) for each in IN_TASKS), ("segments.put", True), ("compaction.tombstone", False)],
)
def test_the_next_job_does_the_work_of_one_whose_tasks_or_driver_were_killed(
    archive: Archive, sound: SparkCluster, step: str, *, of_tasks: bool
):
    before, points = fill(archive), f"{step}=kill"
    config = configured(sound, archive, {"spark.executorEnv.FLOE_FAILPOINTS": points} if of_tasks else {})
    killed = compact(archive, config, FLOE_FAILPOINTS="" if of_tasks else points)
    assert ended(killed) == (75 if of_tasks else -signal.SIGKILL), killed.tail()
    assert seen(archive) == before
    again = compact(archive, configured(sound, archive, {}))
    assert ended(again) == 0, again.tail()
    assert archive.ranges() == archive.ranges(OTHER) == MERGED
    assert seen(archive) == before
    for _ in range(2):
        assert run(archive.folder).failures == []
    assert left_over(archive) == []


def test_spark_submit_with_the_environment_that_is_made_to_be_shipped(archive: Archive, sound: SparkCluster):
    """Both scripts of `infra/spark` for real: executors unpack the archive of `environment.sh` of this checkout."""
    before = fill(archive)
    env = {**os.environ, "SPARK_HOME": str(SPARK_HOME), "FLOE_PYTHON": sys.executable}
    made = scripted("environment.sh", str(archive.folder / "shipped.tar.gz"), env=env).strip()
    config = configured(sound, archive, {"spark.archives": f"{made}#environment"})
    scripted("submit.sh", sound.url, "compact", "-c", str(config), env=env)
    assert archive.ranges() == archive.ranges(OTHER) == MERGED
    assert seen(archive) == before


def scripted(name: str, *words: str, env: Mapping[str, str]) -> str:
    """Run a script of `infra/spark`, which must exit with 0, and return its output."""
    command = ["bash", str(ROOT / "infra/spark" / name), *words]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=5 * PATIENCE, check=False)
    canaries.check(done.stdout + done.stderr, name)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
