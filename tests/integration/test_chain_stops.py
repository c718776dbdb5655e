"""Stops of a single chain: run as printed, the command of the hint lets the service continue without a restart, and the
other chains never wait.
"""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.archive.segment import Ledger, Reason
from common.chain import Chain
from common.nats.api import create_stream
from common.nats.client import FloeClient
from common.nats.kv import KeyValue, state_key
from common.observe.monitor import Health
from common.sequences import SequenceRange
from ingress import metrics
from tests.support import ingress as ingress_world
from tests.support.basics import counted, soon
from tests.support.commands import floe
from tests.support.ingress import CHAIN, OTHER, Archive, Centre, check_exact, rows_of, update
from tests.support.segments import message

pytestmark = [pytest.mark.servers, pytest.mark.simulated]

LATER = CHAIN.next_incarnation()


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 5, OTHER), chain=OTHER)
    return archive


def source_having(centre: Centre, **keys: Any) -> None:
    """Give the one source of the centre these keys."""
    centre.target_settings["sources"][0] |= keys


def chain_status(health: Health, centre: Centre, chain: Chain = CHAIN) -> dict[str, Any]:
    return dict(centre.status(health).get("chains", {}).get(str(chain), {}))


async def stopped(health: Health, centre: Centre, code: str, chain: Chain = CHAIN) -> dict[str, Any]:
    """Wait until the chain has stopped with `code`, and return its /status; the target stays ready."""
    await soon(lambda: chain_status(health, centre, chain).get("code") == code and not health.problems())
    return chain_status(health, centre, chain)


async def paste(centre: Centre, hint: str, wanted: str) -> None:
    """Run the command of the hint that begins with `floe {wanted}`, with a file of the centre's configuration (only
    commands read it).
    """
    found = re.search(rf"floe ({wanted} -c) \S+ ([^;,()\n]*)", hint)
    assert found, hint
    asked = ["--yes"] if wanted != "chain resume" else []
    done = await floe(*found[1].split(), str(centre.write()), *shlex.split(found[2]), *asked)
    assert done.code == 0, done


async def test_a_subject_that_the_target_refuses_resumes_once_the_target_accepts_it(
    client: FloeClient, centre: Centre, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress_world, "QUICK", replace(ingress_world.QUICK, chain_recheck_s=600.0))
    archive.put([message(1), message(2, subject=b"elsewhere"), message(3)])
    centre.having(create=None)
    await create_stream(client, {"name": centre.target, "subjects": [f"{centre.target}.nodes.*"], "allow_atomic": True})
    async with centre.running() as health:
        hint = (await stopped(health, centre, "E-SUBJECT"))["hint"]
        assert len(await centre.carried(client, 6)) == 6
        await update(client, centre, subjects=[f"{centre.target}.>"])
        await paste(centre, hint, "chain resume")

        check_exact(await centre.carried(client, 8), archive, centre.prefix)
        await soon(lambda: "stopped" not in chain_status(health, centre))


async def test_a_chain_resumes_at_a_raised_limit(client: FloeClient, centre: Centre, archive: Archive) -> None:
    archive.put([message(1), message(2, b"x" * 5000), message(3)])
    centre.having(create=None)
    config = {"subjects": [f"{centre.target}.>"], "allow_atomic": True, "max_msg_size": 4000}
    await create_stream(client, {"name": centre.target, **config})
    async with centre.running() as health:
        await stopped(health, centre, "E-MSG-TOO-LARGE")
        await update(client, centre, max_msg_size=-1)

        check_exact(await centre.carried(client, 8), archive, centre.prefix)


async def test_a_row_that_nobody_wants_is_stepped_over(client: FloeClient, centre: Centre, archive: Archive) -> None:
    archive.put([message(1), message(2, subject=b"a b"), message(3)])
    archive.rows[CHAIN].pop(1)
    async with centre.running() as health:
        await paste(centre, (await stopped(health, centre, "E-SUBJECT"))["hint"], "checkpoint set")

        check_exact(await centre.carried(client, 7), archive, centre.prefix)


async def check_shown(centre: Centre) -> None:
    """Check the output of the commands on chains that are at 13..17, in a hole that was filled in part."""
    listed = await floe("gap", "ls", "-c", str(centre.write()), "--json")

    def stops() -> int:
        found = centre.archive.documents.read_positions(centre.target)
        return 0 if found is None else len(found.stopped)

    await soon(lambda: stops() == 2)
    standings = await floe("status", "-c", str(centre.write()), "--json")
    holes = [(row["site"], row["first"], row["last"], row["kind"]) for row in json.loads(listed.out)]
    assert holes == [(chain.site, 13, 17, "gone") for chain in (OTHER, CHAIN)], listed
    rows = json.loads(standings.out)
    assert (standings.code, [row["phase"] for row in rows]) == (3, ["stopped"] * 2), standings
    assert all("2 of them were gone from the source by then" in row["why"] for row in rows), rows


