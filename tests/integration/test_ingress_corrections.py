"""Every stop of a target ends in a command: pasted into the real CLI, it lets the service continue by itself."""

import asyncio
import time
from typing import Any

import pytest

from common.archive.documents import TargetPositions
from common.chain import Chain
from common.nats.client import FloeClient, frame
from common.nats.headers import Provenance, build_block
from common.observe.monitor import Health
from common.sequences import SequenceRange
from ingress import checkpoint as state_module
from ingress.checkpoint import Checkpoint, IntentPiece, TargetState, open_intent
from ingress.operator.correct import run_scan
from ingress.operator.corrections import ScannedChain, TargetScan
from ingress.parked import ParkedState, ParkedStore
from ingress.report import POSITIONS_INTERVAL_S
from ingress.rows.prepare import Oversize
from tests.support import ingress
from tests.support.basics import PATIENCE, soon
from tests.support.commands import Done, invoke, paste_checkpoint, ran
from tests.support.ingress import CHAIN, Centre, closed_at, foreign, holds, left_open, make, rows_of, service, store
from tests.support.segments import message

pytestmark = [pytest.mark.servers, pytest.mark.simulated, pytest.mark.usefixtures("checking_often")]
OTHER = Chain("eu-west", "NODES")
TARGET = {"create": None}


def numbers(*ranges: tuple[int, int]) -> list[int]:
    return [sequence for first, last in ranges for sequence in range(first, last + 1)]


async def carried(client: FloeClient, centre: Centre) -> TargetState:
    """Carry 1..30, and return the state once they are closed."""
    centre.archive.put(rows_of(1, 30))
    await make(client, centre)
    async with centre.running():
        return await closed_at(client, centre, 30)


async def corrected(centre: Centre, health: Health, code: str, wanted: str) -> tuple[dict[str, Any], Done]:
    """Wait for the stop, and paste the command of its hint."""
    stop = await ingress.stop_of(centre, health)
    assert stop["code"] == code, stop
    return stop, await paste_checkpoint(centre.write(), stop["hint"], wanted)


async def resumes(client: FloeClient, centre: Centre, code: str, wanted: str, rows: list[int]) -> tuple[Any, Done]:
    """Run until it stops, and on with the command of the hint, until the target holds these rows."""
    async with service(centre) as health:
        found = await corrected(centre, health, code, wanted)
        await holds(client, centre, rows)
    return found


async def set_by_hand(centre: Centre, *words: str) -> Done:
    return await invoke("checkpoint", "set", "-c", str(centre.write()), "--target", centre.target, *words)


# Foreign messages


async def test_a_foreign_message_behind_the_checkpoint_is_accepted(client: FloeClient, centre: Centre) -> None:
    await carried(client, centre)
    await foreign(client, centre)
    centre.archive.put(rows_of(31, 40))
    stop, done = await resumes(client, centre, "E-TARGET-SHARED", "--accept", numbers((1, 40)))
    assert "1 foreign message will stay" in done.out
    at = f"{time.gmtime().tm_year}-"
    assert f"message 31 has subject '{centre.target}.foreign', was stored at {at}" in stop["why"]
    assert stop["why"].endswith("without the header Floe-Source")


async def test_a_foreign_message_in_the_middle_of_an_intent_is_accepted(client: FloeClient, centre: Centre) -> None:
    await left_open(client, centre, centre.archive.put(rows_of(1, 30)), await make(client, centre))
    await store(client, centre, rows_of(1, 11))
    await foreign(client, centre)
    _, done = await resumes(client, centre, "E-TARGET-SHARED", "--accept", numbers((1, 30)))
    assert len(await ingress.arrived(client, centre.target)) == 31
    assert f"{CHAIN}: 11 messages found, 1 to 11" in done.out
    assert "the open intent is dropped" in done.out


async def test_a_foreign_message_in_a_work_queue_has_to_be_declared(client: FloeClient, centre: Centre) -> None:
    """Consumed messages cannot be read: the operator knows them from the consumer, or accepts repeats."""
    ref = centre.archive.put(rows_of(1, 30))
    await left_open(client, centre, ref, await make(client, centre, retention="workqueue"))
    await store(client, centre, rows_of(1, 11))
    consumer = ingress.Consumer(client, centre.target)
    await consumer.start()
    await soon(lambda: len(consumer.seen) == 11)
    await client.api(f"CONSUMER.DELETE.{centre.target}.C")
    await foreign(client, centre)
    async with service(centre) as health:
        hint = (await ingress.stop_of(centre, health))["hint"]
        with pytest.raises(AssertionError) as refused:
            await paste_checkpoint(centre.write(), hint, "--accept")
        assert "E-CORRECTION" in str(refused.value)
        assert f"{CHAIN} at its beginning or later" in str(refused.value)
        await paste_checkpoint(centre.write(), hint, "--accept", "--position", f"{CHAIN}=12")
        await holds(client, centre, numbers((12, 30)))


