"""`floe advisories`: prints the advisories in a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
from msgspec import structs

from common.chain import FEED_PATTERN
from common.cli import RequestedTime, config_command, since_option
from common.clock import NS_PER_S, Clock, SystemClock, parse_time
from common.errors import FloeError, Unavailable
from common.logs import escape
from common.nats.api import stream_info
from common.nats.client import FloeClient, connect
from common.nats.pull import StartAt, scan
from common.open import load_settings
from common.service.process import stop_on_signals
from common.settings.types import format_count, format_duration
from common.tasks import run_until_stopped
from egress.advisories.advisory import AdvisoryDocument, parse_advisory

if TYPE_CHECKING:
    from common.settings.root import Role


LAST_HOUR = RequestedTime(seconds_ago=3600.0)
RECONNECT_PAUSE_S = 1.0  # seconds between attempts after a lost connection


def format_advisory(document: AdvisoryDocument) -> str:
    """Format one line, with times in UTC. Raises ValueError for a time outside the calendar."""
    try:
        at = datetime.fromtimestamp(document.timestamp, UTC)
    except (OverflowError, OSError, ValueError):
        raise ValueError(f"timestamp {document.timestamp}: expected seconds since 1970") from None
    ago = format_duration(max(0, document.timestamp - document.seen))
    words = f"{document.event:>7} {document.value} seen {ago} earlier on {document.replicator}"
    return escape(f"[{at:%Y-%m-%d %H:%M:%S}] {words}")


@dataclass
class AdvisorySearch:
    """The advisories of `value` (None: of all values) stored since `since`; with `follow`, also new ones as they come.

    `foreign_count`: how many messages were not advisories.
    """

    client: FloeClient
    clock: Clock
    stream: str
    value: str | None
    since: RequestedTime
    follow: bool
    foreign_count: int = 0
    _next_sequence: int = 0

    async def documents(self) -> AsyncGenerator[AdvisoryDocument]:
        if (info := await stream_info(self.client, self.stream)) is None:
            raise FloeError(
                f"stream {self.stream}: expected one on this server, found none",
                hint="list the streams with nats stream ls; or connect as the other role with floe advisories --nats",
                code="E-STREAM",
            )
        now_ns = parse_time(info.time) if info.time else int(self.clock.now() * NS_PER_S)
        start = StartAt(time_ns=self.since.at(now_ns / NS_PER_S))
        until = None if self.follow else info.last_sequence
        while True:
            try:
                async with aclosing(self._read(start, until)) as found:
                    async for document in found:
                        yield document
                return
            except Unavailable as error:
                if not self.follow:
                    raise
                _to_stderr(error.message)
            await self.clock.sleep(RECONNECT_PAUSE_S)
            start = StartAt(sequence=self._next_sequence) if self._next_sequence else start

    async def _read(self, start: StartAt, until: int | None) -> AsyncGenerator[AdvisoryDocument]:
        async with aclosing(scan(self.client, self.stream, start, until=until)) as pieces:
            async for piece in pieces:
                for message in piece:
                    self._next_sequence = message.sequence + 1
                    if (document := parse_advisory(message.payload)) is None or not _has_time(document):
                        self.foreign_count += 1
                    elif self.value in (None, document.value):
                        yield document


def _has_time(document: AdvisoryDocument) -> bool:
    try:
        return bool(format_advisory(document))
    except ValueError:
        return False


@click.command()
@click.argument("stream")
@click.argument("value", required=False)
@since_option
@click.option("-f", "--follow", is_flag=True, help="Continue with new ones, until Ctrl-C.")
@click.option(
    "--nats",
    "role",
    type=click.Choice(["egress", "ingress"]),
    help="Role whose connection is used; default: egress if the configuration has feeds, else ingress.",
)
@config_command
async def advisories(
    stream: str,
    value: str | None,
    config: str,
    since: RequestedTime | None,
    follow: bool,
    role: Role | None,
    as_json: bool,
) -> None:
    """Show the advisories in STREAM, or those of one VALUE: values that are new, silent, back or expired.

    Those stored in the last hour, or from --since on. With --json, one document a line.

    \b
    Example: floe advisories NODE_DATA_ADVISORIES node1.example.net -c site.yaml --since 5h
    """
    if not FEED_PATTERN.fullmatch(stream):
        raise click.BadParameter(
            f"expected 1 to 255 characters without space . * > / \\, found {stream!r:.60}", param_hint="STREAM"
        )
    settings, clock = load_settings(config, quiet=True), SystemClock()
    is_egress = settings.egress.feeds_ or not settings.ingress.targets
    nats = settings.nats_for(role or ("egress" if is_egress else "ingress"))
    async with aclosing(await connect(nats, name="floe advisories", clock=clock)) as client, stop_on_signals() as stop:
        search = AdvisorySearch(client, clock, stream, value, since or LAST_HOUR, follow)
        await run_until_stopped(stop, _print(search, as_json))
    if search.foreign_count:
        verb = "is no advisory" if search.foreign_count == 1 else "are no advisories"
        _to_stderr(f"{format_count(search.foreign_count, 'message')} of {stream} {verb}")


async def _print(search: AdvisorySearch, as_json: bool) -> None:
    async with aclosing(search.documents()) as documents:
        async for document in documents:
            # ASCII: every control character is escaped.
            click.echo(json.dumps(structs.asdict(document)) if as_json else format_advisory(document))


def _to_stderr(text: str) -> None:
    click.echo(escape(text), err=True)
