"""A model of pull consumers: requests with limits and heartbeats, acknowledgements, policies."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.sim.streams import INTEREST, WORK_QUEUE, ApiRefusal, StoredMessage, Stream, Words, matches, timestamp
from tests.sim.world import NS

#: Gives a message to whoever listens on an inbox: inbox, subject, reply, headers, payload. How many listened.
Deliver = Callable[[bytes, bytes, bytes, bytes | None, bytes], int]

ROOM = 80  # bytes of subject and reply that a request's max_bytes counts on top


@dataclass(eq=False)
class PullRequest:
    """One open pull request; times are those of the world."""

    inbox: bytes
    left: int
    bytes_left: int
    expires: float
    heartbeat: float
    quiet_since: float


class Consumer:
    """One pull consumer of a stream."""

    def __init__(self, stream: Stream, name: str, config: dict[str, Any], deliver: Deliver) -> None:
        self.stream, self.name, self.config, self.world = stream, name, config, stream.world
        self.created, self._deliver = stream.world.time_ns(), deliver
        self.is_listening: Callable[[bytes], bool] = lambda _inbox: True
        named = config.get("filter_subjects") or ([config["filter_subject"]] if config.get("filter_subject") else [])
        self.filters: list[Words] = [each.encode().split(b".") for each in named]
        self.next = self._start()
        self.delivered = (0, self.next - 1)  # by the consumer's own count, and the stream's sequence
        self.floor = (0, self.next - 1)
        self.pending: dict[int, int] = {}  # sequence: the consumer's own number
        self.pulls: list[PullRequest] = []
        self.touched = self.world.now

    def _start(self) -> int:
        stream, config = self.stream, self.config
        held = stream.sequences[0] if stream.sequences else stream.last + 1
        match config.get("deliver_policy", "all"):
            case "by_start_sequence":
                return max(int(config["opt_start_seq"]), held)
            case "by_start_time":
                at = datetime.fromisoformat(config["opt_start_time"].replace("Z", "+00:00")).timestamp() * NS
                behind = (each.sequence for each in stream.messages.values() if each.time_ns >= at)
                return next(behind, stream.last + 1)
            case "new":
                return stream.last + 1
            case _:
                return held

    @property
    def acknowledges(self) -> bool:
        return bool(self.config.get("ack_policy", "explicit") != "none")

    @property
    def is_idle(self) -> bool:
        """Return true once nobody has asked it for longer than it may be idle: the server removes it."""
        most = (self.config.get("inactive_threshold") or 0) / NS
        return 0 < most < self.world.now - self.touched and not self.pulls

    def wants(self, message: StoredMessage) -> bool:
        return not self.filters or any(matches(each, message.subject.split(b".")) for each in self.filters)

    def needs(self, message: StoredMessage) -> bool:
        """Return true while it has not acknowledged the message."""
        return (message.sequence in self.pending or message.sequence >= self.next) and self.wants(message)

    def rewind(self, last: int) -> None:
        """Go on behind `last`, the end of the stream now."""
        self.pending = {at: number for at, number in self.pending.items() if at <= last}
        self.next = min(self.next, last + 1)
        self.delivered = (self.delivered[0], min(self.delivered[1], last))

    # Delivering

    def pull(self, inbox: bytes, asked: dict[str, Any]) -> None:
        now = self.world.now
        expires = now + (asked.get("expires") or 30 * NS) / NS
        heartbeat = (asked.get("idle_heartbeat") or 0) / NS
        request = PullRequest(inbox, asked.get("batch", 1), asked.get("max_bytes") or 1 << 40, expires, heartbeat, now)
        self.pulls.append(request)
        if heartbeat:
            self.world.at(heartbeat, lambda: self._beat(request))
        self.feed()

    def feed(self) -> None:
        """Deliver what the open requests ask for."""
        while self.pulls:
            request, self.touched = self.pulls[0], self.world.now
            if not self.is_listening(request.inbox):
                self.pulls.pop(0)
                continue
            if request.expires <= self.world.now:
                self.end(request, b"408 Request Timeout")
                continue
            if (message := self._next()) is None:
                return
            size = message.size + ROOM
            if size > request.bytes_left:
                self.end(request, b"409 Message Size Exceeds MaxBytes")
                continue
            self._give(request, message)
            request.left, request.bytes_left = request.left - 1, request.bytes_left - size
            request.quiet_since = self.world.now
            if not request.left:
                self.pulls.remove(request)

    def _give(self, request: PullRequest, message: StoredMessage) -> None:
        number = self.delivered[0] + 1
        self.next, self.delivered = message.sequence + 1, (number, message.sequence)
        if self.acknowledges:
            self.pending[message.sequence] = number
        where = self.stream.name.encode(), self.name.encode()
        reply = b"$JS.ACK.%b.%b.1.%d.%d.%d.0" % (*where, message.sequence, number, message.time_ns)
        payload = b"" if self.config.get("headers_only") else message.payload
        self._deliver(request.inbox, message.subject, reply, message.headers, payload)

    def _next(self) -> StoredMessage | None:
        self.stream.expire()
        for message in self.stream.from_sequence(self.next):
            if self.wants(message):
                return message
            self.next = message.sequence + 1
            self.delivered = (self.delivered[0], max(self.delivered[1], message.sequence))
        return None

    def end(self, request: PullRequest, why: bytes) -> None:
        if request in self.pulls:
            self.pulls.remove(request)
        left = b"Nats-Pending-Messages: %d\r\nNats-Pending-Bytes: %d" % (request.left, request.bytes_left)
        self._deliver(request.inbox, request.inbox, b"", b"NATS/1.0 %b\r\n%b\r\n\r\n" % (why, left), b"")

    def end_all(self, why: bytes) -> None:
        for request in [*self.pulls]:
            self.end(request, why)

    def _beat(self, request: PullRequest) -> None:
        if request not in self.pulls or self.stream.consumers.get(self.name) is not self:
            return
        if request.expires <= self.world.now:
            self.end(request, b"408 Request Timeout")
            return
        if self.world.now - request.quiet_since >= request.heartbeat - 1e-9:
            at = b"Nats-Last-Consumer: %d\r\nNats-Last-Stream: %d" % self.delivered
            self._deliver(request.inbox, request.inbox, b"", b"NATS/1.0 100 Idle Heartbeat\r\n%b\r\n\r\n" % at, b"")
            request.quiet_since = self.world.now
        self.world.at(request.heartbeat, lambda: self._beat(request))

    # Acknowledgements

    def acknowledge(self, sequence: int) -> None:
        if self.config.get("ack_policy") == "all":
            taken = [each for each in self.pending if each <= sequence]
        else:
            taken = [sequence] if sequence in self.pending else []
        for each in taken:
            del self.pending[each]
        lowest = min(self.pending, default=self.delivered[1] + 1)
        self.floor = min(self.pending.values(), default=self.delivered[0] + 1) - 1, lowest - 1
        self.stream.acknowledged(self, taken)

    def info(self) -> dict[str, Any]:
        behind = self.stream.sequences[bisect.bisect_left(self.stream.sequences, self.next) :]
        return {
            "stream_name": self.stream.name,
            "name": self.name,
            "created": timestamp(self.created),
            "config": self.config,
            "delivered": {"consumer_seq": self.delivered[0], "stream_seq": self.delivered[1]},
            "ack_floor": {"consumer_seq": self.floor[0], "stream_seq": self.floor[1]},
            "num_ack_pending": len(self.pending),
            "num_pending": sum(self.wants(self.stream.messages[each]) for each in behind),
            "num_waiting": len(self.pulls),
        }


def check_new(stream: Stream, name: str, config: dict[str, Any]) -> None:
    """Raises ApiRefusal where the stream does not take such a consumer."""
    if stream.retention == WORK_QUEUE:
        if config.get("ack_policy", "explicit") != "explicit":
            raise ApiRefusal(400, 10098, "workqueue stream requires explicit ack")
        if config.get("deliver_policy", "all") != "all":
            raise ApiRefusal(400, 10101, "consumer must be deliver all on workqueue stream")
        subject = config.get("filter_subject", "")
        for other in stream.consumers.values():
            if other.name != name and (not subject or other.config.get("filter_subject", "") in ("", subject)):
                raise ApiRefusal(400, 10100, "filtered consumer not unique on workqueue stream")
    if stream.retention == INTEREST and config.get("ack_policy", "explicit") == "none":
        raise ApiRefusal(400, 10136, "interest stream requires acknowledgements")
