"""Each role at NATS with the rights of its file in infra/rights, and no others."""

import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from common.errors import Refused
from common.nats.api import consumer_names, create_stream, next_message, stream_info
from common.nats.client import FloeClient, frame
from common.nats.kv import KeyValue
from common.open import load_settings
from floe import cli
from infra import rights
from infra.local.nats import NatsServer
from infra.rights import RightsNames, main, rights_files
from tests.integration.test_ingress_messages import make_limited, raise_limit, with_large
from tests.support.basics import PATIENCE, soon
from tests.support.commands import configuration, ran
from tests.support.domains import hub_and_leaf
from tests.support.egress import Bench, bench_of, feed_of, publish_over
from tests.support.ingress import CHAIN, Archive, Centre, check_exact, client_of, closed_at, rows_of

RIGHTS = Path(__file__).parents[2] / "infra" / "rights"
EVERYTHING = {"user": "all", "password": "secret"}
BUCKETS = ("FLOE_LEASES", "FLOE_STATE")
ROLES = ("egress", "ingress", "operator", "restore", "replay", "drill", "compare")
LEASES = "FLOE_LEASES.ingress.>"
LOOKING = ("chain ls", "status", "checkpoint ls", "gap ls", "check archive", "doctor --role compaction")


def guarded(server: NatsServer) -> NatsServer:
    """The server with a user for each role, with exactly the rights of its file; `deaf` receives no leases.

    Its acknowledgement subjects have the form that is the default of 2.16.
    """
    for role in ROLES:
        shutil.copy(RIGHTS / f"nats-{role}.conf", server.folder)
    allowed = (RIGHTS / "nats-ingress.conf").read_text()
    assert LEASES in allowed
    deaf = "\n".join(each for each in allowed.splitlines() if LEASES not in each)
    (server.folder / "nats-deaf.conf").write_text(deaf)
    users = [f"{{ user: {role}, password: secret\ninclude nats-{role}.conf\n}}" for role in (*ROLES, "deaf")]
    server.extra = "authorization { users: [ {user: all, password: secret}\n" + "\n".join(users) + "\n] }"
    server.extra += "\nfeature_flags { js_ack_fc_v2: true }"
    return server


class Guarded(Centre):
    """A centre that connects as one of the users."""

    user = "ingress"

    def document(self, **ingress: Any) -> dict[str, Any]:
        document = super().document(**ingress)
        document["nats"] |= {"user": self.user, "password": "secret"}
        return document


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with guarded(NatsServer()) as server:
        yield server


@pytest.fixture
def centre(tmp_path: Path, server: NatsServer) -> Guarded:
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 500))
    centre = Guarded(tmp_path, archive, server.url, stream="FLEET")
    centre.lease_bucket, centre.state_bucket = BUCKETS
    return centre


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[FloeClient]:
    """A connection of a user that may do everything."""
    async with client_of(server.url, **EVERYTHING) as client:
        yield client


@pytest.fixture
def bench(server: NatsServer, tmp_path: Path, client: FloeClient) -> Bench:
    return Bench(server.url, tmp_path, client, *BUCKETS)


def violations(server: NatsServer) -> list[str]:
    return [line for line in server.log.read_text().splitlines() if "Violation" in line]


async def test_ingress_has_its_rights(centre: Guarded, server: NatsServer, client: FloeClient) -> None:
    for publisher in ("fast", "atomic", "single"):
        centre.target_settings["publisher"] = publisher
        first = len(centre.archive.rows[CHAIN]) + 1
        centre.archive.put(rows_of(first, first + 99))
        async with centre.running(), centre.running():
            check_exact(await centre.carried(client, first + 99), centre.archive, centre.prefix)
    assert violations(server) == []
    centre.user = "deaf"
    centre.archive.put(rows_of(801, 900))
    async with centre.running():
        check_exact(await centre.carried(client, 900), centre.archive, centre.prefix)
        await soon(lambda: any("Subscription" in line for line in violations(server)))


async def test_an_operator_has_its_rights(centre: Guarded, server: NatsServer, client: FloeClient) -> None:
    centre.target_settings["on_oversize"] = "park"
    centre.archive.put(with_large(501, 520, {510: 2000}))
    await make_limited(client, centre)
    async with centre.running():
        await closed_at(client, centre, 519)
    centre.user = "operator"
    config = ["-c", str(centre.write())]
    chain = ["--target", centre.target, "us-east/NODES"]

    async def are(state: str) -> bool:
        return [row["state"] for row in (await ran("parked", "ls", *config, "--json")).json()] == [state]

    await ran("checkpoint", "set", *config, *chain[:2], "--from-target", "--yes")
    for words in (["checkpoint", "set", "--sequence", "515", "--yes"], ["chain", "pause"], ["chain", "resume"]):
        await ran(*words, *config, *chain)
    for looking in LOOKING:
        await ran(*looking.split(), *config)
    centre.user = "ingress"
    async with centre.running():
        assert await are("parked")
        await ran("parked", "cat", *config, *chain, "--sequence", "510")
        await raise_limit(client, centre, 100_000)
        await ran("parked", "retry", *config, *chain, "--all", "--yes")
        await soon(lambda: are("delivered"))
    assert violations(server) == []


