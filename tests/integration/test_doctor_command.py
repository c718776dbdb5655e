"""`floe doctor` with real servers: passed checks, failed checks, and output."""

import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from common import doctor
from common.chain import Chain
from common.clock import SystemClock
from common.doctor import CHECKS, DoctorFinding, examine_disk, examine_store
from common.doctor_cli import examine
from common.nats.api import consumer_names, create_stream, stream_info
from common.nats.client import FloeClient
from common.nats.kv import KeyValue
from common.objects.open import open_objects
from common.open import load_settings, open_chains
from common.settings.root import Settings
from compaction.spark import examine_spark
from infra.local.nats import NatsServer, nats_server_binary
from infra.local.process import free_port
from tests.support.basics import SharedS3, unique
from tests.support.clock import ManualClock
from tests.support.commands import floe
from tests.support.identities import authority, certificate, server_tls
from tests.support.ingress import client_of
from tests.support.proxies import Answer, Exchange, FaultProxy, drop, refusing_conditions

pytestmark = pytest.mark.servers

SITE = "us-east"
FEED = "NODES"
RIGHTS = Path(__file__).parents[2] / "infra" / "rights"


def write(folder: Path, store: dict[str, Any], nats: dict[str, Any], **document: Any) -> str:
    path = folder / f"{unique('floe')}.yaml"
    path.write_text(yaml.safe_dump({"spool_dir": str(folder / "spool"), "nats": nats, "store": store, **document}))
    path.chmod(0o600)
    return str(path)


def egress(stream: str = FEED, **more: Any) -> dict[str, Any]:
    return {"site": SITE, "egress": {"feeds": [{"stream": stream, **more}], "state_bucket": "S", "lease_bucket": "L"}}


def ingress(stream: str, **target: Any) -> dict[str, Any]:
    source = {"site": SITE, "feed": FEED, "subject_prefix": stream}
    return {"ingress": {"targets": [{"stream": stream, "sources": [source], **target}]}}


async def examined(config: str, *words: str, code: int) -> dict[str, dict[str, Any]]:
    """The findings of `floe doctor`, by part and check; of several findings of a check the last."""
    done = await floe("doctor", "-c", config, "--json", *words)
    assert (done.code, "permission" in done.err) == (code, False), done
    document = done.json()
    assert document["code"] == code
    assert all(each["what"] in CHECKS[each["part"]] for each in document["findings"])
    return {f"{each['part']} {each['what']}": each for each in document["findings"]}


def states(found: dict[str, dict[str, Any]], state: str) -> set[str]:
    return {name for name, each in found.items() if each["state"] == state}


def by_check(found: Sequence[DoctorFinding]) -> dict[str, DoctorFinding]:
    return {f"{each.part} {each.what}": each for each in found}


@pytest.fixture
def away() -> str:
    """An address at which nothing listens."""
    return f"127.0.0.1:{free_port()}"


def folder_store(folder: Path) -> dict[str, Any]:
    (folder / "store").mkdir(exist_ok=True)
    return {"url": f"file://{folder}/store"}


# All is well


async def test_a_site_is_well_and_nothing_left(nats_url: str, client: FloeClient, s3: SharedS3, tmp_path: Path) -> None:
    stream, state = unique("T"), unique("S")
    await create_stream(client, {"name": stream, "subjects": [f"{stream}.>"], "storage": "memory"})
    bucket = s3.new_bucket()
    document = egress(stream)
    document["egress"] |= {"state_bucket": state, "lease_bucket": unique("L")}
    config = write(tmp_path, s3.store(bucket), {"url": nats_url}, **document)
    found = await examined(config, code=0)
    assert states(found, "ok") == found.keys() - {"store versioning", "store other sites"}, found
    assert found["store other sites"]["found"] == "may put data/site=-/doctor"
    wanted = {f"{part} {what}" for part in ("store", "disk") for what in CHECKS[part]}
    nats = ("connection", "version", "rights", "jetstream", "domain", "buckets", "max_payload", "stream", "durability")
    assert found.keys() == wanted | {f"nats {what}" for what in nats}
    assert open_objects(load_settings(config).store).list("") == []
    assert (await stream_info(client, f"KV_{state}"), await consumer_names(client, stream)) == (None, [])
    store = await KeyValue(client, state).ensure()
    revision = await store.put("a", b"kept")
    assert (await examined(config, code=0))["nats rights"]["state"] == "ok"
    assert ((await store.get("a")).revision, await store.keys()) == (revision, ["a"])


