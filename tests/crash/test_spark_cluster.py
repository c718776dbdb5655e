"""Compaction on Spark's standalone cluster, its environment shipped as an archive: workers, tasks and jobs that die.

Nobody sees a secret: not in command lines, in what the cluster logs, shows and keeps of events, or on the wire.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from common.objects.open import open_objects
from common.segments.documents import ChainDocument, ChainStore
from common.segments.writer import Spool
from common.settings.root import StoreSettings
from infra.local.process import free_ports
from tests.scenarios.processes import ROOT, Service
from tests.support import canaries
from tests.support.basics import PATIENCE, SharedS3, eventually
from tests.support.compaction import CHAIN, OTHER, Archive, begun, run
from tests.support.spark_cluster import SPARK_HOME, CommandLines, SparkCluster, Wire, has_stopped

pytestmark = [pytest.mark.spark, pytest.mark.soak]

LEVEL = {"from": 0, "to": 1, "min_age": "1s", "max_wait": "1s", "min_count": 3, "min_size": "1G"}
MERGED = ["0:31..40", "1:1..40"]
IN_TASKS = ("open", "merge", "spool_full", "put", "read_back")
IN_DRIVER = ("list", "plan", "verify", "tombstone", "grace", "delete_some", "done")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """One for all tests. What its first worker starts stops itself in the middle of a merge."""
    with SparkCluster(tmp_path_factory.mktemp("cluster"), failpoints="compaction.merge=stop") as found:
        yield found


@pytest.fixture
def sound(cluster: SparkCluster) -> SparkCluster:
    """The cluster with two workers that do what they are told."""
    cluster.replace_worker(1)
    return cluster


def fill(archive: Archive) -> Mapping[str, pa.Table]:
    """Two chains with a merge each; what readers see of them."""
    for chain in (CHAIN, OTHER):
        for first in range(1, 40, 10):
            archive.put(first, first + 9, age=700, chain=chain)
    return seen(archive)


def seen(archive: Archive) -> dict[str, pa.Table]:
    return {str(chain): archive.read(chain) for chain in (CHAIN, OTHER)}


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return begun(tmp_path, CHAIN, OTHER)


NOTHING: Mapping[str, str] = {}


def job(cluster: SparkCluster, archive: Archive, conf: Mapping[str, str] = NOTHING, name: str = "compact") -> Service:
    return Service(archive.folder, name, "compact", "-c", str(configured(cluster, archive, conf, name)))


def configured(
    cluster: SparkCluster, archive: Archive, conf: Mapping[str, str] = NOTHING, name: str = "compact"
) -> Path:
    return write(archive.folder / f"{name}.yaml", cluster, {"url": f"file://{archive.folder}/store"}, conf)


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
    address = {"url": f"s3://{s3.new_bucket()}", "endpoint_url": s3.endpoint_url, "access_key_id": s3.access_key}
    store = StoreSettings.model_validate({**address, "secret_access_key": s3.secret_key})
    archive = Archive(tmp_path, open_objects(store))
    for chain in (CHAIN, OTHER):
        ChainStore(archive.objects, archive.layout).create_chain(chain, ChainDocument((), 1, 1))
    fill(archive)
    return archive, {**address, "secret_access_key_file": str(secret)}


def through_wires(rpc: int, blocks: int) -> dict[str, str]:
    """Settings of a driver that executors reach through these two; what it hands out is not compressed."""
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
    service = Service(archive.folder, "compact", "compact", "-c", str(config))
    with CommandLines() as commands, Wire(rpc) as calls, Wire(blocks) as data:
        service.start()
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
    spool = str(archive.folder / "spool")  # what a task holds beside the secret
    for each in (calls, data):
        assert spool.encode() not in each.recorded
        canaries.check(each.recorded.decode("latin-1"), "the wire")
    told = cluster.kept()
    assert any("SparkListenerTaskEnd" in text for path, text in told.items() if cluster.events in path.parents)
    assert any("Finished task" in text for path, text in told.items() if cluster.work(2) in path.parents)
    for path, text in told.items():
        canaries.check(text, str(path))
    for each in shown:
        canaries.check(each, "the master's page")


@pytest.mark.soak
def test_without_encryption_the_wire_would_show_what_tasks_hold(archive: Archive, sound: SparkCluster):
    """So the test above would have seen it. There is no secret here: with one the job is refused."""
    fill(archive)
    rpc, blocks = free_ports(2)
    conf = through_wires(rpc, blocks) | {"spark.network.crypto.enabled": "false"}
    with Wire(rpc) as calls, Wire(blocks) as data:
        service = job(sound, archive, conf).start()
        assert ended(service) == 0, service.tail()
    assert str(archive.folder / "spool").encode() in calls.recorded + data.recorded
    assert "spark_open" in service.log.read_text()


@pytest.mark.soak
@pytest.mark.parametrize("step", [f"compaction.{each}" for each in IN_TASKS] + ["segments.put", "segments.read_back"])
def test_tasks_killed_at_any_step_end_the_job_and_the_next_one_does_the_work(
    archive: Archive, sound: SparkCluster, step: str
):
    before = fill(archive)
    killed = job(sound, archive, {"spark.executorEnv.FLOE_FAILPOINTS": f"{step}=kill"}).start()
    assert ended(killed) == 75, killed.tail()
    assert seen(archive) == before
    finished(archive, sound, before)


@pytest.mark.soak
@pytest.mark.parametrize("step", [f"compaction.{each}" for each in IN_DRIVER])
def test_a_job_killed_at_any_step_is_finished_by_the_next(archive: Archive, sound: SparkCluster, step: str):
    before = fill(archive)
    killed = job(sound, archive).start(FLOE_FAILPOINTS=f"{step}=kill")
    assert ended(killed) == -signal.SIGKILL, killed.tail()
    assert seen(archive) == before
    finished(archive, sound, before)


def finished(archive: Archive, cluster: SparkCluster, before: Mapping[str, pa.Table]) -> None:
    """By another job on the cluster: as if nothing had happened."""
    again = job(cluster, archive, name="again").start()
    assert ended(again) == 0, again.tail()
    assert archive.ranges() == archive.ranges(OTHER) == MERGED
    assert seen(archive) == before
    for _ in range(2):
        assert run(archive.folder).failures == []
    with closing(Spool(archive.folder / "spool")) as spool:
        spool.new_file()
    left = [path.name for path in (archive.folder / "spool").rglob("*") if path.is_file() and path.name != "lock"]
    assert left == []


@pytest.mark.soak
def test_two_jobs_at_once_do_each_other_no_harm(archive: Archive, sound: SparkCluster):
    before = fill(archive)
    jobs = [job(sound, archive, {"spark.cores.max": "1"}, name).start() for name in ("one", "two")]
    assert {ended(each) for each in jobs} == {0}, "\n".join(each.tail() for each in jobs)
    assert seen(archive) == before
    finished(archive, sound, before)


@pytest.mark.soak
@pytest.mark.parametrize("step", ["plan", "verify", "tombstone"])
def test_a_job_that_wakes_up_into_the_finished_work_of_another_ends_well(
    archive: Archive, sound: SparkCluster, step: str
):
    """What it was to merge, to prove or to replace is deleted."""
    before, half = fill(archive), {"spark.cores.max": "1"}
    paused = job(sound, archive, half, "paused").start(FLOE_FAILPOINTS=f"compaction.{step}=stop")
    eventually(lambda: has_stopped(paused.pid) or not paused.runs(), seconds=3 * PATIENCE)
    assert paused.runs(), paused.tail()
    other = job(sound, archive, half, "other").start()
    assert ended(other) == 0, other.tail()
    assert archive.ranges() == archive.ranges(OTHER) == MERGED
    paused.send(signal.SIGCONT)
    assert ended(paused) == 0, paused.tail()
    assert seen(archive) == before
    finished(archive, sound, before)


@pytest.mark.soak
def test_spark_submit_with_the_environment_that_is_made_to_be_shipped(archive: Archive, sound: SparkCluster):
    """Both scripts of `infra/spark` in earnest: executors unpack what `environment.sh` makes of this checkout."""
    before = fill(archive)
    env = {**os.environ, "SPARK_HOME": str(SPARK_HOME), "FLOE_PYTHON": sys.executable}
    made = scripted("environment.sh", str(archive.folder / "shipped.tar.gz"), env=env).strip()
    config = configured(sound, archive, {"spark.archives": f"{made}#environment"})
    scripted("submit.sh", sound.url, "compact", "-c", str(config), env=env)
    assert archive.ranges() == archive.ranges(OTHER) == MERGED
    assert seen(archive) == before


def scripted(name: str, *words: str, env: Mapping[str, str]) -> str:
    """What a script of `infra/spark` says; it ends with 0."""
    command = ["bash", str(ROOT / "infra/spark" / name), *words]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=5 * PATIENCE, check=False)
    canaries.check(done.stdout + done.stderr, name)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# A job with the setting that Floe refuses: the slower of two tasks gets a twin on the other worker.
TWINS = """
import sys
from common.open import open_store
from common.settings.loader import load
from compaction import spark
from compaction.plan import Output
from compaction.run import merge_one
from tests.support.compaction import CHAIN, OTHER

