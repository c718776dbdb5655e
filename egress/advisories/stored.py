"""Which advisories a stream holds already: asked before anything is sent that may have been sent before.

The stream remembers ids for its duplicate window only (two minutes, if nobody changed it), a restart may take
longer. So the stream itself is read, from the moment of the oldest advisory in doubt on.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import aclosing

from common.clock import NS_PER_S
from common.errors import Unavailable
from common.jetstream.api import ask, stream_info
from common.jetstream.client import FloeClient
from common.jetstream.headers import header
from common.jetstream.pull import Asked, From, scan

MESSAGE_ID = b"Nats-Msg-Id"
MARGIN = 60 * NS_PER_S  # by which clocks of servers may differ
# Headers only, so that many fit into little memory.
ASKED = Asked(batch=5000, window=2 * 1024 * 1024)


async def streams_with(client: FloeClient, subject: str) -> list[str]:
    """The names of the streams that take messages on `subject`, a filter; empty where none can be seen."""
    answer = await ask(client, "STREAM.NAMES", {"subject": subject})
    return [str(name) for name in answer.get("streams") or ()]


async def ids_stored(
    client: FloeClient, subject: str, ids: Collection[str], since_ns: int, asked: Asked = ASKED
) -> set[str] | None:
    """Those of `ids` that messages on `subject` carry, stored since `since_ns`; None where no stream is seen.

    Raises Unavailable where it cannot be read now, ApiError or Refused where it may not be read.
    """
    names = await streams_with(client, subject)
    found: set[str] = set()
    for name in names:
        await _look_into(client, name, subject, {each.encode() for each in ids}, found, since_ns, asked)
    return found if names else None


async def _look_into(
    client: FloeClient,
    stream: str,
    subject: str,
    wanted: set[bytes],
    found: set[str],
    since_ns: int,
    asked: Asked,
) -> None:
    info = await stream_info(client, stream)
    if info is None:
        raise Unavailable(f"stream {stream} was there a moment ago and is not now")
    # The consumer may sit on a replica that is behind: it must pass what the leader has stored.
    pieces = scan(
        client,
        stream,
        From(time_ns=since_ns - MARGIN),
        until=info.last_sequence,
        subject=subject,
        headers_only=True,
        asked=asked,
    )
    async with aclosing(pieces):
        async for piece in pieces:
            carried = (header(each.headers, MESSAGE_ID) for each in piece)
            found.update(each.decode() for each in carried if each in wanted and each is not None)
