"""The upload of a restore to the server, which ends it after five seconds without a byte."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from common.archive.documents import ChainDocument, ChainStore, StreamDocument
from common.archive.store import SegmentStore
from common.errors import FloeError, Unavailable
from common.nats.protocol import Sink
from common.nats.restore import KEEP_ALIVE_FRAME, WINDOW_BYTES, ArchiveUpload
from common.objects.port import ObjectStore
from common.service.progress import Progress
from common.settings.root import Settings
from common.tasks import ReportError, Stop
from ingress.recovery.files_form import archive_writer
from ingress.recovery.guard import PreflightResult
from ingress.recovery.plan import RestoreRequest
from ingress.recovery.request import RecoveryParts
from ingress.recovery.restore import Restore
from tests.support.basics import PATIENCE, raises_code, soon
from tests.support.clock import ManualClock
from tests.support.compaction import CHAIN, Archive
from tests.support.restore import entries, unframed
from tests.support.stores import FaultyStore

MOST_QUIET = 3.0  # seconds: two, and the reads of the store until the event loop runs again
SUBJECT = "$JS.SNAPSHOT.RESTORE.S.X"


class ChainedClock(ManualClock):
    """A clock that wakes a sleeper once another user has advanced it far enough."""

    async def sleep(self, seconds: float) -> None:
        until = self.monotonic() + seconds
        while self.monotonic() < until:
            await asyncio.sleep(0.0005)


class RestoringServer:
    """The server's end of a restore and of the connection to it, with a clock that the test moves.

    `answers`: True if it answers received messages. `received`: all bytes; `pauses`: seconds before each message.
    """

    max_payload, generation, is_up = 1024 * 1024, 0, True

    def __init__(self, clock: ManualClock) -> None:
        self._clock, self._at = clock, clock.monotonic()
        self.answers, self.received, self.pauses = True, bytearray(), list[float]()

    @property
    def has_given_up(self) -> bool:
        return max(self.pauses, default=0.0) >= 5.0

    async def api(self, _subject: str, _request: dict[str, Any], **_: Any) -> dict[str, Any]:
        self._at = self._clock.monotonic()
        return {"deliver_subject": SUBJECT}

    async def request_raw(self, _subject: bytes, payload: bytes, **_: Any) -> tuple[bytes, None]:
        self._take(payload)
        if self.has_given_up:
            raise Unavailable("nobody", code="E-NATS-NO-RESPONDERS")
        return (b"" if payload else b'{"type": "io.nats.jetstream.api.v1.stream_create_response"}'), None

    def send(self, frames: bytes) -> None:
        line, _, rest = frames.partition(b"\r\n")
        verb, subject, _, size = line.split(b" ")
        assert (verb, subject) == (b"PUB", SUBJECT.encode())
        self._take(rest[: int(size)])
        if self.answers:
            asyncio.get_running_loop().call_soon(self.answer)

    def answer(self) -> None:
        try:
            self._sink(b"", b"", b"", b"NATS/1.0 503\r\n\r\n" if self.has_given_up else None)
        except FloeError as error:
            self._report_error(error)

    def _take(self, payload: bytes) -> None:
        now = self._clock.monotonic()
        self.pauses.append(now - self._at)
        self._at = now
        self.received += payload

    def new_inbox(self) -> str:
        return "_INBOX.x"

    async def subscribe_raw(self, _subject: str, sink: Sink, report_error: ReportError) -> RestoringServer:
        self._sink, self._report_error = sink, report_error
        return self

    async def unsubscribe(self) -> None:
        """End the subscription; no further message arrives."""

    def permission_error(self, _subject: bytes) -> None: ...


@asynccontextmanager
async def uploading() -> AsyncIterator[tuple[ArchiveUpload, RestoringServer, ManualClock]]:
    clock = ManualClock()
    server = RestoringServer(clock)
    async with aclosing(await ArchiveUpload.begin(server, "S", {}, clock)) as upload:
        yield upload, server, clock


async def test_many_small_pieces_are_sent_before_the_server_gives_up() -> None:
    pieces = [b"%05d" % n for n in range(2000)]
    async with uploading() as (upload, server, clock):
        for piece in pieces:
            clock.advance(0.06)
            await upload.send(piece)
        await upload.finish()
    assert max(server.pauses) < 2.1
    assert bytes(server.received) == b"".join(pieces)
    assert len(server.pauses) < 100, "what is held back for two seconds is one message"


async def test_what_waits_for_more_of_the_archive_sends_a_frame_that_is_skipped() -> None:
    work = asyncio.get_running_loop().create_future()
    async with uploading() as (upload, server, clock):
        await upload.send(b"head")
        for n in range(1, 31):  # a minute
            assert not await upload.wait_for(work)
            assert len(server.pauses) == n
        assert (max(server.pauses), clock.monotonic()) == (2.0, 60.0)
        work.set_result(None)
        assert await upload.wait_for(work)
    assert bytes(server.received).startswith(b"head" + KEEP_ALIVE_FRAME * 29)


async def test_nothing_is_sent_to_keep_alive_while_the_server_owes_answers_for_all_that_may_be_on_its_way() -> None:
    work = asyncio.get_running_loop().create_future()
    async with uploading() as (upload, server, _):
        await upload.send(b"x" * 512 * 1024)  # the first is a request
        server.answers = False
        await upload.send(b"x" * WINDOW_BYTES)
        sent = len(server.pauses)
        for _ in range(5):
            assert not await upload.wait_for(work)
        assert len(server.pauses) == sent
        server.answer()
        assert not await upload.wait_for(work)
        assert bytes(server.received[-len(KEEP_ALIVE_FRAME) :]) == KEEP_ALIVE_FRAME
        work.cancel()


async def test_a_host_that_slept_is_named_as_the_cause() -> None:
    async with uploading() as (upload, _, clock):
        await upload.send(b"x" * 512 * 1024)
        clock.advance(7.25)
        await upload.send(b"y")
        with pytest.raises(Unavailable, match=r"no byte reached it for 7\.2 s, and it waits 5 s"):
            await upload.finish()


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    """Return a stream that rarely has a message: 120 segments of three sequences."""
    archive = Archive(tmp_path_factory.mktemp("quiet"))
    chains = ChainStore(archive.objects, archive.layout)
    config = {"name": CHAIN.feed, "subjects": ["nodes.>", "bad.>"], "retention": "limits"}
    chains.create_stream(CHAIN, StreamDocument(config, "2026-01-02T03:04:05Z", None))
    chains.create_chain(CHAIN, ChainDocument((), 1, 1))
    for first in range(1, 361, 3):
        archive.put(first, first + 2)
    return archive


def restore(archive: Archive, objects: ObjectStore, clock: ManualClock, progress: Progress | None = None) -> Restore:
    feeds = [{"stream": CHAIN.feed}]
    settings = Settings(site=CHAIN.site, store={"url": f"file://{archive.folder}"}, egress={"feeds": feeds})
    store = SegmentStore(objects, archive.layout, spool_dir=archive.folder / "spool", clock=clock)
    chains = ChainStore(objects, archive.layout)
    return Restore(
        settings,
        RestoreRequest(CHAIN.site, CHAIN.feed),
        RecoveryParts(store, chains, clock, progress or Progress(False)),
    )


@pytest.mark.parametrize("version", ["2.14.5", "2.15.1"])  # the older form waits for a whole block of 8 MB
async def test_many_small_segments_of_a_slow_store_come_back(quiet: Archive, version: str) -> None:
    clock, slow = ChainedClock(), FaultyStore(quiet.objects)
    server, work = RestoringServer(clock), restore(quiet, slow, clock)
    plan = await work.plan()

    def late(real: Any, *args: Any, **more: Any) -> Any:
        clock.advance(0.1)
        return real(*args, **more)

    slow.on("get", late)
    sent, _ = await work._fill(server, PreflightResult(plan, archive_writer(plan.name, version), ()), "marker")
    assert (sent.rows, clock.monotonic()) == (360, pytest.approx(120 * 0.1))
    assert max(server.pauses) < MOST_QUIET
    if version == "2.15.1":
        found = [entry.sequence for entry in entries(unframed(bytes(server.received)))]
        assert [sequence for sequence in found if sequence] == [*range(1, 361)]


async def test_segments_behind_the_one_that_is_read_are_fetched_meanwhile_and_only_so_many(quiet: Archive) -> None:
    slow = FaultyStore(quiet.objects)
    work = restore(quiet, slow, ManualClock())
    plan = await work.plan()
    slow.calls.clear()
    rows = work._work.history.rows(plan, 1, ("sequence",), Stop())
    assert next(rows).column("sequence").to_pylist() == [1, 2, 3]
    await soon(lambda: slow.calls["get"] >= 9)  # the first, the second with its rows in memory, and later ones
    assert slow.calls["get"] == 9
    assert [s for batch in rows for s in batch.column("sequence").to_pylist()] == [*range(4, 361)]
    assert slow.calls["get"] == 120


class Watched(Progress):
    """A progress display that sets `wanted` at the first line with `text`."""

    def __init__(self, text: str) -> None:
        super().__init__(is_terminal=False)
        self._text, self.wanted = text, threading.Event()

    def update(self, text: str, at: float) -> None:
        super().update(text, at)
        if self._text in text:
            self.wanted.set()


async def test_planning_that_takes_a_while_shows_its_progress(quiet: Archive, capsys: Any) -> None:
    slow, progress, shown = FaultyStore(quiet.objects), Watched("53%, "), list[bool]()

    def late(real: Any, *args: Any, **named: Any) -> Any:
        shown.append(progress.wanted.wait(PATIENCE))
        return real(*args, **named)

    slow.on("get", late, nth=100)
    await restore(quiet, slow, ManualClock(), progress).plan()
    assert shown == [True]
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "planning: reading the archive of us-east/NODES"
    assert "left  64 of 120 segments of us-east/NODES/0000/0 examined" in "\n".join(others)


async def test_planning_ends_where_it_is_stopped(quiet: Archive) -> None:
    work = restore(quiet, quiet.objects, ManualClock())
    work._stop.set()
    with raises_code(Unavailable, "E-RESTORE-STOPPED", 75, match="was stopped before its end"):
        await work.plan()