async def test_rows_gone_from_a_filled_hole_stop_it(client: FloeClient, centre: Centre, archive: Archive) -> None:
    """The segment 11..20 was lost and archived again, when the source no longer held 13 and 17."""
    lost = {chain: [m for m in rows_of(11, 20, chain) if m.sequence in (13, 17)] for chain in (CHAIN, OTHER)}
    for chain in (CHAIN, OTHER):
        archive.put(rows_of(1 if chain == CHAIN else 6, 10, chain), chain=chain)
        left = [m for m in rows_of(11, 20, chain) if m not in lost[chain]]
        gone = {"ledger": Ledger({Reason.GONE_FROM_HOLE: 2}), "unread": SequenceRange(13, 17)}
        archive.put(left, SequenceRange(11, 20), chain=chain, **gone)
        archive.put(rows_of(21, 30, chain), chain=chain)
    source_having(centre, lost_segment_timeout="1s")
    async with centre.running() as health:
        for chain in (CHAIN, OTHER):
            found = await stopped(health, centre, "E-LOST", chain)
            assert (found["phase"], found["hole"]) == ("lost", "13..17")
        await check_shown(centre)
        assert len(await centre.carried(client, 2 * 12)) == 2 * 12
        await paste(centre, chain_status(health, centre)["hint"], "gap accept")
        await centre.carried(client, 12 + 28)

        # The lost segment is put back: no gap has to be accepted.
        archive.put(rows_of(11, 20, OTHER), chain=OTHER)
        archive.rows[OTHER] = rows_of(1, 30, OTHER)
        check_exact(await centre.carried(client, 30 + 28), archive, centre.prefix)
        await soon(lambda: all("stopped" not in chain_status(health, centre, chain) for chain in (CHAIN, OTHER)))
        assert counted(metrics.lost_sequences.labels(centre.target)) == 2
    hole = f"{OTHER.site}/{OTHER.feed} --first 13 --last 17 --yes"
    verdict = await floe("gap", "accept", "-c", str(centre.write()), *hole.split())
    assert (verdict.code, "expected no segment there" in verdict.err) == (2, True), verdict


async def test_a_late_segment_is_not_masked(client: FloeClient, centre: Centre, archive: Archive) -> None:
    """Twin A was paused with 1..100; the source dropped 1..50; B covers 1..120; then A's put is stored."""
    early = {"ledger": Ledger({Reason.GONE_BEFORE_READ: 50}), "unread": SequenceRange(1, 50)}
    archive.put(rows_of(51, 120), SequenceRange(1, 120), **early)
    archive.put(rows_of(1, 100))
    archive.rows[CHAIN] = rows_of(1, 120)
    async with centre.running():
        check_exact(await centre.carried(client, 125), archive, centre.prefix)


