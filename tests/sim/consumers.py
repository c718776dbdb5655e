"""A model of pull consumers: requests with limits and heartbeats, acknowledgements, policies."""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from typing import Any

from tests.sim.streams import WORK_QUEUE, ApiRefusal, StoredMessage, Stream, Words, matches, patterns_meet, timestamp
from tests.sim.world import NS

#: Delivers a message to an inbox: inbox, subject, reply, headers, payload. Returns the number of its subscribers.
Deliver = Callable[[bytes, bytes, bytes, bytes | None, bytes], int]

ACK_WAIT = 30.0  # seconds until a redelivery, if the consumer sets none
MOST_PENDING = 1000  # messages without an acknowledgement, if the consumer sets no limit


@dataclass(eq=False)
class PullRequest:
    """One open pull request. Times are those of the world. `bytes_left`: None without a limit of bytes."""

    inbox: bytes
    left: int
    bytes_left: int | None
    expires: float
    heartbeat: float
    quiet_since: float
    waits: bool = True


@dataclass(slots=True)
class Pending:
    """A delivered message without an acknowledgement. `number`: the consumer's own, of its first delivery;
    `deadline`: time of its redelivery.
    """

    number: int
    deadline: float
    count: int = 1


class Consumer:
    """One pull consumer of a stream."""

    def __init__(self, stream: Stream, name: str, config: dict[str, Any], deliver: Deliver) -> None:
        self.stream, self.name, self.config, self.world = stream, name, config, stream.world
        self.created, self._deliver = stream.world.time_ns(), deliver
        self.is_listening: Callable[[bytes], bool] = lambda _inbox: True
        self.filters = filters_of(config)
        self.next = self._start()
        self.delivered = (0, self.next - 1)  # by the consumer's own count, and the stream's sequence
        self.floor = (0, self.next - 1)
        self.pending: dict[int, Pending] = {}  # by sequence
        self.again: list[int] = []  # sequences to deliver again
        self._wakes_at = float("inf")
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
            case "last":
                return next((n for n in reversed(stream.sequences) if self.wants(stream.messages[n])), stream.last + 1)
            case _:
                return held

    @property
    def acknowledges(self) -> bool:
        return bool(self.config.get("ack_policy", "explicit") != "none")

    @property
    def is_idle(self) -> bool:
        """Return true if there was no request for longer than the inactive threshold: the server removes it."""
        most = (self.config.get("inactive_threshold") or 0) / NS
        return 0 < most < self.world.now - self.touched and not self.pulls

    def wants(self, message: StoredMessage) -> bool:
        return not self.filters or any(matches(each, message.subject.split(b".")) for each in self.filters)

    def needs(self, message: StoredMessage) -> bool:
        """Return true while it has not acknowledged the message."""
        return (message.sequence in self.pending or message.sequence >= self.next) and self.wants(message)

    def rewind(self, last: int) -> None:
        """Continue behind `last`, the end of the stream now."""
        self.pending = {at: each for at, each in self.pending.items() if at <= last}
        self.again = [at for at in self.again if at <= last]
        self.next = min(self.next, last + 1)
        self.delivered = (self.delivered[0], min(self.delivered[1], last))

    def purged(self, first: int) -> None:
        """Continue at `first`, the first sequence that is left."""
        gone = [each for at, each in self.pending.items() if at < first]
        self.pending = {at: each for at, each in self.pending.items() if at >= first}
        self.again = [at for at in self.again if at >= first]
        self.next = max(self.next, first)
        self.delivered = (self.delivered[0], max(self.delivered[1], first - 1))
        if self.floor[1] < first - 1:
            self.floor = max([self.floor[0], *(each.number for each in gone)]), first - 1
        if not self.pending:
            self.floor = self.delivered

    def update(self, config: dict[str, Any]) -> None:
        """Change the configuration. Raises ApiRefusal for a key that cannot change."""
        for key in ("deliver_policy", "ack_policy"):
            if config[key] != self.config[key]:
                raise ApiRefusal(500, 10012, f"{key.replace('_', ' ')} can not be updated")
        self.config, self.filters = config, filters_of(config)

    # Delivering

    def pull(self, inbox: bytes, asked: dict[str, Any]) -> None:
        now, batch = self.world.now, asked.get("batch") or 1
        expires, heartbeat = ((asked.get(key) or 0) / NS for key in ("expires", "idle_heartbeat"))
        if heartbeat * 2 > expires:
            self._refuse(inbox, b"400 Bad Request - heartbeat value too large")
            return
        if 0 < (most := self.config.get("max_batch") or 0) < batch:
            self._refuse(inbox, b"409 Exceeded MaxRequestBatch of %d" % most)
            return
        if 0 < (longest := (self.config.get("max_expires") or 0) / NS) < expires:
            self._refuse(inbox, f"409 Exceeded MaxRequestExpires of {longest:g}s".encode())
            return
        request = PullRequest(inbox, batch, asked.get("max_bytes") or None, now + (expires or 1e9), heartbeat, now)
        request.waits = bool(expires) or not asked.get("no_wait")
        self.pulls.append(request)
        if heartbeat:
            self.world.at(heartbeat, lambda: self._beat(request))
        if expires:
            self.world.at(expires, lambda: self._expire(request))
        self.feed()

    def _refuse(self, inbox: bytes, why: bytes) -> None:
        self._deliver(inbox, inbox, b"", b"NATS/1.0 %b\r\n\r\n" % why, b"")

    def _expire(self, request: PullRequest) -> None:
        if request in self.pulls and self.stream.consumers.get(self.name) is self:
            self.touched = self.world.now
            self.end(request, b"408 Request Timeout")

    def feed(self) -> None:
        """Deliver messages to the open requests."""
        behind: int | None = None
        while self.pulls:
            request, self.touched = self.pulls[0], self.world.now
            if not self.is_listening(request.inbox):
                self.pulls.pop(0)
                continue
            if request.expires <= self.world.now:
                self.end(request, b"408 Request Timeout")
                continue
            if (message := self._next()) is None:
                if request.waits:
                    return
                self.pulls.pop(0)
                self._refuse(request.inbox, b"404 No Messages")
                continue
            if behind is None:
                behind = self._behind()
            is_new = message.sequence not in self.pending or message.sequence >= self.next
            reply = self._reply(message, behind - is_new)
            size = len(message.subject) + len(reply) + len(message.headers or b"") + len(message.payload)
            if request.bytes_left is not None and size > request.bytes_left:
                self.end(request, b"409 Message Size Exceeds MaxBytes")
                continue
            behind -= is_new
            request.left -= 1
            request.quiet_since = self.world.now
            self._give(request, message, reply)
            if request.bytes_left is not None:
                request.bytes_left -= size
            if not request.left and request in self.pulls:
                self.pulls.remove(request)
                if request.bytes_left:
                    self.end(request, b"409 Batch Completed")

    def _reply(self, message: StoredMessage, behind: int) -> bytes:
        found = self.pending.get(message.sequence)
        numbers = found.count + 1 if found else 1, message.sequence, self.delivered[0] + 1, message.time_ns, behind
        return b"$JS.ACK.%b.%b.%d.%d.%d.%d.%d" % (self.stream.name.encode(), self.name.encode(), *numbers)

    def _give(self, request: PullRequest, message: StoredMessage, reply: bytes) -> None:
        number = self.delivered[0] + 1
        if message.sequence in self.again:
            self.again.remove(message.sequence)
            self.delivered = number, self.delivered[1]
        else:
            self.next, self.delivered = message.sequence + 1, (number, message.sequence)
        if self.acknowledges:
            found = self.pending.setdefault(message.sequence, Pending(number, 0.0, 0))
            found.count, found.deadline = found.count + 1, self.world.now + self._ack_wait
            self._wake(found.deadline)
        else:
            self.floor = self.delivered
        headers, payload = message.headers, message.payload
        if self.config.get("headers_only"):
            block = (headers or b"NATS/1.0\r\n\r\n")[:-2]
            headers, payload = b"%bNats-Msg-Size: %d\r\n\r\n" % (block, len(payload)), b""
        self._deliver(request.inbox, message.subject, reply, headers, payload)
        if not self.acknowledges:
            self.stream.acknowledged(self, [message.sequence])

    def _next(self) -> StoredMessage | None:
        self.stream.expire()
        while self.again:
            if (message := self.stream.messages.get(self.again[0])) is not None:
                return message
            self._drop(self.again[0])
        if self.acknowledges and len(self.pending) >= self._most_pending:
            return None
        for message in self.stream.from_sequence(self.next):
            if self.wants(message):
                return message
            self.next = message.sequence + 1
        self.next = max(self.next, self.stream.last + 1)  # behind deleted messages at the end too
        return None

    def _behind(self) -> int:
        """The number of messages that match and were not delivered yet."""
        sequences = self.stream.sequences
        at = bisect.bisect_left(sequences, self.next)
        return sum(self.wants(self.stream.messages[each]) for each in sequences[at:])

    @property
    def _most_pending(self) -> float:
        most = self.config.get("max_ack_pending") or MOST_PENDING
        return most if most > 0 else float("inf")

    # Delivering again

    @property
    def _ack_wait(self) -> float:
        return (self.config.get("ack_wait") or 0) / NS or ACK_WAIT

    def _wake(self, at: float) -> None:
        if at < self._wakes_at:
            self._wakes_at = at
            self.world.at(at - self.world.now, self._on_deadline)

    def _on_deadline(self) -> None:
        if self.world.now < self._wakes_at - 1e-9 or self.stream.consumers.get(self.name) is not self:
            return
        self._wakes_at = float("inf")
        for at, each in sorted(self.pending.items()):
            if at in self.again:
                continue
            if each.deadline <= self.world.now + 1e-9:
                self._deliver_again(at)
            else:
                self._wake(each.deadline)
        self.feed()

    def _deliver_again(self, sequence: int) -> None:
        if 0 < (self.config.get("max_deliver") or -1) <= self.pending[sequence].count:
            self._drop(sequence)
        elif sequence not in self.again:
            bisect.insort(self.again, sequence)

    def _drop(self, sequence: int) -> None:
        self.again = [each for each in self.again if each != sequence]
        if self.pending.pop(sequence, None) is not None:
            self._settle_floor()

    def end(self, request: PullRequest, why: bytes) -> None:
        if request in self.pulls:
            self.pulls.remove(request)
        left = b"Nats-Pending-Messages: %d\r\nNats-Pending-Bytes: %d" % (request.left, request.bytes_left or 0)
        self._deliver(request.inbox, request.inbox, b"", b"NATS/1.0 %b\r\n%b\r\n\r\n" % (why, left), b"")

    def end_all(self, why: bytes) -> None:
        pulls, self.pulls = self.pulls, []
        for request in pulls:
            self._refuse(request.inbox, why)

    def _beat(self, request: PullRequest) -> None:
        if request not in self.pulls or self.stream.consumers.get(self.name) is not self:
            return
        if request.expires <= self.world.now:
            self.end(request, b"408 Request Timeout")
            return
        if self.world.now - request.quiet_since >= request.heartbeat - 1e-9:
            at = b"Nats-Last-Consumer: %d\r\nNats-Last-Stream: %d" % (self.delivered[0], self.next - 1)
            self._deliver(request.inbox, request.inbox, b"", b"NATS/1.0 100 Idle Heartbeat\r\n%b\r\n\r\n" % at, b"")
            request.quiet_since = self.world.now
        self.world.at(request.heartbeat, lambda: self._beat(request))

    # Acknowledgements

    def take_reply(self, sequence: int, word: bytes) -> None:
        """Take an acknowledgement, or another reply, to a delivered message."""
        kind, found = word[:4], self.pending.get(sequence)
        if kind == b"-NAK":
            if found is not None:
                self._deliver_again(sequence)
                self.feed()
        elif kind == b"+WPI":
            if found is not None:
                found.deadline = self.world.now + self._ack_wait
        elif kind in (b"+ACK", b"+TER", b""):
            self.acknowledge(sequence)

    def acknowledge(self, sequence: int) -> None:
        if self.config.get("ack_policy") == "all":
            taken = [each for each in self.pending if each <= sequence]
        else:
            taken = [sequence] if sequence in self.pending else []
        for each in taken:
            del self.pending[each]
        self.again = [each for each in self.again if each in self.pending]
        self._settle_floor()
        self.stream.acknowledged(self, taken)
        self.feed()

    def _settle_floor(self) -> None:
        lowest = min(self.pending, default=self.delivered[1] + 1)
        numbers = (each.number for each in self.pending.values())
        self.floor = min(numbers, default=self.delivered[0] + 1) - 1, lowest - 1

    def info(self) -> dict[str, Any]:
        return {
            "stream_name": self.stream.name,
            "name": self.name,
            "created": timestamp(self.created),
            "config": self.config,
            "delivered": {"consumer_seq": self.delivered[0], "stream_seq": self.delivered[1]},
            "ack_floor": {"consumer_seq": self.floor[0], "stream_seq": self.floor[1]},
            "num_ack_pending": len(self.pending),
            "num_redelivered": sum(each.count > 1 for each in self.pending.values()),
            "num_pending": self._behind(),
            "num_waiting": len(self.pulls),
        }


