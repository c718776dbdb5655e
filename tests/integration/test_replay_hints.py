"""Every stop of a replay ends in a command: pasted into the real CLI, it continues."""

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from common.archive.documents import ChainDocument, StreamDocument
from common.archive.segment import Ledger, Reason
from common.nats.api import create_stream, stream_info
from common.nats.kv import KeyValue
from common.sequences import SequenceRange
from common.service import process
from common.tasks import Stop
from ingress.recovery.request import Pace, ReplayOptions
from ingress.recovery.target import receipt_key
from tests.support.basics import PATIENCE, soon
from tests.support.commands import Done, invoke, ran
from tests.support.ingress import CHAIN, count_in, rows_of
from tests.support.replay import World

pytestmark = [pytest.mark.servers, pytest.mark.simulated]
ROWS = 900
# Refusals before anything is written.
OF_REPLAY = ("E-REPLAY-HOLE", "E-REPLAY-LOSSY", "E-REPLAY-SOURCE", "E-REPLAY-OTHER")
PLANNED = ("E-TARGET-NOT-EMPTY", "E-TARGET-MISSING", "E-STATE-KV", *OF_REPLAY)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands on loops of other threads, which cannot catch signals."""

    @asynccontextmanager
    async def unstopped() -> AsyncIterator[Stop]:
        yield Stop()

    monkeypatch.setattr(process, "stop_on_signals", unstopped)


# Commands


async def replay(world: World, *more: str, **asked: Any) -> Done:
    """Run the command as an operator types it."""
    words = shlex.split(world.replay(**asked).request.arguments())
    return await invoke("replay", "-c", str(world.centre.write()), *words, *more)


async def stopped(world: World, code: str, *more: str, exit_code: int = 1, **asked: Any) -> str:
    planned = await replay(world, *more, "--dry-run", **asked) if code in PLANNED else None
    done = await replay(world, *more, **asked)
    assert (done.code, f"error[{code}]" in done.err) == (exit_code, True), done
    if planned is not None:  # a dry run approves exactly the commands that run
        errors = [re.sub(r"-c \S+", "", text[text.index("error[") :]) for text in (planned.err, done.err)]
        assert (planned.code, errors[0]) == (exit_code, errors[1])
    return done.err


def command(text: str, *wanted: str) -> list[str]:
    """The arguments of the first `floe` command of a hint that has all of `wanted` in it."""
    found = re.findall(r"floe ((?:replay|gap accept) [^;()\n]*?)(?= &&|;|\)|\n|$)", text)
    return shlex.split(next(each for each in found if all(word in each for word in wanted)))


async def paste(text: str, *wanted: str) -> None:
    asked = ["--yes"] if "gap accept" in wanted else []
    await ran(*command(text, *wanted), *asked)


# States of the world


async def half_way(world: World, **asked: Any) -> None:
    """A replay of ROWS messages, stopped within its intent."""
    await world.make((1, ROWS))
    work, stop = world.replay(ReplayOptions(pace=Pace(400)), **asked), Stop()

    async with work.open_connection() as client:
        running = asyncio.create_task(work.run(client, stop))
        await soon(lambda: count_in(world.client, world.target), every=0.01)
        stop.set()
        assert not (await running).finished


async def foreign(world: World) -> None:
    await world.client.request_raw(f"{world.target}.x".encode(), b"theirs", None, timeout=PATIENCE)


async def purge(world: World, text: str) -> None:
    """Do the `nats stream purge` of the hint."""
    assert f"nats stream purge {world.target} --force" in text
    await world.client.api(f"STREAM.PURGE.{world.target}")


async def update(world: World, **config: Any) -> None:
    info = await stream_info(world.client, world.target)
    await world.client.api(f"STREAM.UPDATE.{world.target}", {**info.config, **config})


async def not_empty(world: World) -> None:
    await world.make((1, ROWS))
    await foreign(world)
    text = await stopped(world, "E-TARGET-NOT-EMPTY", "--rate", "90000/s")
    assert "--rate=90000/s --append" in text
    await paste(text, "--append")
    await world.client.api(f"STREAM.PURGE.{world.target}", {"keep": ROWS})


async def hole_given_up_or_skipped(world: World) -> None:
    await world.make((1, 800), (811, 820), (831, ROWS))
    await paste(await stopped(world, "E-REPLAY-HOLE"), "gap accept", "--first 801")
    text = await stopped(world, "E-REPLAY-HOLE")
    assert "801..810" not in text
    await paste(text, "--skip-holes")


async def shared(world: World) -> None:
    await half_way(world)
    await foreign(world)
    text = await stopped(world, "E-TARGET-SHARED")
    await purge(world, text)
    await paste(text, "--again")


async def gone(world: World) -> None:
    await half_way(world)
    await world.client.api(f"STREAM.DELETE.{world.target}")
    await paste(await stopped(world, "E-TARGET-GONE"), "--again", "--create")


async def subjects_taken(world: World) -> None:
    """Another stream has them: a `nats stream add` of the target would be refused too."""
    begin_at_source(world)
    other = {"name": f"{world.target}_OTHER", "subjects": [f"{world.target}.>"], "storage": "memory"}
    await create_stream(world.client, other)
    text = await stopped(world, "E-TARGET", "--create", exit_code=78, prefix="")
    assert "nats stream add" not in text
    await paste(text, "--create", "--subject-prefix")


async def source_named(world: World) -> None:
    begin_at_source(world)
    text = await stopped(world, "E-REPLAY-SOURCE", "--create", exit_code=78, target="ELSE", prefix="", into_source=True)
    await paste(text, f"--target {world.target}", "--into-source", "--create")


async def source_left_out(world: World) -> None:
    begin_at_source(world)
    await world.make()
    world.archive.documents.create_stream(CHAIN.next_incarnation(), StreamDocument({"name": "ELSE"}, "t0", None))
    world.archive.begin(CHAIN.next_incarnation())
    text = await stopped(world, "E-REPLAY-SOURCE", exit_code=78, prefix="", into_source=True)
    assert "into-source" not in " ".join(command(text, f"--target {world.target}"))
    await paste(text, f"--target {world.target}")


def begin_at_source(world: World) -> None:
    """Make the archived stream itself the target."""
    document = StreamDocument({"name": world.target, "subjects": [f"{world.target}.>"]}, "t0", None)
    world.archive.documents.create_stream(CHAIN, document)
    world.archive.documents.create_chain(CHAIN, ChainDocument((), 1, 1))
    world.archive.put([replace(m, subject=f"{world.target}.a".encode()) for m in rows_of(1, ROWS)])


async def other_finished(world: World) -> None:
    await half_way(world)
    await paste(await stopped(world, "E-REPLAY-OTHER", from_sequence=5), "replay")


async def other_dropped(world: World) -> None:
    await half_way(world, to_sequence=ROWS - 1)
    text = await stopped(world, "E-REPLAY-OTHER")
    await purge(world, text)
    await paste(text, "--again")


async def state_spoiled(world: World) -> None:
    await half_way(world)
    bucket = KeyValue(world.client, world.centre.state_bucket, ttl=None, replicas=1)
    entry = await bucket.get(receipt_key(world.target))
    await bucket.update(receipt_key(world.target), b'{"version":99}', entry.revision)
    text = await stopped(world, "E-STATE-KV")
    dry = await replay(world, "--dry-run")
    assert (dry.code, "cannot be read" in dry.out) == (1, True)
    await purge(world, text)
    await paste(text, "--again")


async def rows_lost(world: World) -> None:
    """The open intent names more rows than its segment still has."""
    await half_way(world)
    (ref,) = world.archive.store.list(CHAIN)
    world.archive.store.delete(ref)
    rows = rows_of(1, ROWS)
    world.archive.put(rows[: ROWS // 2], SequenceRange(1, ROWS), ledger=Ledger({Reason.DELETED: ROWS // 2}))
    text = await stopped(world, "E-INTENT")
    assert "--forget" not in text
    await purge(world, text)
    await paste(text, "--again")
    assert await world.sequences() == list(range(1, ROWS // 2 + 1))
    # The rest, so that all is there in the end.
    world.archive.put(rows, level=1)
    await paste(await stopped(world, "E-TARGET-NOT-EMPTY", from_sequence=ROWS // 2 + 1), "--append")


async def subject_widened(world: World) -> None:
    await world.make((1, ROWS), subjects=[f"{world.target}.nodes.1"])
    text = await stopped(world, "E-SUBJECT")
    await update(world, subjects=[f"{world.target}.>"])
    await paste(text, f"--target {world.target} ")


async def message_too_large(world: World) -> None:
    world.archive.put([*rows_of(1, ROWS - 1), *rows_of(ROWS, ROWS, size=5000)])
    await world.make(max_msg_size=2000)
    text = await stopped(world, "E-MSG-TOO-LARGE")
    assert f"stops at sequence {ROWS}" in text
    assert f"nats stream edit {world.target} --max-msg-size=-1 --force" in text
    await update(world, max_msg_size=-1)
    await paste(text, "replay")


MENDS = (
    *(not_empty, hole_given_up_or_skipped, shared, gone, subjects_taken, source_named, source_left_out),
    *(other_finished, other_dropped, state_spoiled, rows_lost, subject_widened, message_too_large),
)


@pytest.mark.parametrize("mend", MENDS)
async def test_the_command_of_a_hint_resumes(world: World, mend: Callable[[World], Awaitable[None]]) -> None:
    await mend(world)
    assert await world.sequences() == sorted({message.sequence for message in world.archive.rows[CHAIN]})