async def test_a_replay_a_drill_and_a_comparison_have_the_rights_of_the_table(
    centre: Guarded, server: NatsServer, client: FloeClient
) -> None:
    feed = ["us-east/NODES"]
    centre.user = "replay"
    await ran("replay", *["-c", str(centre.write()), *feed], "--target", "COPY", "--subject-prefix", "copy", "--create")
    centre.user = "drill"
    await ran("drill", "-c", str(centre.write()), *feed)
    done = await ran("drill", "-c", str(centre.write()), "us-east/NODES", "--exact", "--json")
    assert done.json()["read_back"] == 500
    centre.user = "ingress"
    async with centre.running():
        await closed_at(client, centre, 500)
    centre.user = "compare"
    found = await ran("compare", "-c", str(centre.write()), "us-east/NODES", "--with", "target", "--json")
    assert found.json()["copies"][0]["same"] == 500

    assert violations(server) == []


AS_EGRESS = {"user": "egress", "password": "secret"}


async def run(bench: Bench, *words: str, feed: dict[str, Any], code: int = 0) -> None:
    """Run a command of a site with the rights of egress."""
    path = configuration(bench, feed)
    document = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(document | {"nats": document["nats"] | AS_EGRESS}))
    await ran(*words, "-c", str(path), code=code)


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_commands_of_a_site_have_the_rights_of_egress(server: NatsServer, bench: Bench, retention: str) -> None:
    stream = {"name": "NODES", "subjects": ["NODES.>"], "retention": retention}
    await create_stream(bench.client, stream)
    whole, cut = {"stream": "NODES", "segment": {"max_age": "1h"}}, feed_of("NODES", 2, on_recreated="halt")
    await run(bench, "egress", "init", feed=whole)
    async with bench.egress(whole, nats=AS_EGRESS) as running:
        await publish_over(bench, "NODES", ["0.a", "1.a"], 100, "x")
        await soon(lambda: (running.status("NODES").get("open_segment") or {}).get("messages") == 100)
        await run(bench, "egress", "flush", feed=whole)
        assert bench.end("NODES") == 100
        await run(bench, "status", feed=whole)
        await run(bench, "compare", "site", "--all", feed=whole)
    await run(bench, "egress", "resolve", "NODES", feed=whole)
    await run(bench, "egress", "repartition", "NODES", "--yes", feed=cut)
    await bench.publish("NODES", [b"y"] * 10, subject="0.a")
    async with bench.egress(cut, nats=AS_EGRESS):
        await soon(lambda: bench.end("NODES", 1) == 110)
    await bench.delete_stream("NODES")
    await create_stream(bench.client, stream)
    await bench.publish("NODES", [b"z"] * 20, subject="0.a")
    await run(bench, "egress", "resolve", "NODES", feed=cut, code=3)
    await run(bench, "egress", "resolve", "NODES", "--new-incarnation", "--yes", feed=cut)
    await run(bench, "egress", "init", feed=cut)
    async with bench.egress(cut, nats=AS_EGRESS):
        await soon(lambda: bench.end("NODES", 2) == 20)
    assert violations(server) == []
    await run(bench, "doctor", feed=cut)
    asked = [re.findall('"(.*?)"', each)[-1] for each in violations(server)]
    assert asked == ["$JS.API.INFO"], "a role needs no limits"


def as_egress(server: NatsServer, *names: str, role: str = "egress") -> str:
    """The users of a server, one of them egress with rights that are made for these names."""
    main([str(server.folder), *names])
    egress = f"{{ user: egress, password: secret\ninclude nats-{role}.conf\n}}"
    return f"authorization {{ users: [ {{user: all, password: secret}}\n{egress} ] }}"


@pytest.mark.parametrize("inside", [True, False])
async def test_egress_archives_with_the_rights_made_for_a_domain(tmp_path: Path, inside: bool) -> None:
    """The hub is inside the domain `hub`, or outside of the domain `leaf`."""
    domain = "hub" if inside else "leaf"
    names = [f"domain={domain}", *([] if inside else ["outside=yes"])]
    with hub_and_leaf(lambda hub: as_egress(hub, *names)) as (hub, leaf):
        async with client_of((hub if inside else leaf).url, **EVERYTHING) as client:
            bench = Bench(hub.url, tmp_path, client, *BUCKETS)
            await create_stream(client, {"name": "NODES", "subjects": ["NODES.>"], "retention": "workqueue"})
            nats = {**AS_EGRESS, "jetstream_domain": domain}
            async with bench.egress({"stream": "NODES"}, nats=nats):
                await bench.archive("NODES", (b"%d" % n for n in range(300)), 300)
            assert violations(hub) == []
            async with client_of(hub.url, **nats) as found:
                with pytest.raises(Refused, match=r"permissions violation for publish .*STREAM.MSG.GET.OTHER"):
                    await next_message(found, "OTHER", 1)
                with pytest.raises(Refused, match=r"permissions violation for publish .*KV.OTHER.a"):
                    await KeyValue(found, "OTHER").put("a", b"")
                found.send(frame(subject := found.api_subject("CONSUMER.MSG.NEXT.OTHER.C").encode(), b""))
                assert await found.round_trip(PATIENCE)
                assert found.permission_error(subject)