# A last sequence that was moved


@pytest.mark.parametrize(("rows", "found"), [(0, (1, 50)), (30, (31, 50))])
async def test_a_purge_beyond_is_decided(client: FloeClient, centre: Centre, rows: int, found: tuple[int, int]) -> None:
    """`nats stream purge --seq 31` with 10 of 50 rows stored, and a process without any memory of it."""
    await left_open(client, centre, centre.archive.put(rows_of(1, 50)), await make(client, centre, max_msgs=1000))
    await store(client, centre, rows_of(1, 10))
    await client.api(f"STREAM.PURGE.{centre.target}", {"seq": 31})
    async with service(centre) as health:
        stop, done = await corrected(centre, health, "E-TARGET-UNREAD", f"--stored {rows}")
        await holds(client, centre, numbers(found))
        await closed_at(client, centre, 80 - rows)
    assert "row 30 of the 50 of the open intent, is gone; known to be stored: 0" in stop["why"]
    assert f"the other {50 - rows} are sent after target sequence 30" in done.out


async def test_rows_that_were_never_sent_are_not_counted_by_their_sender(client: FloeClient, centre: Centre) -> None:
    """The same if the stream drops messages by itself, and when the sender checks again."""
    centre.having(create=None, publisher="single")
    centre.archive.put(rows_of(1, 2000))
    await make(client, centre, max_age=3600 * 10**9)
    async with service(centre) as health:
        await soon(lambda: ingress.count_in(client, centre.target))
        purged = (await client.api(f"STREAM.PURGE.{centre.target}", {"seq": 1901}))["purged"]
        stop = await ingress.stop_of(centre, health)
        await asyncio.sleep(1)  # checked again meanwhile
        assert await ingress.count_in(client, centre.target) == 0
        await corrected(centre, health, "E-TARGET-SHARED", f"--stored {purged}")
        await holds(client, centre, numbers((purged + 1, 2000)))
    # The purge may have come before the message that was under way.
    expected = [f"expected at most {handed}, found 1900" for handed in (purged, purged + 1)]
    assert any(each in stop["why"] for each in expected), stop["why"]


# The target


@pytest.mark.parametrize("how", ["empty", "purged", "with messages"])
async def test_a_target_that_was_made_again(client: FloeClient, centre: Centre, how: str) -> None:
    await carried(client, centre)
    await client.api(f"STREAM.DELETE.{centre.target}")
    await make(client, centre)
    if how != "empty":
        await store(client, centre, rows_of(1, 20))
    async with service(centre) as health:
        stop = await ingress.stop_of(centre, health)
        if how == "purged":
            await client.api(f"STREAM.PURGE.{centre.target}")
            assert (await set_by_hand(centre, "--forget", "--yes")).code == 0
        else:
            await corrected(centre, health, "E-TARGET-RECREATED", "--forget" if how == "empty" else "--from-target")
        await holds(client, centre, numbers((1, 30)))
    assert stop["code"] == "E-TARGET-RECREATED"


@pytest.mark.parametrize(("wanted", "found"), [("--from-target", [(1, 40)]), ("--accept", [(1, 25), (31, 40)])])
async def test_a_target_restored_from_an_old_copy(client: FloeClient, centre: Centre, wanted: str, found: Any) -> None:
    """The copy ends at 25; a stream that is restored keeps its creation time."""
    centre.archive.put(rows_of(1, 30))
    created = await make(client, centre)
    await store(client, centre, rows_of(1, 25))
    await (await centre.state(client)).save(TargetState(Checkpoint(30, created, {CHAIN: 31})), 0)
    centre.archive.put(rows_of(31, 40))
    await resumes(client, centre, "E-TARGET-BEHIND", wanted, numbers(*found))


