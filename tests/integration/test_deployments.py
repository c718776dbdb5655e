"""Units, image, chart and compose file agree, and their exact commands run as an unprivileged user."""

import asyncio
import json
import os
import pwd
import re
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.archive.documents import ChainDocument, ChainStore
from common.nats.api import create_stream
from common.nats.client import FloeClient
from common.objects.open import open_objects
from common.settings.loader import load
from common.settings.root import Settings, StoreSettings
from common.settings.types import parse_duration, parse_listen
from egress.workers import KILL_MARGIN_S
from infra.demo.world import SPARK_CONF
from infra.local.process import free_port, spawn
from tests.support.basics import PATIENCE, SharedS3, eventually, problem_of, soon, unique
from tests.support.commands import configuration, spawned
from tests.support.compaction import CHAIN, Archive, at_once
from tests.support.egress import Bench
from tests.support.ingress import count_in
from tests.support.notify import ServiceManager
from tests.support.rooms import ROOT, Room, why_no_rooms

INFRA = ROOT / "infra"
CHART = INFRA / "helm" / "floe"
NAMELESS = 1_000_650_000  # as OpenShift numbers users
SECRETS = ("/run/secrets/", "/etc/floe/credentials/")


# Contents


class Unit:
    """A unit of systemd, a template with `instance` filled in: its keys, the last value of each."""

    def __init__(self, name: str, instance: str = "site") -> None:
        self.name = name.replace("@.", f"@{instance.replace('/', '-')}.")
        text = (INFRA / "systemd" / name).read_text()
        lines = text.replace("%i", instance).replace("%I", instance).replace("%C", "/var/cache").splitlines()
        pairs = [line.partition("=")[::2] for line in lines if "=" in line and not line.startswith("#")]
        self.keys = dict(pairs)
        self.words = [word for word in shlex.split(self.keys["ExecStart"]) if word != "$FLOE_OPTIONS"]
        assert ("Environment", "FLOE_OPTIONS=") in pairs, "an operator adds options in a drop-in"


