"""Which advisories come too late to be told.

After a stop of days the log still says who was silent for an hour on the first of them. That is no news any
more, and all of it at once would be a storm. So what is older than two `inspect_duration`s is not sent, as
stream-replicator does for expiry; that a value is new is always told, because it stays true.
"""

from __future__ import annotations

from common.clock import NS_PER_S, Clock
from common.errors import Refused
from common.jetstream.api import parse_time, stream_info
from common.jetstream.client import FloeClient
from common.jetstream.requests import ApiError
from egress.advisories.event import Advisory, Event

DURATIONS = 2  # inspect_durations
AT_LEAST = 300 * NS_PER_S  # so that a restart or a take-over loses none where inspect_duration is short
ASK_EVERY = 60.0  # seconds


def is_late(advisory: Advisory, now_ns: int, duration_ns: int) -> bool:
    """Whether `advisory` is not to be sent any more at `now_ns`, by the clock that stamps messages."""
    limit = max(DURATIONS * duration_ns, AT_LEAST)
    return advisory.event is not Event.NEW and now_ns - advisory.moment_ns > limit


class Lateness:
    """Judges by this host's clock, and before it drops anything by that of the server of `stream`.

    Moments are times of messages, which the server set: a host whose clock is ahead must not lose them.
    """

    def __init__(self, client: FloeClient, stream: str, duration_ns: int, clock: Clock) -> None:
        self._client, self._stream, self._clock = client, stream, clock
        self._duration_ns = duration_ns
        self._ahead_ns, self._asked = 0, float("-inf")

    async def late(self, advisories: list[Advisory]) -> set[Advisory]:
        """Those that come too late. Raises Unavailable where the server must be asked and does not answer."""
        late = self._judge(advisories)
        if late and self._clock.monotonic() - self._asked > ASK_EVERY:
            await self._ask()
            late = self._judge(advisories)
        return late

    def _judge(self, advisories: list[Advisory]) -> set[Advisory]:
        now_ns = self._now_ns() - self._ahead_ns
        return {each for each in advisories if is_late(each, now_ns, self._duration_ns)}

    async def _ask(self) -> None:
        try:
            info = await stream_info(self._client, self._stream)
        except (ApiError, Refused):
            info = None
        # Where nobody says the time (servers before 2.10 do not), this host's has to do.
        server_ns = parse_time(info.time) if info is not None and info.time else self._now_ns()
        self._ahead_ns, self._asked = self._now_ns() - server_ns, self._clock.monotonic()

    def _now_ns(self) -> int:
        return int(self._clock.now() * NS_PER_S)
