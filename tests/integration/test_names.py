"""Names of sites, feeds and incarnations on the command line, and in `sources`."""

from __future__ import annotations

from typing import Any

import pytest

from common.chain import Chain
from common.jetstream.api import stream_info
from common.jetstream.client import FloeClient
from common.jetstream.kv import KeyValue, state_key
from ingress.checkpoint import Checkpoint, TargetState
from ingress.checkpoint_store import StateStore
from tests.support.basics import soon
from tests.support.commands import floe
from tests.support.ingress import CHAIN, Centre, rows_of

pytestmark = pytest.mark.servers

LATER = CHAIN.next_incarnation()
ELSEWHERE = Chain("us-east", "OTHERS")


async def test_decisions_are_about_the_newest_incarnation(client: FloeClient, centre: Centre) -> None:
    for chain in (CHAIN, LATER):
        centre.archive.put(rows_of(1, 5, chain), chain=chain)
    named = ["-c", str(centre.write()), "--target", centre.target, "--feed", "NODES", "--site"]

    async def paused(site: str, *more: str) -> Any:
        return await floe("chain", "pause", *named, site, *more, "--json")

    async def moved(*more: str) -> Any:
        return await floe("checkpoint", "set", *named, *more, "--dry-run", "--json")

    [shown] = (await paused("us-east")).json()
    assert (shown["site"], shown["incarnation"]) == ("us-east", 1)
    done = await paused("us-esat")
    assert (done.code, "did you mean us-east/NODES?" in done.err) == (2, True), done
    assert (await paused("us-east", "--incarnation", "7")).code == 2
    as_argument = await floe("chain", "pause", *named[:4], "us-east/NODES/0001/0", "--json")
    assert [row["chain"] for row in as_argument.json()] == ["us-east/NODES/0001/0"]
    done = await paused("eu-west", "--partition", "7")  # of `sources`, and nothing archived yet
    assert (done.code, done.err) == (0, "eu-west/NODES/0000/7: nothing of it is archived; it is paused if that comes\n")
    centre.archive.put(rows_of(1, 5, ELSEWHERE), chain=ELSEWHERE)
    done = await floe("chain", "pause", *named[:4], str(ELSEWHERE))
    assert (done.code, done.out) == (2, "")
    assert f"{ELSEWHERE}: expected a chain that flows into {centre.target}, found another; " in done.err
    assert (await moved("us-esat", "--sequence", "3")).code == 2

    bucket = await KeyValue(client, centre.state_bucket).ensure()
    store = StateStore(bucket, state_key("ingress", centre.target), centre.target)
    await store.save(TargetState(Checkpoint(3, "t0", {CHAIN: 4}), None), 0)
    for done in (await paused("us-east"), await moved("us-east", "--sequence", "3")):
        assert (done.code, "say --incarnation 0 or --incarnation 1" in done.err) == (2, True), done
    rows = (await paused("us-east", "--incarnation", "0")).json()
    assert {Chain(r["site"], r["feed"], r["incarnation"]) for r in rows} >= {CHAIN, LATER}


async def test_a_feed_of_sources_of_which_there_is_nothing_is_told_once_and_shown(
    client: FloeClient, centre: Centre, caplog: pytest.LogCaptureFixture
) -> None:
    centre.archive.put(rows_of(1, 5))
    centre.target_settings["sources"][0]["site"] = ["us-east", "us-esat"]
    async with centre.running() as health:
        await soon(lambda: health.status()["parts"].get("sources") == {"missing": ["us-esat/NODES"]})
        await centre.carried(client, 5)
        rows = (await floe("status", "-c", str(centre.write()), "--json")).json()

    [missing] = [row for row in rows if row["site"] == "us-esat"]
    assert (missing["phase"], missing["alarm"]) == ("missing", False)
    assert "did you mean us-east/NODES? there are us-east/NODES" in missing["why"]
    [told] = [record.msg for record in caplog.records if "source_missing" in str(record.msg)]
    assert "did you mean us-east/NODES?" in str(told)


async def test_looking_makes_no_bucket_and_a_decision_makes_one(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(rows_of(1, 5))
    config = ["-c", str(centre.write())]

    for words in (["status"], ["checkpoint", "ls"], ["gap", "ls"], ["chain", "ls"], ["parked", "ls"]):
        done = await floe(*words, *config)
        assert done.code == 0, (words, done)
        assert await stream_info(client, f"KV_{centre.state_bucket}") is None, words
    named = ["--target", centre.target, "--site", "us-east", "--feed", "NODES"]
    assert (await floe("chain", "pause", *config, *named)).code == 0
    assert await stream_info(client, f"KV_{centre.state_bucket}") is not None
    assert [row["site"] for row in (await floe("chain", "ls", *config, "--json")).json()] == ["us-east"]
    for _ in range(2):  # also of a chain that is not paused, which is looked at again
        assert f"{CHAIN}: resumed; " in (await floe("chain", "resume", *config, *named)).err