async def test_egress_archives_a_whole_account_with_the_rights_for_it(tmp_path: Path) -> None:
    with NatsServer() as server:
        server.extra = as_egress(server, role="egress-account")
        server.restart()
        async with bench_of(server.url, tmp_path, *BUCKETS, **EVERYTHING) as bench:
            kinds = {"ORDERS": "limits", "JOBS": "workqueue", "KV_CONFIG": "limits", "NEWS": "interest"}
            entry = {"streams": "*", "retention": [*dict.fromkeys(kinds.values())]}
            first, late = [*kinds][:2], [*kinds][2:]
            for name in first:
                await bench.make_stream(name, retention=kinds[name])
                await bench.publish(name, [b"x"] * 10)
            async with bench.egress(entry, nats=AS_EGRESS):
                for name in first:
                    await bench.archived_to(name, 10)
                for name in late:
                    await bench.make_stream(name, retention=kinds[name])
                await soon(lambda: consumer_names(bench.client, "NEWS"))
                for name in late:
                    await bench.archive(name, [b"x"] * 10, 10)
                for name in ("JOBS", "NEWS"):
                    await soon(lambda: is_empty(bench.client, name))  # noqa: B023
            assert violations(server) == []
            assert [len(bench.messages(name)) for name in kinds] == [10] * 4


async def is_empty(client: FloeClient, stream: str) -> bool:
    info = await stream_info(client, stream)
    return info is not None and not info.messages


def leaves(group: click.Group, *path: str) -> Iterator[str]:
    """Every command below a group, with its full name."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from leaves(found, *path, name)
        else:
            yield " ".join((*path, name))


def test_every_command_has_a_role_or_needs_none() -> None:
    by_role = {each for role in rights.ROLES for each in role.commands}
    others = {each for commands in rights.COMMANDS_WITHOUT_ROLE.values() for each in commands}

    assert (by_role & others, by_role | others) == (set(), set(leaves(cli)))


def test_the_files_are_those_of_the_table() -> None:
    files = dict(rights_files(RightsNames()))
    assert {path.name: path.read_text() for path in RIGHTS.iterdir()} == files, "python -m infra.rights infra/rights"


@pytest.mark.parametrize(
    ("feeds", "role", "subject"),
    [("NODES,LOGS", "egress", "CONSUMER.LIST.LOGS"), ("NODES,KV_*", "egress-account", "$JS.ACK.>")],
)
def test_the_files_of_a_new_site_are_those_of_the_table(tmp_path: Path, feeds: str, role: str, subject: str) -> None:
    central, folder = tmp_path / "central.yaml", tmp_path / "site"
    sources = "[{site: 'eu-*', feed: NODES, subject_prefix: f}]"
    secret = "access_key_id: C, secret_access_key: S3CR3T"
    central.write_text(f"store: {{url: s3://abc, {secret}}}\ningress: {{targets: [{{stream: F, sources: {sources}}}]}}")
    words = ["site", "add", "eu-west", "--feeds", feeds, "-c", str(central)]
    done = CliRunner().invoke(cli, [*words, "--json"])
    files = json.loads(done.stdout)["files"]
    assert [*files] == ["site.yaml", f"nats-{role}.conf", "s3-egress.json"]
    assert (subject in files[f"nats-{role}.conf"], "S3CR3T" in done.output) == (True, False)
    assert files["s3-egress.json"] == dict(rights_files(RightsNames("eu-west", bucket="abc")))["s3-egress.json"]
    assert ("eu-west/LOGS" in done.stderr) == ("LOGS" in feeds)
    assert CliRunner().invoke(cli, [*words, "--output", str(folder)]).exit_code == 0
    written = load_settings(str(folder / "site.yaml"), quiet=True)
    assert [each.label for each in written.egress.feeds_] == feeds.split(",")
    assert "expected no such file" in CliRunner().invoke(cli, [*words, "--output", str(folder)]).stderr
    assert "site 'a.b': expected" in CliRunner().invoke(cli, ["site", "add", "a.b", "-c", str(central)]).stderr


def test_the_files_can_be_made_for_other_names(tmp_path: Path) -> None:
    main([str(tmp_path), *["site=eu-west", "stream=S", "bucket=archive", "prefix=", "domain=hub", "outside=yes"]])
    conf = (tmp_path / "nats-egress.conf").read_text()
    assert '"$JS.hub.API.STREAM.INFO.S"' in conf
    assert '"$JS.hub.API.$KV.FLOE_STATE.>"' in conf
    assert '"arn:aws:s3:::archive/site=eu-west/*"' in (tmp_path / "s3-egress.json").read_text()
    with pytest.raises(SystemExit, match="expected names of site stream"):
        main([str(tmp_path), "sites=x"])
    assert "{" not in conf.replace("{ allow", "").replace("permissions: {", "")