@pytest.mark.parametrize("way", ["--from-target", "--forget"])
async def test_a_server_filled_from_the_archive_is_this_centre(client: FloeClient, centre: Centre, way: str) -> None:
    centre.archive.put(rows_of(1, 30))
    await make(client, centre)
    async with centre.running():
        await closed_at(client, centre, 30)
        await asyncio.sleep(POSITIONS_INTERVAL_S + 5)
    for each in (centre.target, f"KV_{centre.state_bucket}"):
        await client.api(f"STREAM.DELETE.{each}")
    await make(client, centre)
    async with service(centre) as health:
        stop = await ingress.stop_of(centre, health)
        assert (stop["code"], "--from-target" in stop["hint"]) == ("E-TARGET-TWICE", True)
        assert "expected the positions of this centre in the bucket, found those that another centre" in stop["why"]
        assert (await set_by_hand(centre, way, "--yes")).err.startswith("done")
        await holds(client, centre, numbers((1, 30)))


# The state


@pytest.mark.parametrize("fault", ["lost", "unreadable", "removed under way"])
async def test_a_state_that_is_lost_is_found_in_the_target(client: FloeClient, centre: Centre, fault: str) -> None:
    await carried(client, centre)
    subject = f"$KV.{centre.state_bucket}.ingress.{centre.target}".encode()
    if fault == "lost":
        await client.api(f"STREAM.DELETE.KV_{centre.state_bucket}")
    elif fault == "unreadable":
        await client.request_raw(subject, b'{"version":99}', timeout=PATIENCE)
    async with service(centre) as health:
        if fault == "removed under way":
            await soon(lambda: centre.status(health).get("state") == "carrying")
            await client.request_raw(subject, b"", b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n", timeout=PATIENCE)
        centre.archive.put(rows_of(31, 40))
        code = "E-STATE-KV" if fault == "unreadable" else "E-TARGET-NOT-EMPTY"
        await corrected(centre, health, code, "--from-target")
        await holds(client, centre, numbers((1, 40)))


@pytest.mark.parametrize("opened", [False, True])
async def test_a_state_that_was_rolled_back(client: FloeClient, centre: Centre, opened: bool) -> None:
    old = await left_open(client, centre, centre.archive.put(rows_of(1, 10)), await make(client, centre))
    async with centre.running():
        old = old if opened else await closed_at(client, centre, 10)
        centre.archive.put(rows_of(11, 30))
        await closed_at(client, centre, 30)
    await ingress.put_back(client, centre, old)
    centre.archive.put(rows_of(31, 40))
    stop, done = await resumes(client, centre, "E-TARGET-SHARED", "--from-target", numbers((1, 40)))
    assert "if the state bucket is an old copy" in stop["hint"]
    assert f"{CHAIN}: 30 messages found, 1 to 30" in done.out


async def test_an_outgrown_state_is_cut(client: FloeClient, centre: Centre, monkeypatch: pytest.MonkeyPatch) -> None:
    state = await carried(client, centre)
    positions = {Chain(f"gone{number}", "NODES"): 7 for number in range(100)}
    await ingress.change(client, centre, positions={**state.checkpoint.positions, **positions})
    monkeypatch.setattr(state_module, "MAX_STATE_BYTES", 2000)
    centre.archive.put(rows_of(31, 40))
    await resumes(client, centre, "E-STATE-SIZE", "--forget-unlisted", numbers((1, 40)))


# The intent


async def test_rows_of_an_open_intent_that_are_gone_for_good(client: FloeClient, centre: Centre) -> None:
    """The rest of the intent is dropped; then the chain waits at the hole, and the others continue."""
    ref = centre.archive.put(rows_of(1, 30))
    await left_open(client, centre, ref, await make(client, centre))
    await store(client, centre, rows_of(1, 11))
    centre.archive.objects.delete(ref.key)
    centre.archive.put(rows_of(31, 40))
    centre.archive.put(rows_of(1, 5, OTHER), chain=OTHER)
    async with service(centre) as health:
        await corrected(centre, health, "E-INTENT", "--accept")
        await centre.carried(client, 16)
        done = await set_by_hand(centre, *[f"{CHAIN.site}/{CHAIN.feed}"], "--sequence", "31", "--yes")
        assert done.code == 0, done
        await holds(client, centre, numbers((1, 11), (31, 40)))
    assert f"{CHAIN}: 12 to 30 are no longer delivered" in done.out


async def test_an_intent_of_a_chain_that_is_listed_no_more(client: FloeClient, centre: Centre) -> None:
    """Another configuration, another allow-list, the same target: the state knows the rows of the target."""
    ref = centre.archive.put(rows_of(1, 30))
    other = [{"site": "eu-west", "feed": "NODES", "subject_prefix": centre.target}]
    narrow = Centre(centre.folder, centre.archive, centre.url, create=None, stream=centre.target, sources=other)
    narrow.lease_bucket, narrow.state_bucket = centre.lease_bucket, centre.state_bucket
    await left_open(client, centre, ref, await make(client, centre))
    await store(client, centre, rows_of(1, 11))
    centre.archive.put(rows_of(1, 5, OTHER), chain=OTHER)
    error = await narrow.ending()
    assert error.code == "E-SOURCES"
    await paste_checkpoint(narrow.write(), error.hint, "--accept")
    async with service(narrow):
        await centre.carried(client, 16)
    async with service(centre):
        await holds(client, centre, numbers((1, 30)))


# The command


async def has_all(client: FloeClient, centre: Centre, wanted: int) -> bool:
    return await ingress.count_in(client, centre.target) == wanted


async def test_a_large_target_is_counted_whole(client: FloeClient, centre: Centre) -> None:
    """Several pulls, another chain, foreign messages, and deleted sequences."""
    line = [Provenance(CHAIN.site, CHAIN.feed, 0, 0, sequence, 1).line() for sequence in range(1, 12_001)]
    await make(client, centre)
    for block in [*map(build_block, ([each] for each in line)), None, None]:
        client.send(frame(f"{centre.target}.a".encode(), b"x" * 100, block))
    await soon(lambda: has_all(client, centre, 12_002))
    await client.api(f"STREAM.MSG.DELETE.{centre.target}", {"seq": 7_000})
    scan = await run_scan(client, centre.target, "limits", TargetScan(0, 12_002))
    part = await run_scan(client, centre.target, "limits", TargetScan(11_000, 11_990))
    slow = await run_scan(client, centre.target, "workqueue", TargetScan(11_990, 12_002))

    assert (scan.found, scan.foreign, scan.gone, scan.gone_after(CHAIN)) == (12_001, 2, 1, 0)
    assert scan.chains == {CHAIN: ScannedChain(1, 12_000, 11_999, 12_000, 11_999)}
    assert part.chains == {CHAIN: ScannedChain(11_001, 11_990, 990, 11_990, 990)}
    assert slow.chains == {CHAIN: ScannedChain(11_991, 12_000, 10, 12_000, 10)}


@pytest.mark.real
async def test_a_target_without_its_last_messages_is_counted_to_its_end(client: FloeClient, centre: Centre) -> None:
    await make(client, centre)
    for _ in range(5):
        await foreign(client, centre)
    for verb, request, expected in (("MSG.DELETE", {"seq": 5}, (4, 1)), ("PURGE", {}, (0, 5))):
        await client.api(f"STREAM.{verb}.{centre.target}", request)
        scan = await run_scan(client, centre.target, "limits", TargetScan(0, 5))
        assert (scan.found, scan.gone) == expected, verb


async def test_a_chain_is_moved_while_ingress_carries(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(rows_of(1, 30))
    await make(client, centre)
    words = ["us-east/NODES", "--sequence"]
    async with service(centre):
        await closed_at(client, centre, 30)
        asked = await set_by_hand(centre, *words, "21")
        done = await set_by_hand(centre, *words, "21", "--yes", "--json")
        await holds(client, centre, numbers((1, 30), (21, 30)))
        again = await set_by_hand(centre, *words, "31", "--yes")

    assert (asked.code, "expected --yes without a terminal" in asked.err) == (2, True)
    assert f"{CHAIN}: 21 to 30 are delivered again" in asked.out
    assert done.json()["changed"] is True
    assert [each["positions"][0]["position"] for each in (done.json()["before"], done.json()["after"])] == [31, 21]
    assert "nothing was changed" in again.err


async def test_nothing_moving_is_corrected(client: FloeClient, centre: Centre, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingress.operator.correct.STILL_INTERVAL_S", 1.0)
    before = await carried(client, centre)

    async def write_on() -> None:
        while True:
            await foreign(client, centre)

    writing = asyncio.create_task(write_on())
    refused = await set_by_hand(centre, "--accept", "--yes")
    writing.cancel()
    assert (await (await centre.state(client)).load()).state == before
    done = await set_by_hand(centre, "--accept", "--yes")

    assert (refused.code, "E-TARGET-SHARED" in refused.err, done.code) == (4, True, 0)


async def test_refusals_of_the_command(client: FloeClient, centre: Centre) -> None:
    await carried(client, centre)
    position = f"--position {CHAIN}=3 --forget"
    for words in ("", "--accept --forget", "us-east --sequence 3", position, "--accept-repeats --forget"):
        assert (await set_by_hand(centre, *words.split())).code == 2, words
    other = await set_by_hand(centre, "--target", "OTHER", "--accept")
    full = await set_by_hand(centre, "--forget", "--yes")

    assert (other.code, f"expected one of {centre.target}, found OTHER" in other.err, full.code) == (2, True, 1)
    assert "E-CORRECTION" in full.err
    assert "expected an empty target, found 30 messages" in full.err


# Parked messages


def parked_words(centre: Centre, *more: str) -> list[str]:
    of_chain = ["--target", centre.target, f"{CHAIN.site}/{CHAIN.feed}"]
    return ["parked", "retry", "-c", str(centre.write()), *of_chain, *more]


@pytest.mark.real
@pytest.mark.parametrize("wanted", ["--accept", "--from-target"])
async def test_rows_a_dropped_intent_left_out_arrive(client: FloeClient, centre: Centre, wanted: str) -> None:
    """Message 5 is parked, the intent passes it and is dropped; 3 was tried again and is in the target."""
    centre.having(create=None, on_oversize="park")
    ref, rows = centre.archive.put(rows_of(1, 10)), rows_of(1, 10)
    created = await make(client, centre)
    parked = ParkedStore(centre.archive.objects, centre.archive.documents.layout, centre.target, created)
    for row in (rows[2], rows[4]):
        parked.park(CHAIN, Oversize(row, "the message needs 30 bytes, the target takes 10"))
    parked.mark_left_out(parked.name(CHAIN, 3))
    parked.request_retry(parked.list_entries()[parked.name(CHAIN, 3)])
    await store(client, centre, [rows[0], rows[1], rows[2], rows[3], rows[5], rows[6]])
    again = IntentPiece(ref.segment, SequenceRange(3, 3), 1, is_retry=True)
    rest = IntentPiece(ref.segment, SequenceRange(4, 10), 6, parked=(5,))
    opened = open_intent(TargetState(Checkpoint(2, created, {CHAIN: 4})), [again, rest])
    await (await centre.state(client)).save(opened, 0)
    centre.archive.objects.delete(ref.key)
    assert (await set_by_hand(centre, wanted, "--yes")).code == 0
    states = {name.sequence: entry.state for name, entry in parked.list_entries().items()}
    assert states == {3: ParkedState.DELIVERED, 5: ParkedState.PARKED}

    await ran(*parked_words(centre, "--all", "--yes"))
    async with service(centre):
        await holds(client, centre, [1, 2, 3, 4, 6, 7, 5])


async def test_rows_parked_before_a_purge_are_not_delivered_twice(client: FloeClient, centre: Centre) -> None:
    """Also if the server reports another creation time than the stored one."""
    centre.having(create=None, on_oversize="park")
    centre.archive.put([*rows_of(1, 4), message(5, b"L" * 2000, subject=b"nodes.1"), *rows_of(6, 10)])
    await make(client, centre, max_msg_size=1000)
    async with centre.running():
        await closed_at(client, centre, 9)
    await client.api(f"STREAM.PURGE.{centre.target}")
    await ingress.update(client, centre, max_msg_size=100_000)
    documents, sources = centre.archive.documents, ("us-east/NODES",)
    documents.write_positions(TargetPositions(centre.target, 1.0, {CHAIN: 11}, sources, stopped={CHAIN: "E-LOST"}))
    assert (await set_by_hand(centre, "--forget", "--yes")).code == 0
    assert documents.read_positions(centre.target) == TargetPositions(centre.target, 1.0, {}, sources)
    async with service(centre):
        await holds(client, centre, numbers((1, 10)))
        await closed_at(client, centre, 19)
        retried = await invoke(*parked_words(centre, "--all", "--yes", "--json"))
        one = await invoke(*parked_words(centre, "--sequence", "5", "--yes"))
    assert (retried.code, retried.json()) == (0, [])
    assert (one.code, "E-PARKED" in one.err, "floe parked ls -c " in one.err) == (3, True, True)