spark.FIXED["spark.speculation"] = "true"
settings = load(sys.argv[1])
store = open_store(settings)
outputs = [Output(1, tuple(store.list(chain, level=0))) for chain in (CHAIN, OTHER)]
with spark.Spark(settings) as job:
    print([made.ref.key for made in job.map(merge_one, outputs)], flush=True)
    sys.stdin.read()
"""
EAGER = {
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "100ms",
}


@pytest.mark.soak
@pytest.mark.parametrize("step", ["compaction.merge", "compaction.put", "segments.put"])
def test_a_speculative_twin_makes_the_same_object(archive: Archive, cluster: SparkCluster, step: str):
    """The first of two tasks stops itself; its twin is done, and then the first goes on."""
    cluster.replace_worker(1, failpoints=f"{step}=stop")
    before = fill(archive)
    config = configured(cluster, archive, EAGER)
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT, "text": True}
    with (
        (archive.folder / "twins.log").open("wb") as log,
        subprocess.Popen([sys.executable, "-c", TWINS, str(config)], stderr=log, **options) as twins,
    ):
        assert twins.stdin is not None
        assert twins.stdout is not None
        made = twins.stdout.readline()
        assert made.count("level=1") == 2, (archive.folder / "twins.log").read_text()[-3000:]
        first = cluster.stopped(1)
        assert first, "nobody was overtaken"
        digests = {key: archive.path(key).read_bytes() for key in yaml.safe_load(made)}
        for pid in first:
            os.kill(pid, signal.SIGCONT)
        twins.stdin.close()
        assert twins.wait(PATIENCE) == 0
    assert {key: archive.path(key).read_bytes() for key in digests} == digests
    assert archive.ranges() == archive.ranges(OTHER) == ["0:1..10", "0:11..20", "0:21..30", "0:31..40", "1:1..40"]
    assert seen(archive) == before