async def test_a_centre_is_well(nats_url: str, client: FloeClient, s3: SharedS3, tmp_path: Path) -> None:
    target = unique("T")
    config = write(tmp_path, s3.store(), {"url": nats_url}, **ingress(target, create={}))
    found = await examined(config, code=0)
    assert states(found, "ok") == found.keys() - {"store layout", "store versioning"}
    assert found["store layout"]["found"] == f"no chain is archived yet; no chain of {SITE}"
    assert found["nats batches"]["found"] == f"{target}: fast"
    assert found["nats target"]["found"] == f"{target}: created at the first start"
    assert await stream_info(client, target) is None
    chains = open_chains(load_settings(config))
    for site in (SITE, "eu-west"):
        chains.write_tail(Chain(site, FEED), 10)
    found = await examined(config, code=0)
    assert states(found, "ok") == found.keys() - {"store versioning"}
    assert found["store layout"]["found"] == f"one bucket for several sites: eu-west, {SITE}"


async def test_people_get_a_table_and_what_to_do(nats_url: str, tmp_path: Path) -> None:
    config = write(tmp_path, folder_store(tmp_path), {"url": nats_url}, **ingress(unique("T")))
    done = await floe("doctor", "-c", config)
    assert (done.code, done.out.startswith("part   check ")) == (3, True)
    text = done.out.partition("problem: nats, target: ")[2]
    assert "  meaning: no message is delivered: there is no such stream" in text
    assert "  remedy: nats stream add " in text


# Servers that do not answer, and refusals


async def test_a_silent_server_delays_no_other(nats_url: str, s3: SharedS3, away: str, tmp_path: Path) -> None:
    dead = s3.store("floe") | {"endpoint_url": f"http://{away}", "allow_plaintext": True}
    config = write(tmp_path, dead, {"url": nats_url}, **egress(filter_subject="a.>"))
    found = await examined(config, code=1)
    assert found["store connection"]["state"] == "skipped"
    assert found["store connection"]["unreached"]
    assert "the port refuses connections" in found["store connection"]["found"]
    assert "store checksum" not in found
    assert found["nats rights"]["state"] == found["disk spool"]["state"] == "ok"

    config = write(tmp_path, s3.store(), {"url": f"nats://{away}"}, **egress())
    found = await examined(config, code=1)
    assert {name for name in found if name.startswith("nats")} == {"nats connection"}
    assert found["nats connection"]["unreached"]
    assert found["store checksum"]["state"] == "ok"


def test_a_store_that_ceases_to_answer_is_waited_for_once(s3: SharedS3, tmp_path: Path) -> None:
    with FaultProxy(s3.endpoint_url) as proxy:
        proxy.on("put", drop())
        store = s3.store() | {"endpoint_url": proxy.url}
        found = examine_store(settings_of(tmp_path, store=store), ("egress",), ManualClock())
    assert [(each.what, each.unreached) for each in found] == [("connection", False), ("list", False), ("write", True)]