def filters_of(config: dict[str, Any]) -> list[Words]:
    named = config.get("filter_subjects") or ([config["filter_subject"]] if config.get("filter_subject") else [])
    return [each.encode().split(b".") for each in named]


def check_config(config: dict[str, Any]) -> None:
    """Check a configuration. Raises ApiRefusal if no stream takes such a consumer."""
    policy, start = config["deliver_policy"], config.get("opt_start_seq")
    if policy == "by_start_sequence" and not start:
        why = "deliver by start sequence, but optional start sequence is not set"
        raise ApiRefusal(400, 10094, f"consumer delivery policy is {why}")
    if policy in ("all", "last", "new") and start:
        why = f"deliver {policy}, but optional start sequence is also set"
        raise ApiRefusal(400, 10094, f"consumer delivery policy is {why}")
    if any(patterns_meet(one, other) for one, other in combinations(filters_of(config), 2)):
        raise ApiRefusal(400, 10138, "consumer subject filters cannot overlap")


def check_new(stream: Stream, name: str, config: dict[str, Any]) -> None:
    """Check a new consumer. Raises ApiRefusal if the stream does not take it."""
    if stream.retention != WORK_QUEUE:
        return
    if config["ack_policy"] == "none":
        raise ApiRefusal(400, 10084, "consumer in pull mode requires explicit ack policy on workqueue stream")
    if config["ack_policy"] != "explicit":
        raise ApiRefusal(400, 10098, "workqueue stream requires explicit ack")
    if config["deliver_policy"] != "all":
        raise ApiRefusal(400, 10101, "consumer must be deliver all on workqueue stream")
    filters = filters_of(config)
    for other in stream.consumers.values():
        if not filters or not other.filters:
            raise ApiRefusal(400, 10099, "multiple non-filtered consumers not allowed on workqueue stream")
        if any(patterns_meet(mine, its) for mine in filters for its in other.filters):
            raise ApiRefusal(400, 10100, "filtered consumer not unique on workqueue stream")
