"""`floe gap accept`: gaps that it may accept, and its output; names on the command line and in `sources`."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from common.archive.store import quarantine_command
from common.chain import Chain
from common.nats.api import stream_info
from common.nats.client import FloeClient
from common.nats.kv import KeyValue
from common.sequences import MAX_SEQUENCE, SequenceRange
from ingress.checkpoint import Checkpoint, StateStore, TargetState
from ingress.operator.holes import find_blocking_hole, read_cover
from tests.support.basics import soon
from tests.support.commands import Done, floe, invoke, ran, run_here
from tests.support.ingress import CHAIN, Archive, Centre, arrived, closed_at, rows_of

LATER = CHAIN.next_incarnation()


@pytest.fixture
def holed(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 10))
    archive.put(rows_of(21, 30))
    return archive


def accept(archive: Archive, first: int, last: int, *more: str, chain: Chain = CHAIN, is_exact: bool = True) -> Done:
    config = str(Centre(archive.folder.parent, archive, "nats://127.0.0.1:1").write())
    named = f"{chain.site}/{chain.feed}" + (f"/{chain.incarnation}" if is_exact else "")
    return run_here("gap", "accept", "-c", config, named, "--first", str(first), "--last", str(last), *more)


COVERED_RANGES = [
    (5, 12, "expected no segment there, found 1..10"),
    (11, 21, "expected no segment there, found 21..30"),
    (11, 40, "which ends at 30"),
    (31, 31, "which does not reach 31"),
    (20, 11, "is greater than --last"),
]


@pytest.mark.parametrize(("first", "last", "why"), COVERED_RANGES)
def test_only_uncovered_rows_can_be_accepted(holed: Archive, first: int, last: int, why: str) -> None:
    done = accept(holed, first, last, "--yes")

    assert (done.code, why in done.err) == (2, True), done
    assert holed.documents.gaps(CHAIN) == []


def test_nobody_is_asked_without_a_terminal_nor_by_a_dry_run_and_the_first_decision_stays(holed: Archive) -> None:
    shown, listed = accept(holed, 11, 20, "--dry-run"), accept(holed, 11, 20, "--dry-run", "--json")
    assert [each.code for each in (shown, accept(holed, 5, 12, "--dry-run"), accept(holed, 11, 20))] == [0, 2, 2]
    assert shown.out == "us-east/NODES/0000/0 11..20 can be accepted as a gap; nothing was changed\n"
    assert listed.json()["dry_run"] is True
    assert holed.documents.gaps(CHAIN) == []
    accepted = accept(holed, 11, 20, "--yes", "--note", "gone", "--json")
    assert accepted.code == 0, accepted
    [gap] = holed.documents.gaps(CHAIN)
    assert (gap.range, gap.note, accepted.json()["by"]) == (SequenceRange(11, 20), "gone", gap.decided_by)
    assert accept(holed, 11, 20, "--yes", "--note", "second", "--json").json()["note"] == "gone"


def test_damaged_segments_are_named_with_their_quarantine_command_and_accepted(holed: Archive) -> None:
    bad = holed.put(rows_of(11, 20))
    path = holed.folder / bad.key
    path.write_bytes(path.read_bytes()[:-100] + b"\0" * 100)

    found = find_blocking_hole(holed.store, read_cover(holed.store, holed.documents, CHAIN, 11))
    assert (found.rows, found.kind, found.damaged) == (SequenceRange(11, 20), "damaged", (bad.key,))
    assert f"\n{quarantine_command(bad.key, '--yes')}\n" in found.remedies()[0]
    assert find_blocking_hole(holed.store, read_cover(holed.store, holed.documents, CHAIN, 5)) is None
    done = accept(holed, 11, 20, "--yes")
    assert (done.code, bad.key in done.err) == (0, True), done


def test_the_end_of_an_incarnation_can_be_accepted_but_no_claim_of_a_tail(holed: Archive) -> None:
    """A writer of the tail could have the chain skip the messages that come next."""
    holed.documents.write_tail(CHAIN, MAX_SEQUENCE)

    refused = accept(holed, 31, 40, "--yes")
    assert (refused.code, "which does not reach 31" in refused.err) == (2, True), refused
    assert [hole.rows for hole in read_cover(holed.store, holed.documents, CHAIN).holes()] == [SequenceRange(11, 20)]
    holed.begin(LATER, previous={0: 35})
    assert (accept(holed, 36, 40, "--yes").code, accept(holed, 31, 35, "--yes").code) == (2, 0)


def test_without_an_incarnation_the_newest_is_meant_unless_an_older_one_has_a_hole_there(holed: Archive) -> None:
    holed.put(rows_of(1, 4, LATER), chain=LATER)
    holed.put(rows_of(15, 20, LATER), chain=LATER)
    refused, accepted = (accept(holed, *each, "--yes", is_exact=False) for each in ((8, 14), (5, 10)))

    assert refused.code == 2
    assert f"name one: {CHAIN} or {LATER}" in refused.err
    assert accepted.code == 0, accepted.err
    assert [gap.range for gap in holed.documents.gaps(LATER)] == [SequenceRange(5, 10)]
    assert holed.documents.gaps(CHAIN) == []


def test_a_missing_feed_is_an_error_that_lists_the_known_ones(holed: Archive) -> None:
    refused = accept(holed, 11, 20, "--yes", chain=Chain("us-esat", "NODES"))
    assert (refused.code, "did you mean us-east/NODES?" in refused.err) == (2, True)


# Segments behind the end of an incarnation


async def test_rows_behind_the_end_of_an_incarnation_are_named_and_carried_or_accepted(
    nats_url: str, client: FloeClient, tmp_path: Path
) -> None:
    archive = Archive(tmp_path / "bucket")
    archive.put(rows_of(1, 10))
    archive.begin(LATER, previous={0: 10})
    archive.put(rows_of(1, 5, LATER), chain=LATER)
    centre = Centre(tmp_path, archive, nats_url)
    async with centre.running():
        await closed_at(client, centre, 15)
        archive.put(rows_of(11, 20))
        archive.put(rows_of(31, 34))
    config = str(centre.write())

    async def status() -> dict[int, dict[str, object]]:
        return {row["incarnation"]: row for row in (await invoke("status", "-c", config, "--json")).json()}

    verify = ("segments", "verify", "-c", config)
    assert (await invoke(*verify, "us-east/NODES/1/0")).code == 0
    done = await invoke(*verify)
    assert done.code == 3
    assert "sequences 11..20, in 1 segment, are after the end of the incarnation, 10: no target" in done.err
    commands = [line for line in done.err.splitlines() if line.startswith("floe ")]
    old = (await status())[0]
    assert str(old["why"]).startswith("11..20, 31..34 after the end 10 of the incarnation: floe replay ")
    assert (old["lag_sequences"], old["phase"]) == (0, "done")
    carried, given_up = commands[::2], commands[1::2]
    for line in carried:
        await ran(*shlex.split(line)[1:])
    stream = "NODES_0000"
    assert [each.message.sequence for each in await arrived(client, stream)] == [*range(11, 21), *range(31, 35)]
    for line in given_up:
        await ran(*shlex.split(line)[1:], "--yes")
    assert ((await invoke(*verify)).code, (await status())[0]["why"]) == (0, "")
    await client.api(f"STREAM.DELETE.{stream}")


# Names of sites, feeds and incarnations on the command line, and in `sources`


ELSEWHERE = Chain("us-east", "OTHERS")


@pytest.mark.servers
async def test_decisions_are_about_the_newest_incarnation(client: FloeClient, centre: Centre) -> None:
    for chain in (CHAIN, LATER):
        centre.archive.put(rows_of(1, 5, chain), chain=chain)
    named = ["-c", str(centre.write()), "--target", centre.target]

    async def paused(chain: str) -> Any:
        return await floe("chain", "pause", *named, chain, "--json")

    async def moved(chain: str) -> Any:
        return await floe("checkpoint", "set", *named, chain, "--sequence", "3", "--dry-run", "--json")

    [shown] = (await paused("us-east/NODES")).json()
    assert (shown["site"], shown["incarnation"]) == ("us-east", 1)
    done = await paused("us-esat/NODES")
    assert (done.code, "did you mean us-east/NODES?" in done.err) == (2, True), done
    assert (await paused("us-east/NODES/0007")).code == 2
    assert [row["chain"] for row in (await paused("us-east/NODES/0001/0")).json()] == ["us-east/NODES/0001/0"]
    done = await paused("eu-west/NODES/0000/7")  # of `sources`, and nothing archived yet
    assert (done.code, done.err) == (0, "eu-west/NODES/0000/7: not archived yet; it is paused from the first segment\n")
    centre.archive.put(rows_of(1, 5, ELSEWHERE), chain=ELSEWHERE)
    done = await floe("chain", "pause", *named, str(ELSEWHERE))
    assert (done.code, done.out) == (2, "")
    assert f"{ELSEWHERE}: expected a chain that flows into {centre.target}, found another; " in done.err
    assert (await moved("us-esat/NODES")).code == 2

    bucket = await KeyValue(client, centre.state_bucket).ensure()
    store = StateStore(bucket, centre.target)
    await store.save(TargetState(Checkpoint(3, "t0", {CHAIN: 4}), None), 0)
    for done in (await paused("us-east/NODES"), await moved("us-east/NODES")):
        assert (done.code, "name one: us-east/NODES/0000 or us-east/NODES/0001" in done.err) == (2, True), done
    rows = (await paused("us-east/NODES/0000")).json()
    assert {Chain(r["site"], r["feed"], r["incarnation"]) for r in rows} >= {CHAIN, LATER}


@pytest.mark.servers
async def test_a_feed_of_sources_without_an_archive_is_logged_once_and_shown(
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
    [event] = [record.msg for record in caplog.records if "source_missing" in str(record.msg)]
    assert "did you mean us-east/NODES?" in str(event)


@pytest.mark.servers
async def test_a_view_makes_no_bucket_and_a_decision_makes_one(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(rows_of(1, 5))
    config = ["-c", str(centre.write())]

    for words in (["status"], ["checkpoint", "ls"], ["gap", "ls"], ["chain", "ls"], ["parked", "ls"]):
        done = await floe(*words, *config)
        assert done.code == 0, (words, done)
        assert await stream_info(client, f"KV_{centre.state_bucket}") is None, words
    named = ["--target", centre.target, "us-east/NODES"]
    assert (await floe("chain", "pause", *config, *named)).code == 0
    assert await stream_info(client, f"KV_{centre.state_bucket}") is not None
    assert [row["site"] for row in (await floe("chain", "ls", *config, "--json")).json()] == ["us-east"]
    for _ in range(2):  # also of a chain that is not paused, which is checked again
        assert f"{CHAIN}: resumed; " in (await floe("chain", "resume", *config, *named)).err