async def test_each_kind_of_missing_answer_has_a_next_step(
    s3: SharedS3, nats_url: str, away: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ports that refuse, unknown hosts, silent servers, and a resolver that does not answer."""
    look_up, answers, asked = socket.getaddrinfo, threading.Event(), set[str]()

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name.startswith("lookup"):
            asked.add(str(host))
        if str(host).startswith("unknown"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if str(host).endswith(".invalid"):
            answers.wait()
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(doctor, "LOOKUP_TIMEOUT_S", 1.0)
    monkeypatch.setattr(doctor, "VIEW_TIMEOUT_S", 0.5)
    why = "not resolved: no answer from the resolver within 1 s"
    with socket.create_server(("127.0.0.1", 0)) as server:
        frozen = f"127.0.0.1:{server.getsockname()[1]}"
        silent = ["nats://a.invalid", "nats://b.invalid"]
        for urls, endpoint, of_nats, of_store in (
            (f"nats://{away}", away, "its port in nats.url", "its port in store.endpoint_url"),
            (f"nats://{frozen}", frozen, "that it answers others", "that the store answers others"),
            ("nats://unknown.invalid:4222", "unknown.invalid", "this host's resolver", "this host's resolver"),
            (silent, "s3.invalid", "/etc/resolv.conf", "/etc/resolv.conf"),
        ):
            store = s3.store("floe") | {"endpoint_url": f"http://{endpoint}", "allow_plaintext": True}
            config = write(tmp_path, store, {"url": urls, "connect_timeout": "1s"}, **egress())
            found = await examined(config, code=1)
            assert {*found} == {"nats connection", "store connection", "disk spool", "disk space"}
            for name, todo in (("nats connection", of_nats), ("store connection", of_store)):
                assert todo in found[name]["todo"]
                assert found[name]["meaning"]
        assert found["nats connection"]["found"] == f"E-UNAVAILABLE: a.invalid, b.invalid: {why}"
        assert found["store connection"]["found"] == f"E-UNAVAILABLE: s3.invalid: {why}"
        config = write(tmp_path, s3.store(), {"url": ["nats://a.invalid", nats_url]}, **egress())
        assert (await examined(config, code=0))["nats connection"]["state"] == "ok"
        answers.set()
    assert asked == {"unknown.invalid", "a.invalid", "b.invalid", "s3.invalid"}, "a number needs no resolver"


async def test_tls_that_one_side_lacks_is_a_problem_with_a_way_out(tmp_path: Path) -> None:
    """For stores see `test_s3_faults.py`."""
    authority(tmp_path)
    certificate(tmp_path, "server", "IP:127.0.0.1")
    with NatsServer() as plain, NatsServer(tls=server_tls(tmp_path)) as secret:
        for url, todo in (
            (f"tls://127.0.0.1:{plain.port}", "nats.url: nats:// and no nats.tls; or enable TLS on the server"),
            (f"nats://127.0.0.1:{secret.port}", "it must contain the CA of the server's certificate"),
        ):
            config = write(tmp_path, folder_store(tmp_path), {"url": url}, **egress())
            assert todo in (await examined(config, code=3))["nats connection"]["todo"]


async def test_a_server_that_freezes_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = egress()
    document["egress"]["feeds"] = [{"stream": f"S{number}"} for number in range(20)]
    real = FloeClient.api_subject
    with NatsServer() as server:

        def freezes(client: FloeClient, name: str) -> str:
            server.pause()
            return real(client, name)

        config = write(tmp_path, folder_store(tmp_path), {"url": server.url}, **document)
        monkeypatch.setattr(FloeClient, "api_subject", freezes)
        try:
            found = await examine(load_settings(config), (), {"spark": lambda: None, "target": lambda: None})
        finally:
            server.resume()
    nats = [each for each in found.findings if each.part == "nats"]
    assert [(each.what, each.unreached) for each in nats] == [
        ("connection", False), ("version", False), ("jetstream", True),
    ]  # fmt: skip
    assert nats[-1].todo


async def test_a_wrong_credential_is_a_problem(s3: SharedS3, tmp_path: Path) -> None:
    with NatsServer(users={"egress": "right-password"}) as server:
        nats = {"url": server.url, "user": "egress", "password": "wrong-password"}
        wrong = write(tmp_path, s3.store("floe") | {"secret_access_key": "f" * 40}, nats, **egress())
        found = await examined(wrong, code=3)
        assert found.keys() == {"store connection", "nats connection", "disk spool", "disk space"}
        for name, code in (("store connection", "E-S3-AUTH"), ("nats connection", "E-NATS-AUTH")):
            assert (found[name]["state"], found[name]["found"].startswith(code)) == ("problem", True)
        nats["password"] = "right-password"
        right = write(tmp_path, s3.store(), nats, **egress())
        assert (await examined(right, code=0))["nats connection"]["state"] == "ok"
    assert (await examined(right, code=1))["nats connection"]["unreached"]


async def test_a_missing_right_at_nats_is_named(tmp_path: Path) -> None:
    rights = (RIGHTS / "nats-egress.conf").read_text()
    with NatsServer() as server:
        users = ["{user: all, password: p}"]
        cuts = ("egress", "-"), ("few", "CONSUMER.CREATE"), ("listless", "CONSUMER.LIST"), ("blind", "NAMES")
        for name, left_out in (*cuts, ("before", "ACK.*.*"), ("mute", "JS.ACK")):
            lines = [line for line in rights.splitlines() if left_out == "-" or left_out not in line]
            (server.folder / f"{name}.conf").write_text("\n".join(lines))
            users.append(f"{{user: {name}, password: p\ninclude {name}.conf\n}}")
        (server.folder / "account.conf").write_text((RIGHTS / "nats-egress-account.conf").read_text())
        users.append("{user: account, password: p\ninclude account.conf\n}")
        server.extra = "authorization { users: [\n" + "\n".join(users) + "\n] }"
        server.restart()
        document = egress()
        document["egress"] |= {"state_bucket": "FLOE_STATE", "lease_bucket": "FLOE_LEASES"}
        store = folder_store(tmp_path)
        user = {"url": server.url, "user": "egress", "password": "p"}
        found = await examined(write(tmp_path, store, user, **document), code=0)
        assert found["nats rights"]["state"] == "ok"
        assert found["nats jetstream"]["state"] == "skipped", "no role needs the right to ask"
        assert found["nats stream"]["state"] == "warning"
        found = await examined(write(tmp_path, store, user | {"user": "few"}, **document), code=3)
        assert "$JS.API.CONSUMER.CREATE.NODES.floe-doctor" in found["nats rights"]["found"]
        assert "\npython -m infra.rights rights stream=NODES state_bucket=" in found["nats rights"]["todo"]
        user |= {"user": "listless"}
        found = await examined(write(tmp_path, store, user, **document), code=0)
        assert found["nats rights"]["state"] == "warning"
        assert found["nats rights"]["found"] == "refused: $JS.API.CONSUMER.LIST.NODES"
        assert "capture_consumers: never" in found["nats rights"]["todo"]
        document["egress"]["feeds"][0]["capture_consumers"] = "never"
        found = await examined(write(tmp_path, store, user, **document), code=0)
        assert found["nats rights"]["state"] == "ok"
        async with client_of(server.url, user="all", password="p") as client:
            config = {"name": "NODES", "subjects": ["a.>"], "retention": "workqueue", "persist_mode": "async"}
            await create_stream(client, config)
        for name, state, refused in (
            ("egress", "ok", "NODES: permitted in both forms"),
            ("before", "warning", "refused: $JS.ACK.*.*.NODES.>"),
            ("mute", "problem", "refused: $JS.ACK.NODES.>, $JS.ACK.*.*.NODES.>"),
        ):
            code = 3 if state == "problem" else 0
            found = await examined(write(tmp_path, store, user | {"user": name}, **document), code=code)
            shown = found["nats acknowledgements"]
            assert (shown["state"], shown["found"]) == (state, refused)
        durability = found["nats durability"]
        assert (durability["state"], durability["found"]) == ("warning", "NODES: persist_mode async")
        document["egress"]["feeds"] = [{"streams": "*", "retention": ["limits", "workqueue"]}]
        found = await examined(write(tmp_path, store, user | {"user": "blind"}, **document), code=3)
        assert found["nats rights"]["found"] == "refused: $JS.API.STREAM.NAMES"
        found = await examined(write(tmp_path, store, user | {"user": "account"}, **document), code=0)
        assert (found["nats rights"]["state"], found["nats acknowledgements"]["state"]) == ("ok", "ok")
        assert found["nats stream"]["found"] == "1 stream of patterns: NODES"


# Features of the servers


WITHOUT_JETSTREAM = [
    ("jetstream: disabled", "", "E-NO-RESPONDERS", ""),
    ("accounts { A: { users: [{user: a, password: p}] } }", "", "E-JS-10039", ""),
    ("", "nowhere", "E-NO-RESPONDERS", "jetstream_domain"),
]


@pytest.mark.parametrize(("extra", "domain", "code", "todo"), WITHOUT_JETSTREAM)
async def test_a_server_without_jetstream_is_named(
    tmp_path: Path, extra: str, domain: str, code: str, todo: str
) -> None:
    with NatsServer(extra=extra) as server:
        nats = {"url": server.url, "user": "a", "password": "p", "jetstream_domain": domain}
        config = write(tmp_path, folder_store(tmp_path), nats, **egress())
        findings = await examined(config, code=3)
    found = findings["nats jetstream"]
    assert (found["state"], found["found"].startswith(f"{code}: no JetStream: ")) == ("problem", True), found
    assert todo in found["todo"]
    assert "nats rights" not in findings


async def test_an_old_server_is_known_by_its_features(tmp_path: Path) -> None:
    with NatsServer(binary=nats_server_binary("2.10"), max_payload=65536) as server:
        async with client_of(server.url) as client:
            await create_stream(client, {"name": "FLEET", "subjects": ["FLEET.>"], "storage": "memory"})
        store, nats = folder_store(tmp_path), {"url": server.url}
        found = await examined(write(tmp_path, store, nats, **ingress("FLEET")), code=0)
        assert found["nats version"]["found"].startswith("2.10.")
        assert found["nats batches"]["state"] == found["nats max_payload"]["state"] == "warning"
        assert "FLEET: single (not fast: nats-server 2.10." in found["nats batches"]["found"]
        assert found["nats max_payload"]["found"] == "FLEET: 64 KiB"
        found = await examined(write(tmp_path, store, nats, **ingress("FLEET", publisher="fast")), code=3)
        assert found["nats batches"]["found"].startswith("E-PUBLISHER")


async def test_an_account_at_its_limit_is_warned_of(tmp_path: Path) -> None:
    limits = "accounts { A: { users: [{user: a, password: p}], jetstream: {max_streams: 1, max_consumers: 5} } }"
    with NatsServer(extra=limits) as server:
        config = write(tmp_path, folder_store(tmp_path), {"url": server.url, "user": "a", "password": "p"}, **egress())
        assert "streams 0 of 1" in (await examined(config, code=0))["nats jetstream"]["found"]
        async with client_of(server.url, user="a", password="p") as client:
            await create_stream(client, {"name": FEED, "subjects": ["a.>"], "storage": "memory"})
        found = (await examined(config, code=0))["nats jetstream"]
        assert (found["state"], found["found"]) == ("warning", "streams 1 of 1")


def pretends(exchange: Exchange) -> Answer | None:
    """Answer as a store without conditions: it accepts all of them."""
    if any(name.lower() in ("if-none-match", "if-match") for name, _ in exchange.headers):
        return Answer(200, [("ETag", '"0123"')], b"", 0)
    return exchange.forward()


async def test_a_store_that_ignores_conditions_is_warned_of(s3: SharedS3, nats_url: str, tmp_path: Path) -> None:
    with FaultProxy(s3.endpoint_url) as proxy:
        for operation in ("put", "put_if_absent", "put_if_match"):
            proxy.on(operation, pretends)
        store = s3.store() | {"endpoint_url": proxy.url, "checksum": "none"}
        found = await examined(write(tmp_path, store, {"url": nats_url}, **egress()), code=0)
    assert found["store conditional put"]["found"] == "ignored: If-None-Match, If-Match"
    assert found["store concurrent put"]["found"].startswith("8 of 8 concurrent writers")
    about = {f"store {what}" for what in ("conditional put", "concurrent put", "versioning", "checksum")}
    assert states(found, "warning") == about | {"nats stream"}
    assert "store.conditional_puts: no" in found["store conditional put"]["todo"]
    assert found["store checksum"]["todo"] == "set store.checksum: sha256"


def test_a_store_that_refuses_conditions_is_named_with_the_effects(s3: SharedS3, tmp_path: Path) -> None:
    retained = {"compaction": {"retention": {"max_age": "30d"}}}
    with refusing_conditions(FaultProxy(s3.endpoint_url), 501) as proxy:
        store = s3.store() | {"endpoint_url": proxy.url}
        for role, more, state in (("egress", {}, "warning"), ("compaction", retained, "problem")):
            settings = settings_of(tmp_path, store=store, **egress(), **more)
            found = by_check(examine_store(settings, (role,), SystemClock()))
            assert found["store conditional put"].state == state
            assert "E-STORE-CONDITIONS: retention" in found["store conditional put"].meaning
            assert (found["store concurrent put"].state, found["store list after write"].state) == ("skipped", "ok")


def test_rules_of_the_bucket_are_read(s3: SharedS3, tmp_path: Path) -> None:
    bucket, admin = s3.new_bucket(), s3.client()
    settings = settings_of(tmp_path, store=s3.store(bucket))

    def found(prefix: str, versioning: str) -> tuple[DoctorFinding, DoctorFinding]:
        made = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": prefix}, "Expiration": {"Days": 30}}
        rules: Any = {"Rules": [made]}
        admin.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules)
        admin.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": versioning})
        findings = by_check(examine_store(settings, ("egress",), SystemClock()))
        return findings["store lifecycle"], findings["store versioning"]

    for prefix in ("data/_floe/audit/", "data/_floe/alive/"):
        lifecycle, versioning = found(prefix, "Enabled")
        assert (lifecycle.state, versioning.state) == ("ok", "ok"), "what is deleted by mistake comes back"
    assert "the bucket grows" in versioning.found
    lifecycle, versioning = found("data/site=", "Suspended")
    assert (lifecycle.state, lifecycle.found) == ("problem", "rule tidy deletes objects under 'data/site='")
    assert f"aws s3api get-bucket-lifecycle-configuration --bucket {bucket}" in lifecycle.todo
    assert (versioning.state, versioning.found) == ("warning", "suspended")
    assert "put-bucket-versioning" in versioning.todo


# This host


def settings_of(folder: Path, **more: Any) -> Settings:
    document = {"spool_dir": str(folder / "spool"), "store": folder_store(folder), **egress(), **more}
    return Settings.model_validate(document)


def test_a_wrong_clock_is_warned_of(tmp_path: Path) -> None:
    clock = ManualClock(time.time() - 300)

    def findings() -> dict[str, DoctorFinding]:
        return by_check(examine_store(settings_of(tmp_path), ("egress",), clock))

    found = findings()["store clock"]
    assert (found.state, found.found.partition(" s ")[2]) == ("warning", "ahead of this host's")
    clock.advance(330)
    assert (findings()["store clock"].state, findings()["store conditional put"].state) == ("ok", "ok")


def test_a_new_site_of_patterns_is_tested_like_any_other(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, egress={"feeds": [{"streams": ["*"]}]})
    open_chains(settings).write_tail(Chain("eu-west", FEED), 10)
    found = by_check(examine_store(settings, ("egress", "ingress"), SystemClock()))
    assert found["store write"].found == f"data/_floe/site={SITE}/feed=doctor/probe/*"
    assert not any(each.state == "skipped" for each in found.values()), found


def test_a_spool_that_cannot_be_written_or_is_too_small_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [found] = examine_disk(settings_of(tmp_path, spool_dir=str(tmp_path / "file" / "spool")), ("egress",))
    assert found.state == "problem"
    assert found.found.startswith("E-SPOOL: spool folder")
    parts = {"count": 1024, "subject": "a.{partition}.>"}
    large = settings_of(tmp_path, **egress(segment={"max_size": "4G"}, partitions=parts))
    found = by_check(examine_disk(large, ("egress",)))["disk space"]
    assert (found.state, found.found.rpartition(", ")[2]) == ("problem", "4 TiB needed at most")
    assert by_check(examine_disk(large, ("ingress",)))["disk space"].state == "ok"
    assert not (tmp_path / "spool").exists(), "it only looks"


def test_spark_is_examined_without_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_check(examine_spark(settings_of(tmp_path), True))
    assert {name: each.state for name, each in found.items()} == {
        f"spark {what}": "ok" for what in ("java", "pyspark", "python")
    }
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert by_check(examine_spark(settings_of(tmp_path), True))["spark java"].state == "problem"
    assert by_check(examine_spark(settings_of(tmp_path), False))["spark java"].state == "warning"

    def workers(master: str, **conf: str) -> DoctorFinding:
        spark = {"master": master, "conf": {name.replace("_", "."): value for name, value in conf.items()}}
        return by_check(examine_spark(settings_of(tmp_path, compaction={"spark": spark}), True))["spark python"]

    assert workers("local[2]", spark_pyspark_python=sys.executable).state == "ok"
    assert workers("local[2]", spark_pyspark_python=str(tmp_path / "python")).found.endswith("found none")
    assert workers("spark://host:7077").state == "skipped"


async def test_spark_is_left_out_without_compaction(nats_url: str, tmp_path: Path) -> None:
    store, nats = folder_store(tmp_path), {"url": nats_url}
    config = write(tmp_path, store, nats, **egress())
    assert not any(name.startswith("spark") for name in await examined(config, code=0))
    assert "spark java" in await examined(config, "--role", "egress", "--role", "compaction", code=0)
    config = write(tmp_path, store, nats, compaction={"engine": "local"})
    found = await examined(config, code=0)
    assert not any(name.startswith(("spark", "nats")) for name in found)
    assert found["store write"]["found"].startswith("no chain is archived or configured")
    assert found["store layout"]["found"] == "no chain is archived yet"