@pytest.mark.real
async def test_a_lost_range_is_accepted_and_its_late_rows_are_counted_and_not_carried(
    client: FloeClient, centre: Centre, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingress.discovery.discovery.SEARCH_INTERVAL_S", 1.0)
    archive.put(rows_of(1, 10))
    archive.put(rows_of(21, 30))
    source_having(centre, lost_segment_timeout="1s")
    async with centre.running() as health:
        found = await stopped(health, centre, "E-LOST")
        assert (found["phase"], found["hole"], len(await centre.carried(client, 15))) == ("lost", "11..20", 15)
        listed = (await floe("gap", "ls", "-c", str(centre.write()), "--json")).json()
        assert [(g["first"], g["last"], g["behind"], g["accepted"]) for g in listed] == [(11, 20, "21..30", "no")]
        # Accepting the gap comes last, on a line of its own, and asks.
        remedies = r"the source may .*; start it if it is down, .* put the segment back; .*\nfloe gap accept [^\n]*$"
        assert re.match(remedies, found["hint"])
        assert "--yes" not in found["hint"]
        await paste(centre, found["hint"], "gap accept")
        check_exact(await centre.carried(client, 25), archive, centre.prefix)

        late = archive.put(rows_of(15, 18), tail=False)
        del archive.rows[CHAIN][-4:]
        await soon(lambda: counted(metrics.behind_gaps.labels(centre.target)) >= 1)
        check_exact(await centre.carried(client, 25), archive, centre.prefix)
        assert archive.store.is_intact(late)
    [passed] = archive.documents.skipped_gaps(centre.target, CHAIN)
    assert passed.range == SequenceRange(11, 20)


async def test_skipping_binds_no_other_target(client: FloeClient, centre: Centre, archive: Archive) -> None:
    archive.put(rows_of(1, 10))
    archive.put(rows_of(21, 30))
    source_having(centre, lost_segment_timeout="1s", on_lost="skip")
    waits = Centre(centre.folder, archive, centre.url)
    async with centre.running():
        check_exact(await centre.carried(client, 25), archive, centre.prefix)
    async with waits.running() as health:
        await soon(lambda: chain_status(health, waits).get("phase") == "late")
        assert len(await waits.carried(client, 15)) == 15
        await paste(waits, chain_status(health, waits)["hint"], "gap accept")
        check_exact(await waits.carried(client, 25), archive, waits.prefix)
    assert [g.range.first for g in archive.documents.skipped_gaps(centre.target, CHAIN)] == [11]


async def test_damage_that_nothing_covers_is_accepted(client: FloeClient, centre: Centre, archive: Archive) -> None:
    bad = archive.put(rows_of(1, 10))
    archive.put(rows_of(11, 20))
    path = archive.folder / bad.key
    path.write_bytes(path.read_bytes()[:-100] + b"\0" * 100)
    del archive.rows[CHAIN][:10]
    source_having(centre, lost_segment_timeout="1s", on_lost="skip")
    async with centre.running() as health:
        await soon(lambda: chain_status(health, centre).get("phase") == "damaged")
        hint = chain_status(health, centre)["hint"]
        [away] = [line for line in hint.splitlines() if line.startswith("floe segments quarantine ")]
        assert away.endswith(f"{bad.key} --yes")
        await paste(centre, hint, "gap accept")

        check_exact(await centre.carried(client, 15), archive, centre.prefix)


async def test_a_new_incarnation_waits_for_a_decision(client: FloeClient, centre: Centre, archive: Archive) -> None:
    archive.begin(LATER, previous={0: 10})
    archive.put(rows_of(1, 5, LATER), chain=LATER)
    centre.having(on_new_incarnation="halt")
    async with centre.running() as health:
        await soon(lambda: "is at 1 and ends at 10" in str(chain_status(health, centre, LATER).get("waits_for")))
        archive.put(rows_of(1, 10))
        hint = (await stopped(health, centre, "E-INCARNATION", LATER))["hint"]
        assert len(await centre.carried(client, 15)) == 15
        await paste(centre, hint, "checkpoint set")

        messages = await centre.carried(client, 20)
        check_exact(messages, archive, centre.prefix)
        assert [m.chain for m in messages[-5:]] == [LATER] * 5


async def test_a_paused_chain_stays_so_until_resumed(client: FloeClient, centre: Centre, archive: Archive) -> None:
    archive.put(rows_of(1, 10))
    named = ["-c", str(centre.write()), "--target", centre.target, "us-east/NODES"]
    async with centre.running() as health:
        await centre.carried(client, 15)
        assert (await floe("chain", "pause", *named, "--note", "bad data")).code == 0
        await soon(lambda: chain_status(health, centre).get("paused"))
        archive.put(rows_of(11, 20))
        archive.put(rows_of(6, 10, OTHER), chain=OTHER)
        assert len(await centre.carried(client, 20)) == 20
    async with centre.running() as health:
        await soon(lambda: chain_status(health, centre).get("paused"))
        archive.put(rows_of(11, 15, OTHER), chain=OTHER)
        assert len(await centre.carried(client, 25)) == 25
        [shown] = (await floe("chain", "ls", "-c", str(centre.write()), "--json")).json()
        assert (shown["site"], shown["note"]) == ("us-east", "bad data")
        assert (await floe("chain", "resume", *named)).code == 0

        check_exact(await centre.carried(client, 35), archive, centre.prefix)
        await soon(lambda: "paused" not in chain_status(health, centre))


async def test_unreadable_pauses_stop_the_target(client: FloeClient, centre: Centre, archive: Archive) -> None:
    named = ["-c", str(centre.write()), "--target", centre.target]
    bucket = await KeyValue(client, centre.state_bucket).ensure()
    await bucket.put(state_key("pauses", centre.target), b'{"version":2}')
    async with centre.running() as health:
        await soon(lambda: centre.status(health).get("code") == "E-PAUSES")
        assert centre.status(health)["hint"].endswith(f"--target {centre.target} --all")
        assert (await floe("chain", "pause", *named, "us-east/NODES")).code == 1
        assert (await floe("chain", "resume", *named, "--all")).code == 2  # there is nobody to ask
        assert (await floe("chain", "resume", *named, "--all", "--yes")).code == 0

        check_exact(await centre.carried(client, 5), archive, centre.prefix)
