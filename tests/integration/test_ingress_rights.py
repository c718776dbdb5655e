"""Ingress and operators with the rights that docs/operations.md names, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.jetstream.client import FloeClient, connect
from common.settings.service import NatsSettings
from infra.local.nats import NatsServer
from tests.support.basics import soon
from tests.support.commands import floe
from tests.support.ingress import Archive, Centre, check_exact, rows_of

API = "$JS.API"


def bucket(name: str) -> list[str]:
    """Subjects that a service publishes to for its KV bucket."""
    asked = [f"{API}.STREAM.{call}.KV_{name}" for call in ("INFO", "CREATE", "MSG.GET")]
    return [*asked, f"$KV.{name}.>"]


TARGET = [*(f"{API}.STREAM.{call}.FLEET" for call in ("INFO", "CREATE", "MSG.GET")), "FLEET.>"]
READING = [f"{API}.CONSUMER.{call}.FLEET.>" for call in ("CREATE", "MSG.NEXT", "DELETE")]
LOOKING = [f"{API}.STREAM.{call}.FLEET" for call in ("INFO", "MSG.GET")]
MADE = [*(f"{API}.STREAM.{call}.COPY" for call in ("INFO", "CREATE", "MSG.GET")), "copy.>"]
SCRATCH = [
    f"{API}.STREAM.NAMES",
    *(f"{API}.STREAM.{call}.*" for call in ("INFO", "CREATE", "DELETE", "MSG.GET")),
    *(f"{API}.CONSUMER.{call}.*.>" for call in ("CREATE", "MSG.NEXT", "DELETE")),
    "_floe_drill.>",
]
FIRST = f"{API}.STREAM.INFO.FLEET"  # of whoever makes a bucket, for its replicas
LEASES = "$KV.LEASES.ingress.>"

RIGHTS = {
    "ingress": ([*TARGET, *bucket("STATE"), *bucket("LEASES")], ["_INBOX.>", LEASES]),
    "deaf": ([*TARGET, *bucket("STATE"), *bucket("LEASES")], ["_INBOX.>"]),
    "replay": ([*MADE, FIRST, *bucket("STATE"), *bucket("LEASES")], ["_INBOX.>"]),
    "drill": ([*SCRATCH, *bucket("STATE"), *bucket("LEASES")], ["_INBOX.>"]),
    "operator": ([*LOOKING, *READING, *bucket("STATE")], ["_INBOX.>"]),
}


def quoted(subjects: list[str]) -> str:
    return ", ".join(f'"{subject}"' for subject in subjects)


def users() -> str:
    lines = ["{user: all, password: secret}"]
    for name, (publish, subscribe) in RIGHTS.items():
        allowed = f"publish: [{quoted(publish)}], subscribe: [{quoted(subscribe)}]"
        lines.append(f"{{user: {name}, password: secret, permissions: {{{allowed}}}}}")
    return "authorization { users: [" + "\n".join(lines) + "] }"


class Guarded(Centre):
    """A centre that connects as one of the users."""

    user = "ingress"

    def document(self, **ingress: Any) -> dict[str, Any]:
        document = super().document(**ingress)
        document["nats"] |= {"user": self.user, "password": "secret"}
        return document


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer(extra=users()) as server:
        yield server


@pytest.fixture
def centre(tmp_path: Path, server: NatsServer) -> Guarded:
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 500))
    centre = Guarded(tmp_path, archive, server.url, stream="FLEET")
    centre.lease_bucket, centre.state_bucket = "LEASES", "STATE"
    return centre


async def everything(server: NatsServer) -> FloeClient:
    return await connect(NatsSettings(url=server.url, user="all", password="secret"), name="test")


def violations(server: NatsServer) -> list[str]:
    return [line for line in server.log.read_text().splitlines() if "Violation" in line]


@pytest.mark.parametrize("publisher", ["fast", "atomic", "single"])
async def test_ingress_carries_with_the_rights_of_the_table(
    centre: Guarded, server: NatsServer, publisher: str
) -> None:
    centre.target_settings["publisher"] = publisher
    client = await everything(server)
    async with centre.running():
        await centre.carried(client, 500)
    centre.archive.put(rows_of(501, 600))
    async with centre.running(), centre.running():
        check_exact(await centre.carried(client, 600), centre.archive, centre.prefix)

    assert violations(server) == []
    await client.aclose()


async def test_without_the_subscription_releases_are_not_heard_and_all_else_works(
    centre: Guarded, server: NatsServer
) -> None:
    centre.user = "deaf"
    client = await everything(server)
    async with centre.running():
        check_exact(await centre.carried(client, 500), centre.archive, centre.prefix)
        await soon(lambda: any("Subscription" in line for line in violations(server)))
    await client.aclose()


async def test_an_operator_corrects_with_the_rights_of_the_table(centre: Guarded, server: NatsServer) -> None:
    client = await everything(server)
    async with centre.running():
        await centre.carried(client, 500)
    centre.user = "operator"
    named = ["-c", str(centre.write()), "--target", centre.target]
    chain = ["--site", "us-east", "--feed", "NODES"]
    for words in (
        ["checkpoint", "set", *named, "--from-target", "--yes"],
        ["checkpoint", "set", *named, *chain, "--sequence", "400", "--yes"],
        ["chain", "pause", *named, *chain],
        ["chain", "resume", *named, *chain],
        ["status", *named[:2]],
        ["checkpoint", "ls", *named[:2]],
        ["gap", "ls", *named[:2]],
    ):
        done = await floe(*words)
        assert done.code == 0, (words, done.err)

    assert violations(server) == []
    await client.aclose()


async def test_a_replay_and_a_drill_have_the_rights_of_the_table(centre: Guarded, server: NatsServer) -> None:
    feed = ["--site", "us-east", "--feed", "NODES"]
    centre.user = "replay"
    named = ["-c", str(centre.write()), *feed]
    done = await floe("replay", *named, "--target", "COPY", "--subject-prefix", "copy", "--create")
    assert done.code == 0, done.err
    centre.user = "drill"
    done = await floe("drill", "-c", str(centre.write()), *feed)
    assert done.code == 0, done.err

    assert violations(server) == []
