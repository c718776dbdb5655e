"""Import of a backup of the command `nats`: a chain that begins with it.

    take the lease of the feed
    let a nats-server restore the backup, unread, as a scratch stream
    put stream.json, which says that an import has not ended: egress does not continue it
    read the scratch stream as egress reads any stream, and put its segments
    remove the scratch stream
    put chain.json, from which on everybody sees the chain, then stream.json without the note

Every step may be repeated: after a crash the same command continues after the segments that are put.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common.archive.documents import ChainStart, StreamDocument
from common.archive.scan import ChainArchive
from common.chain import FEED_PATTERN, Chain
from common.documents import check_depth
from common.errors import ConfigError, DataError, FloeError, Stopped, Unavailable, UsageError
from common.exits import choices, import_command, nats_command
from common.failpoints import failpoint
from common.logs import get_logger
from common.nats.api import StreamInfo, delete_stream, query, stream_info
from common.nats.client import FloeClient, connect
from common.nats.protocol import ApiError
from common.nats.restore import MESSAGE_BYTES, ArchiveUpload, LocalServerMaker, start_local_server
from common.service.progress import Progress, format_share
from common.settings.egress import FeedSettings
from common.settings.service import NatsSettings
from common.settings.types import duration_words, format_count, size_words
from common.tasks import Stop, cancel, raise_fatal, spawn
from egress.archive import Archive
from egress.deps import CommandContext
from egress.incarnations import Incarnation, Incarnations, configured_layout, newest_incarnation
from egress.partition import Partition
from egress.session import ReadContext
from egress.worker import Worker

log = get_logger(__name__)

META_FILE, DATA_FILES = "backup.json", ("stream.arc.s2", "stream.tar.s2")  # since natscli 0.5 for servers 2.15; before
MAX_META_BYTES = 1024 * 1024
IMPORT_KEY, IMPORT_PREFIX = "floe.import", "_floe.import."  # in the metadata of a scratch stream; of its only subject
SERVER_CODE = "E-IMPORT-SERVER"


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup in a folder: its `config` and `state`, as nats-server gave them, and the file of its messages."""

    folder: Path
    data: Path
    config: dict[str, Any]
    state: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Backup:
        """Raises UsageError for a folder that is no backup."""
        try:
            raw = (folder / META_FILE).read_bytes()[: MAX_META_BYTES + 1]
            found = [path for name in DATA_FILES if (path := folder / name).is_file()]
        except OSError as error:
            raise UsageError(
                f"{folder / META_FILE}: expected a backup of the command `nats`, found: {error.strerror}"
            ) from None
        try:
            if len(raw) > MAX_META_BYTES:
                raise ValueError(f"expected at most {MAX_META_BYTES} bytes")
            check_depth(raw)
            document = json.loads(raw)
            config, state = dict(document["config"]), dict(document["state"])
            if not FEED_PATTERN.fullmatch(str(config["name"])):
                raise ValueError(f"expected the name of a stream, found {config['name']!r:.80}")
            if int(state["messages"]) < 1 or int(state["first_seq"]) < 0:
                raise ValueError(f"expected messages, found state {state}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            text = f"{folder / META_FILE}: expected the configuration and the state of a stream: {error!r:.200}"
            raise UsageError(text) from None
        if len(found) != 1:
            raise UsageError(f"{folder}: expected one of {' and '.join(DATA_FILES)}, found {len(found)} of them")
        return cls(folder, found[0], config, state)

    @property
    def stream(self) -> str:
        return str(self.config["name"])

    @property
    def messages(self) -> int:
        return int(self.state["messages"])

    def first_sequence(self, info: StreamInfo) -> int:
        """Return the first sequence that the stream held: an older form may bring purged messages back before it."""
        return max(1, info.first_sequence, int(self.state["first_seq"]))

    def scratch_config(self) -> dict[str, Any]:
        """Return the configuration of the scratch stream: no limit removes a message, no publisher reaches it."""
        return {
            "name": self.stream,
            "subjects": [f"{IMPORT_PREFIX}{self.stream}"],
            "description": "scratch of floe import; may be deleted",
            "storage": "file",
            "retention": "limits",
            "num_replicas": 1,
            "metadata": {IMPORT_KEY: "1"},
        }


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of an import. `first`, `last`: the sequences that the chain covers; `messages`: archived; `left_out`:
    those of the backup that the server left out; `created`: of the stream in `stream.json`; `leftover`: the error, as
    text, that left the scratch stream on a server.
    """

    chain: Chain
    stream: str
    first: int
    last: int
    messages: int
    left_out: int
    created: str
    seconds: float
    leftover: str = ""

    def lines(self) -> Iterator[str]:
        rate = f"{self.messages / max(self.seconds, 0.001):,.0f} msg/s"
        took = f"{format_count(self.messages, 'message')} in {duration_words(self.seconds)}, {rate}"
        yield f"chain {self.chain}: {self.first} to {self.last} of stream {self.stream}, {took}"
        if self.left_out:
            yield f"note: the server left out {format_count(self.left_out, 'message')} of the backup: their TTL is over"
        if self.leftover:
            yield f"note: the scratch stream is left, {self.leftover}"


def wanted_partition(context: CommandContext, feed: str, backup: Backup) -> Partition:
    """Return the partition that the backup becomes. Raises UsageError for a feed that no backup can begin."""
    feeds = {each.name: each for each in context.settings.egress.feeds}
    found = feeds.get(feed) or FeedSettings.model_validate({"name": feed, "stream": backup.stream})
    problem = f"stream {found.stream}" if found.stream != backup.stream else ""
    if found.sampling_key:
        problem = f"one that is sampled ({found.sampling_key})"
    elif len(found.filters()) > 1:
        problem = f"one with {len(found.filters())} partitions"
    if problem:
        raise UsageError(
            f"feed {feed}: expected one that archives the whole stream {backup.stream}, found {problem}; "
            "import it under a name of its own"
        )
    # An import brings also the messages that egress leaves out by their age.
    return Partition(context.settings.site, found.model_copy(update={"max_age": 0.0}), 0, found.filters()[0])


def server_settings(server: str) -> NatsSettings | None:
    """Return the connection that a URL or a context names; None if it is empty. Raises UsageError."""
    if not server:
        return None
    try:
        return NatsSettings(url=(server,)) if "://" in server else NatsSettings().from_context(server)
    except ValueError:
        form = "nats://HOST:PORT or tls://HOST:PORT without a user, or the name of a context"
        raise UsageError(f"--server: expected {form}, found {server!r:.80}") from None


class BackupImport:
    """One import into a feed of this site. `server`: of the scratch stream, None for one that `make` starts."""

    def __init__(
        self,
        context: CommandContext,
        backup: Backup,
        feed: str,
        server: NatsSettings | None,
        make: LocalServerMaker,
        progress: Progress,
    ) -> None:
        self._context, self._backup, self._server, self._make = context, backup, server, make
        self._partition, self._progress = wanted_partition(context, feed, backup), progress
        self._chain, self._clock = self._partition.chain, context.deps.clock
        self._archive: Archive | None = None

    async def run(self, stop: Stop) -> ImportReport:
        """Import the backup, or continue. Raises Stopped if the feed has an archive, Unavailable if its lease is held,
        the server is gone or `stop` came first, DataError for a backup that the server does not accept.
        """
        started = self._clock.monotonic()
        await self._context.deps.state.ensure()
        await self._context.pools.io.run(self._check_chain)
        async with AsyncExitStack() as stack:
            lease = await self._context.hold_lease(stack, self._chain, waits=True)
            nats = await stack.enter_async_context(self._open_server())
            client = await stack.enter_async_context(aclosing(await self._connect(nats)))
            await self._check_server(client)
            try:
                digest, info = await self._fill(client, stop)
                shared = replace(self._context.deps, client=client, connect=partial(self._connect, nats))
                deps = replace(self._context, deps=shared).deps_of(self._partition)
                incarnations = Incarnations(deps)
                current = await incarnations.begin_import(self._document(digest, info))
                failpoint("import.begun")
                worker = Worker(deps)
                showing = spawn(self._show_progress(info), raise_fatal, name="progress")
                try:
                    judge = partial(self._judge, current, worker)
                    archive = await worker.read_up_to(info.last_sequence, judge, lease, stop)
                finally:
                    await cancel(showing)
                failpoint("import.read")
            finally:
                leftover = await self._remove(client)
            failpoint("import.removed")
            await incarnations.finish_import(current)
        first, seconds = current.document.first, self._clock.monotonic() - started
        messages, left_out = await self._context.pools.io.run(self._count_rows), self._backup.messages - info.messages
        context = {"first": first, "last": archive.end, "messages": messages}
        log.info("backup imported", action="backup_imported", **context, **self._chain.log_context())
        counts = first, archive.end, messages, max(0, left_out)
        return ImportReport(self._chain, self._backup.stream, *counts, info.created, seconds, leftover)

    def _check_chain(self) -> None:
        """Raise Stopped unless the feed has no archive, or that of an import that has not ended. Blocking."""
        chains, document = self._context.deps.chains, None
        number = newest_incarnation(chains, self._chain)
        if number == 0:
            document = chains.read_stream(self._chain)
        is_free = number is None and not chains.partitions(self._chain)
        if not is_free and (document is None or not document.importing):
            raise Stopped(
                f"feed {self._chain.site}/{self._chain.feed}: expected no archive, which a backup can begin, found one",
                hint="import the backup under another feed name",
                code="E-IMPORT-BEGUN",
            )

    # The scratch stream

    def _open_server(self) -> AbstractAsyncContextManager[NatsSettings]:
        if self._server is not None:
            return nullcontext(self._server)
        return start_local_server(self._make, self._context.settings.spool_dir, self._progress, SERVER_CODE)

    async def _connect(self, nats: NatsSettings) -> FloeClient:
        return await connect(nats, name=f"floe import {self._chain.site}", clock=self._clock)

    async def _check_server(self, client: FloeClient) -> None:
        """Remove the leftover of an earlier import. Raises ConfigError unless the account has no other stream: the
        consumers of the backup are active on this server, and would deliver to subscribers.
        """
        name = self._backup.stream
        if (info := await stream_info(client, name)) is not None and _is_scratch(info):
            self._progress.print(f"removing {name}, a leftover of an earlier import")
            await delete_stream(client, name, timeout=30.0)
        if count := int((await query(client, "INFO")).get("streams") or 0):
            raise ConfigError(
                f"--server: expected an account without streams, found one with {count}",
                hint="leave out --server: a nats-server is started for the import; or name one that nothing else uses",
                code=SERVER_CODE,
            )

    async def _fill(self, client: FloeClient, stop: Stop) -> tuple[str, StreamInfo]:
        """Let the server restore the backup. Return the SHA-256 of its messages, and the scratch stream."""
        digest, backup, io = hashlib.sha256(), self._backup, self._context.pools.io
        request, total = {"config": backup.scratch_config(), "state": backup.state}, backup.data.stat().st_size
        began, begin = self._clock.monotonic(), ArchiveUpload.begin
        try:
            with backup.data.open("rb") as file:
                async with aclosing(
                    await begin(client, backup.stream, request, self._clock, in_frames=False)
                ) as upload:
                    while piece := await io.run(file.read, MESSAGE_BYTES):
                        if stop.is_set:
                            raise self._stopped()
                        digest.update(piece)
                        await upload.send(piece)
                        share = format_share(upload.sent, total, self._clock.monotonic() - began)
                        text = f"{share}  restored {size_words(upload.sent)}"
                        self._progress.update(text, self._clock.monotonic())
                    failpoint("import.sent")
                    await upload.finish()
        except ApiError as error:
            version = ".".join(map(str, client.server_version))
            raise DataError(
                f"{backup.folder}: nats-server {version} does not accept this backup: {error.description}",
                hint="check it with `nats backup validate`; or let a newer nats-server read it, with --server",
                code="E-IMPORT-REFUSED",
            ) from error
        info = await stream_info(client, backup.stream)
        if info is None or not info.messages:
            raise DataError(f"{backup.folder}: the server restored no message of it", code="E-IMPORT-REFUSED")
        return digest.hexdigest(), info

    async def _remove(self, client: FloeClient) -> str:
        """Remove the scratch stream. Return the error, as text, if that fails and the server is not ours."""
        error = ""
        try:
            if (info := await stream_info(client, self._backup.stream)) is not None and _is_scratch(info):
                await delete_stream(client, self._backup.stream, timeout=30.0)
        except FloeError as found:
            error = f"{found.message}; remove it: {nats_command('stream rm', self._backup.stream)}"
        return error if self._server else ""

    # The chain

    def _document(self, digest: str, info: StreamInfo) -> StreamDocument:
        first = self._backup.first_sequence(info)
        starts = ChainStart.of(configured_layout(self._partition, first))
        return StreamDocument(self._backup.config, info.created, None, starts, stream_first=first, importing=digest)

    async def _judge(self, current: Incarnation, worker: Worker) -> ReadContext:
        context = await worker.judge_whole(current)
        self._archive = context.archive
        return context

    def _count_rows(self) -> int:
        store = self._context.deps.store
        return sum(store.footer(each.segment).rows for each in ChainArchive.listed(store, self._chain).covers())

    async def _show_progress(self, info: StreamInfo) -> None:
        first, began = self._backup.first_sequence(info), self._clock.monotonic()
        while True:
            await self._clock.sleep(1.0)
            done, at = max(0, (self._archive.end if self._archive else 0) - first + 1), self._clock.monotonic()
            share = format_share(done, info.last_sequence - first + 1, at - began)
            self._progress.update(f"{share}  archived up to {first + done - 1}", at)

    def _stopped(self) -> Unavailable:
        command = import_command(self._backup.folder, self._chain)
        return Unavailable("the import was stopped before its end", hint=choices(("it continues with", command)))


def _is_scratch(info: StreamInfo) -> bool:
    return IMPORT_KEY in (info.config.get("metadata") or {})