EGRESS, INGRESS = Unit("floe-egress@.service"), Unit("floe-ingress.service")
COMPACT = Unit("floe-compact.service")
VERIFY = Unit("floe-verify.service")
DRILL, CHECK = Unit("floe-drill@.service", "us-east/NODES"), Unit("floe-check@.service", "compaction")
COMPARE = Unit("floe-compare@.service", "us-east")
JOBS = (COMPACT, VERIFY, DRILL, COMPARE, CHECK)
COMPOSE: dict[str, Any] = yaml.safe_load((INFRA / "compose.yaml").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
DOCKERFILE = (INFRA / "docker" / "Dockerfile").read_text()


def image_words(target: str) -> list[str]:
    """The default command of a container of the image."""
    [stage] = re.findall(rf"^FROM base AS {target}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return [word for key in ("ENTRYPOINT", "CMD") for word in json.loads(re.findall(rf"^{key} (.*)$", stage, re.M)[0])]


def chart_words(template: str) -> list[str]:
    """The command of a pod of a template, without the options from values."""
    text = (CHART / "templates" / f"{template}.yaml").read_text()
    [arguments] = re.findall(r"^ +args: {{ concat \(list (.*?)\) \.Values\S+ \| toJson }}$", text, re.MULTILINE)
    return [*json.loads(re.findall(r"^ +command: (.*)$", text, re.MULTILINE)[0]), *shlex.split(arguments)]


def compose_words(service: str) -> list[str]:
    return ["floe", *COMPOSE["services"][service]["command"]]


def shipped(name: str) -> str:
    """A configuration of Floe that a deployment ships."""
    kind, _, part = name.partition("/")
    return VALUES[part]["config"] if kind == "helm" else (INFRA / f"{name}.yaml").read_text()


def checked(name: str, folder: Path) -> Settings:
    """The configuration as a command loads it, with its secrets in `folder`."""
    text = shipped(name)
    for place in SECRETS:
        text = text.replace(place, f"{folder}/")
    (folder / "s3-secret").write_text("secret")
    path = folder / "config.yaml"
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CREDENTIALS_DIRECTORY", str(folder))
        patch.setenv("CACHE_DIRECTORY", str(folder))
        return load(str(path))


def grace(service: str) -> float:
    """The seconds that compose leaves a service to end."""
    return parse_duration(COMPOSE["services"][service]["stop_grace_period"])


CONFIGURATIONS = [
    ("systemd/site", "egress", EGRESS.keys["TimeoutStopSec"], None),
    ("systemd/central", "ingress", INGRESS.keys["TimeoutStopSec"], None),
    ("helm/site", "egress", VALUES["egress"]["terminationGracePeriodSeconds"], VALUES["egress"]["port"]),
    ("helm/central", "ingress", VALUES["ingress"]["terminationGracePeriodSeconds"], VALUES["ingress"]["port"]),
    ("compose/site-east", "egress", grace("egress-east"), "egress-east"),
    ("compose/site-west", "egress", grace("egress-west"), "egress-west"),
    ("compose/central", "ingress", grace("ingress"), "ingress"),
]


@pytest.mark.parametrize(("file", "role", "seconds", "port"), CONFIGURATIONS)
def test_a_configuration_leaves_the_time_that_a_drain_may_take_and_listens_where_it_is_asked(
    tmp_path: Path, file: str, role: str, seconds: float | str, port: int | str | None
):
    settings = checked(file, tmp_path)
    assert (settings.store.secret_access_key.get_secret_value(), bool(settings.spool_dir)) == ("secret", True)
    section = getattr(settings, role)
    assert section.feeds if role == "egress" else section.targets
    assert float(seconds) >= section.shutdown_timeout + 2 * KILL_MARGIN_S
    if isinstance(port, str):  # a service of compose
        jobs = yaml.safe_load((INFRA / "compose" / "prometheus.yml").read_text())["scrape_configs"]
        targets = [target for job in jobs for config in job["static_configs"] for target in config["targets"]]
        [asked] = [target.split(":")[1] for target in targets if target.startswith(f"{port}:")]
        assert f":{asked}/readyz" in " ".join(COMPOSE["services"][port]["healthcheck"]["test"])
        port = int(asked)
    assert port is None or parse_listen(section.monitor.listen) == ("0.0.0.0", port)


def test_containers_and_units_run_the_same():
    words = {
        "egress": [image_words("site"), chart_words("egress"), *map(compose_words, ("egress-east", "egress-west"))],
        "ingress": [chart_words("ingress"), compose_words("ingress")],
        "compact": [image_words("spark"), chart_words("compaction")],
    }
    for unit, others in zip((EGRESS, INGRESS, COMPACT), words.values(), strict=True):
        program, *rest = unit.words
        assert program == "/opt/floe/bin/floe"
        assert all(each == ["floe", *rest] for each in others), others
    # Between the runs it sleeps.
    assert shlex.join(image_words("spark")) + " &" in COMPOSE["services"]["compaction"]["command"][0]


@pytest.mark.parametrize("asleep", [False, True])
def test_the_container_of_compaction_passes_sigterm_on(tmp_path: Path, asleep: bool):
    """Run in its shell, with a stand-in for the command that takes time to end."""
    [script] = COMPOSE["services"]["compaction"]["command"]
    works = "echo run" if asleep else "trap 'echo drained; exit 75' TERM; echo run; while :; do sleep 0.02; done"
    (tmp_path / "floe").write_text(f"#!/bin/sh\n{works}\n")
    (tmp_path / "floe").chmod(0o755)
    words = [*COMPOSE["services"]["compaction"]["entrypoint"], script.replace("$$", "$")]
    path, log = f"{tmp_path}:{os.environ['PATH']}", tmp_path / "log"
    with log.open("wb") as output:
        process = spawn(words, cwd=tmp_path, env={"PATH": path}, stdout=output, stderr=output)
    eventually(lambda: "run" in log.read_text() and (not asleep or children(process.pid).startswith("sleep\0")))
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    printed = [word for word in log.read_text().split() if word != "Terminated"]  # which a shell may print itself
    assert (printed, children(process.pid)) == (["run"] if asleep else ["run", "drained"], "")


def children(pid: int) -> str:
    """The command lines of the children of a process."""
    with suppress(OSError):
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return " ".join(Path(f"/proc/{each}/cmdline").read_text() for each in pids)
    return ""


def test_an_image_is_made_of_the_locked_packages_and_runs_unprivileged():
    installs = re.findall(r"pip install ([^&\n]*)", DOCKERFILE)
    assert len(installs) == 4
    for each in installs:
        assert "--require-hashes" in each or "--no-deps /wheel/floe_jetstream-*.whl" in each
    locked = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    for text in (DOCKERFILE, (INFRA / "wheel.sh").read_text()):
        [names] = re.findall(r"keep = /\^\((.*?)\)==/", text)
        assert set(names.split("|")) <= locked
    for target in ("site", "spark"):
        assert re.search(rf"^FROM base AS {target}\n(?:(?!FROM).*\n)*USER 10001:10001\n", DOCKERFILE, re.MULTILINE)
    for folder in ("docker", "spark"):
        text = (INFRA / folder / "Dockerfile").read_text()
        [base], stages = re.findall(r"^ARG BASE=(\S+)$", text, re.M), {*re.findall(r"^FROM .* AS (\S+)", text, re.M)}
        assert re.fullmatch(r"[a-z]+:[\w.-]+(@sha256:[0-9a-f]{64})?", base), "the digest is set by the update tool"
        assert {*re.findall(r"^FROM (\S+)", text, re.M)} - stages == {"${BASE}"}
    updates = json.loads((ROOT / ".renovaterc.json").read_text())
    assert (updates["extends"], updates["enabledManagers"]) == (["docker:pinDigests"], ["dockerfile", "docker-compose"])
    for service in COMPOSE["services"].values():
        assert re.search(r":[^:/}]+\}?$", service["image"]), "pinned by tag"
        assert ":latest" not in service["image"]


def test_the_check_of_the_chart_sets_every_value_of_its_schema():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((ROOT / "tests" / "deploy" / "every-value.yaml").read_text())

    def unset(part: dict[str, Any], found: Any, path: str) -> Iterator[str]:
        part = schema["definitions"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        for name, each in part.get("properties", {}).items():
            if name not in found:
                yield f"{path}{name}"
            else:
                yield from unset(each, found[name], f"{path}{name}.")

    assert [*unset(schema, values, "")] == []


def test_the_chart_reads_each_of_its_values_and_no_other():
    """Compare names, because helm renders a value that does not exist as nothing, without an error."""
    text = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
    read = {*re.findall(r"Values\.([\w.]+)", text)}
    read |= {f"{role}.{name}" for role in ("egress", "ingress") for name in re.findall(r"\$values\.([\w.]+)", text)}

    def leaves(part: Any, path: str = "") -> Iterator[str]:
        for name, each in part.items():
            yield from leaves(each, f"{path}{name}.") if isinstance(each, dict) and each else [f"{path}{name}"]

    known = {".".join(each.split(".")[: end + 1]) for each in leaves(VALUES) for end in range(each.count(".") + 1)}
    assert read - known == set()
    assert [each for each in leaves(VALUES) if not any(f"{each}.".startswith(f"{name}.") for name in read)] == []


def test_the_files_that_compose_mounts_are_there():
    named = [each["file"] for each in COMPOSE["configs"].values()]
    volumes = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", [])]
    named += [volume.split(":")[0] for volume in volumes if volume.startswith("./")]
    # Dashboard and rules are beside this folder, in folders of their own.
    for name in named:
        assert (INFRA / name).exists() or name in ("./grafana", "./prometheus"), name


# Runs


@pytest.fixture(scope="module")
def rooms() -> None:
    """Skip, with the reason, if no room can be made."""
    if why := why_no_rooms():
        pytest.skip(f"no room for an unprivileged user can be made here: {why}")


class Deployment:
    """The servers that a shipped configuration is pointed at, and the names that only this test uses."""

    def __init__(self, nats_url: str, s3: SharedS3) -> None:
        self.nats_url, self.s3, self.bucket, self.port = nats_url, s3, s3.new_bucket(), free_port()
        self.stream, self.target, self.suffix = unique("NODES"), unique("FLEET"), unique("X")

    def configuration(self, text: str) -> str:
        """The shipped text with other addresses and names; the paths of secrets and spool stay."""
        document = yaml.safe_load(text)
        document["nats"] = {"url": self.nats_url}
        document["store"] |= {"url": f"s3://{self.bucket}", "access_key_id": self.s3.access_key}
        document["store"]["endpoint_url"] = self.s3.endpoint_url
        buckets = {"lease_bucket": f"L{self.suffix}", "state_bucket": f"S{self.suffix}"}
        listen = {"monitor": {"listen": f"127.0.0.1:{self.port}"}}
        if "egress" in document:
            document["egress"] |= buckets | listen
            document["egress"]["feeds"] = [{"name": "NODES", "stream": self.stream, "segment": {"max_age": "1s"}}]
        if "ingress" in document:
            document["ingress"] |= buckets | listen | {"poll_interval": "1s"}
            [target] = document["ingress"]["targets"]
            target |= {"stream": self.target, "create": {"subjects": [f"{self.suffix}.>"]}}
            target["sources"][0]["subject_prefix"] = self.suffix
        return yaml.safe_dump(document)

    def answers(self, path: str) -> str:
        """The answer of the monitor; empty unless it is 200."""
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())
        return ""

    def has_archived(self, count: int) -> bool:
        counted = rf"^floe_egress_messages_total{{.*}} {count}\.0$"
        return re.search(counted, self.answers("/metrics"), re.MULTILINE) is not None


@contextmanager
def running(
    room: Room, words: list[str], environment: Mapping[str, str], *, deny: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    process = room.start(words, environment, deny_write_execute=deny)
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)


def is_unprivileged(pid: int) -> bool:
    """True if the process has no more rights than its user, and its user is not root."""
    status = Path(f"/proc/{pid}/status").read_text()
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    uids, capabilities = lines["Uid"].split(), [int(lines[f"Cap{each}"], 16) for each in ("Eff", "Prm", "Bnd", "Amb")]
    return "0" not in uids and not any(capabilities) and lines["NoNewPrivs"] == "1"


def is_running(process: subprocess.Popen[bytes], room: Room) -> bool:
    """True if the process runs; fail with its output if it has ended."""
    assert process.poll() is None, room.text()
    return True


@pytest.mark.servers
@pytest.mark.usefixtures("rooms")
async def test_the_words_of_the_units_run(nats_url: str, s3: SharedS3, tmp_path: Path, client: FloeClient):
    """Twenty messages from the site's stream into the centre's, by three commands, one after the other."""
    deployment = Deployment(nats_url, s3)

    @contextmanager
    def started(unit: Unit, config: str) -> Iterator[tuple[subprocess.Popen[bytes], Room]]:
        credentials, spool = f"/run/credentials/{unit.name}", f"/var/cache/{unit.keys['CacheDirectory']}"
        file, credential = unit.words[unit.words.index("-c") + 1], unit.keys["LoadCredential"].split(":")[0]
        text = deployment.configuration(shipped(f"systemd/{config}"))
        place = Room(tmp_path / unit.name, spool, {file: text, f"{credentials}/{credential}": f"{s3.secret_key}\n"})
        environment = {"CREDENTIALS_DIRECTORY": credentials, "CACHE_DIRECTORY": spool}
        deny = unit.keys.get("MemoryDenyWriteExecute") == "yes"
        if unit.keys["Type"] == "oneshot":
            with running(place, unit.words, environment, deny=deny) as process:
                yield process, place
            return
        with ServiceManager(f"@{unique('notify')}") as manager:
            added = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": str(int(float(unit.keys["WatchdogSec"]) * 1e6))}
            with running(place, unit.words, {**environment, **added}, deny=deny) as process:
                eventually(lambda: is_running(process, place) and "STATUS=ready" in manager.lines(), every=0.1)
                assert manager.lines()[:2] == ["READY=1", f"MAINPID={process.pid}"]
                manager.wait("WATCHDOG=1")
                eventually(lambda: deployment.answers("/healthz"))
                assert is_unprivileged(process.pid), place.text()
                yield process, place
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) == 0, place.text()
                assert manager.lines().count("STOPPING=1") == 1
                assert {each.pid for each in manager.read()} == {process.pid}, "NotifyAccess=main"

    async def all_there() -> bool:
        assert is_running(process, room)
        return await count_in(client, deployment.target) == 20

    await create_stream(client, {"name": deployment.stream, "subjects": [f"{deployment.stream}.>"]})
    with started(EGRESS, "site") as (process, room):
        for number in range(20):
            await client.request_raw(f"{deployment.stream}.n{number}".encode(), b"x" * 100, timeout=30)
        await soon(lambda: is_running(process, room) and deployment.has_archived(20), every=0.2)
    with started(INGRESS, "central") as (process, room):
        await soon(all_there, every=0.2)
    with started(COMPACT, "central") as (process, room):
        assert await asyncio.to_thread(process.wait, PATIENCE) == 0, room.text()
        assert "nothing to do" in room.text()


def test_each_job_has_a_timer_and_each_unit_is_as_confined_as_the_others():
    units = {path.name for path in (INFRA / "systemd").glob("*.service")}
    timers = {path.stem for path in (INFRA / "systemd").glob("*.timer")}
    assert {path.removesuffix(".service") for path in units} - timers == {"floe-egress@", "floe-ingress"}
    bounds = ("Protect", "Private", "Restrict", "NoNew")
    confined = [{item for item in unit.keys.items() if item[0].startswith(bounds)} for unit in (EGRESS, INGRESS, *JOBS)]
    assert all(each == confined[0] for each in confined)
    assert [problem_of(shlex.join(["floe", *unit.words[1:]])) for unit in JOBS] == [""] * len(JOBS)
    assert all(unit.keys["LoadCredential"] == EGRESS.keys["LoadCredential"] for unit in JOBS)


def test_the_credentials_are_for_the_group_of_the_service():
    package = yaml.safe_load((INFRA / "nfpm.yaml").read_text())
    [folder] = [each for each in package["contents"] if each["dst"] == "/etc/floe/credentials"]
    installed = (INFRA / "nfpm" / "postinstall.sh").read_text()
    by_hand = (ROOT / "docs" / "guides" / "systemd.md").read_text()

    assert folder["file_info"]["mode"] == 0o750
    assert "chgrp floe /etc/floe/credentials && chmod 0750 /etc/floe/credentials" in installed
    assert "install -d -m 0750 -g floe /etc/floe/credentials" in by_hand
    assert "install -m 0640 -g floe /dev/stdin /etc/floe/credentials/s3-secret" in by_hand


@pytest.mark.servers
@pytest.mark.usefixtures("rooms")
async def test_the_words_of_the_chart_run_its_configuration(
    nats_url: str, s3: SharedS3, tmp_path: Path, client: FloeClient
):
    deployment, words = Deployment(nats_url, s3), chart_words("egress")
    text = deployment.configuration(VALUES["site"]["config"])
    secret = {"/etc/floe/credentials/s3-secret": s3.secret_key}
    user = NAMELESS if os.geteuid() == 0 else os.geteuid()
    room = Room(tmp_path / "room", "/var/cache/floe", {words[-1]: text, **secret}, user)
    await create_stream(client, {"name": deployment.stream, "subjects": [f"{deployment.stream}.>"]})
    with running(room, words, {"HOME": "/", "PYTHONUNBUFFERED": "1"}) as process:
        await soon(lambda: is_running(process, room) and bool(deployment.answers("/readyz")), every=0.1)
        await client.request_raw(f"{deployment.stream}.n".encode(), b"x", timeout=30)
        await soon(lambda: is_running(process, room) and deployment.has_archived(1), every=0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0, room.text()


@pytest.mark.spark
@pytest.mark.servers
@pytest.mark.usefixtures("rooms")
def test_spark_starts_for_a_user_without_a_name_and_a_home(s3: SharedS3, tmp_path: Path):
    """A user as OpenShift runs a pod: a number that no /etc/passwd has, with HOME=/."""
    if os.geteuid() != 0:
        pytest.skip("becoming a user that the host does not know needs root")
    with pytest.raises(KeyError):
        pwd.getpwuid(NAMELESS)
    store = s3.store()
    archive = Archive(tmp_path / "archive", open_objects(StoreSettings.model_validate(store)))
    ChainStore(archive.objects, archive.layout).create_chain(CHAIN, ChainDocument((), 1, 1))
    for first in (1, 11):
        archive.put(first, first + 9)
    config, level = "/etc/floe/central.yaml", {"from": 0, "to": 1, "min_age": "1s", "max_wait": "1s", "min_count": 2}
    compaction = {**at_once(level), "engine": "spark", "spark": {"conf": SPARK_CONF}}
    text = yaml.safe_dump({"store": store, "spool_dir": "/var/cache/floe", "compaction": compaction})
    room = Room(tmp_path / "room", "/var/cache/floe", {config: text}, NAMELESS)
    words = ["floe", "compact", "-c", config, "--master", "local[1]"]

    def is_merged() -> bool:  # by the first run, unless the segments were younger than `min_age`
        with running(room, words, {"HOME": "/"}) as process:
            assert process.wait(3 * PATIENCE) == 0, room.text()  # this user may write no bytecode for Spark
        return "1:1..20" in archive.ranges()

    eventually(is_merged)


# Notifications to the service manager beyond those of the commands above


@pytest.mark.servers
async def test_the_parent_of_workers_speaks_for_all(bench: Bench):
    stream = await bench.make_stream(unique("T"))
    config = configuration(bench, {"stream": stream}, monitor={"listen": f"127.0.0.1:{free_port()}"})
    with ServiceManager(f"@{unique('notify')}") as manager:
        environment = {**os.environ, "NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "400000"}
        log, words = config.with_suffix(".log"), ("egress", "run", "-c", str(config), "--workers", "2")
        with log.open("wb") as output, spawned(*words, env=environment, stdout=output, stderr=output) as process:
            eventually(lambda: "STATUS=ready" in manager.lines())
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            workers = [int(pid) for pid in children if "--worker" in Path(f"/proc/{pid}/cmdline").read_text()]
            assert len(workers) == 2

            manager.forget()
            os.kill(workers[0], signal.SIGSTOP)  # it hangs, and /healthz reports that
            eventually(lambda: any(line.startswith("STATUS=worker") for line in manager.lines()))
            manager.forget()
            await asyncio.sleep(0.5)
            assert "WATCHDOG=1" not in manager.lines()
            os.kill(workers[0], signal.SIGCONT)
            eventually(lambda: {"STATUS=ready", "WATCHDOG=1"} <= set(manager.lines()))

            process.send_signal(signal.SIGHUP)
            eventually(lambda: {"RELOADING=1", "READY=1", f"MAINPID={process.pid}"} <= set(manager.lines()))
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0, log.read_text()
            assert "STOPPING=1" in manager.lines()
            assert {each.pid for each in manager.read()} == {process.pid}
