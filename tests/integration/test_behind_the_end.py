"""Segments behind the end of an incarnation: named, carried or given up by the commands that name them."""

from __future__ import annotations

import shlex
from pathlib import Path

from common.chain import Chain
from common.jetstream.client import FloeClient
from tests.support.commands import Done, floe, invoke
from tests.support.ingress import Archive, Centre, arrived, rows_of

OLD, NEW = Chain("us-east", "NODES"), Chain("us-east", "NODES", 1)


async def paste(line: str, *more: str) -> Done:
    done = await floe(*shlex.split(line)[1:], *more)
    assert done.code == 0, done
    return done


async def test_what_lies_behind_the_end_of_an_incarnation_is_named_and_carried_or_given_up(
    nats_url: str, client: FloeClient, tmp_path: Path
) -> None:
    archive = Archive(tmp_path / "bucket")
    archive.put(rows_of(1, 10))
    archive.begin(NEW, previous={0: 10})
    archive.put(rows_of(1, 5, NEW), chain=NEW)
    centre = Centre(tmp_path, archive, nats_url)
    async with centre.running():
        await centre.carried(client, 15)
        archive.put(rows_of(11, 20, OLD))
        archive.put(rows_of(31, 34, OLD))
    config = str(centre.write())

    async def status() -> dict[int, dict[str, object]]:
        return {row["incarnation"]: row for row in (await invoke("status", "-c", config, "--json")).json()}

    verify = ("segments", "verify", "-c", config)
    assert (await invoke(*verify, "us-east/NODES/1/0")).code == 0
    done = await invoke(*verify)
    assert done.code == 3
    assert "sequences 11..20, in 1 segment, lie behind the end of the incarnation, 10: nobody" in done.err
    commands = [line for line in done.err.splitlines() if line.startswith("floe ")]
    old = (await status())[0]
    assert str(old["why"]).startswith("11..20, 31..34 behind the end 10 of the incarnation: floe replay ")
    assert (old["lag_sequences"], old["phase"]) == (0, "done")
    carried, given_up = commands[::2], commands[1::2]
    for line in carried:
        await paste(line)
    stream = "NODES_0000"
    found = [each.message.sequence for each in await arrived(client, stream)]
    assert found == [*range(11, 21), *range(31, 35)]
    for line in given_up:
        await paste(line, "--yes")
    assert (await invoke(*verify)).code == 0
    assert (await status())[0]["why"] == ""
    await client.api(f"STREAM.DELETE.{stream}")
