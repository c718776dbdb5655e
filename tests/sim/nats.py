"""A model of nats-server behind the client's own socket: the text protocol, and the API of JetStream.

Faults: restarts, seconds without a leader, answers that are lost after they were applied, requests that are late, a
deposed leader that answers STREAM.INFO as it was, a tail that was never synced.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.sim import api
from tests.sim.consumers import Consumer
from tests.sim.network import Link
from tests.sim.restores import PREFIX, Restores
from tests.sim.streams import ApiRefusal, Stream, StreamTap, Words, matches, publish, timestamp
from tests.sim.world import World

MAX_PAYLOAD = 1 << 20
NO_LEADER = {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}


@dataclass
class Connection:
    """The server's end of a link. `near`: the subscriptions with the same first two words, by these of a subject;
    `stale`: until this time a deposed leader describes streams on it, in this way.
    """

    rest: bytes = b""
    subscriptions: dict[bytes, Words] = field(default_factory=dict)
    near: dict[tuple[bytes, ...], list[tuple[bytes, Words]]] = field(default_factory=dict)
    stale: tuple[float, dict[str, dict[str, Any]]] = (0.0, {})


def _is_near(pattern: Words, key: tuple[bytes, ...]) -> bool:
    return all(each in (b"*", b">", word) for each, word in zip(pattern, key, strict=False))


class SimNats:
    """One simulated nats-server.

    Chances: `lost_answers` that an answer is lost, `lost_deliveries` the same for a message of a consumer,
    `late_requests` that a request of the API is late, by `LATEST` seconds at most.
    """

    LATEST = 8.0

    def __init__(self, world: World, port: int = 4222, version: str = "2.15.0") -> None:
        self.world, self.port, self.version, self.is_up = world, port, version, True
        self.rng = world.chance(f"nats/{port}")
        self.streams: dict[str, Stream] = {}
        self.connections: dict[Link, Connection] = {}
        self.taps: dict[str, StreamTap] = {}
        self.lost_answers = self.late_requests = self.lost_deliveries = 0.0
        self.leaderless: dict[str, float] = {}  # by stream, until this time
        self.requests, self.restores = 0, Restores(self)
        self.max_request_batch = 0  # messages of one request of a consumer, at most
        world.listeners[port] = self

    # Connections

    def accept(self, link: Link) -> None:
        self.connections[link] = Connection()
        about = {"server_id": "SIM", "server_name": "sim", "version": self.version, "proto": 1, "headers": True}
        more = {"max_payload": MAX_PAYLOAD, "jetstream": True, "client_id": 1, "host": "127.0.0.1", "port": self.port}
        link.down(b"INFO " + json.dumps({**about, **more}).encode() + b"\r\n")

    def lost(self, link: Link) -> None:
        self.connections.pop(link, None)

    def stop(self) -> None:
        self.is_up = False
        self.world.note("nats stops")
        for link in [*self.connections]:
            link.cut()
            link.is_cut = True
        self.connections.clear()
        self.restores.open.clear()

    def start(self) -> None:
        self.is_up = True
        self.world.note("nats starts")
        for stream in self.streams.values():
            stream.drop_batches()
            for name, consumer in [*stream.consumers.items()]:
                consumer.pulls.clear()
                if consumer.config.get("mem_storage"):
                    stream.forget_consumer(name)

    def depose(self, names: Iterable[str], until: float, stale_until: float) -> None:
        """Leave these streams without a leader until `until`: they take nothing, and most requests get no answer. Until
        `stale_until` the deposed leader describes the streams as of now, on connections that are open now.
        """
        for name in names:
            self.leaderless[name] = until
            self.streams[name].drop_batches()
        described = {name: api.stream_info(stream, {}) for name, stream in self.streams.items()}
        for connection in self.connections.values():
            connection.stale = stale_until, described

    def received(self, link: Link, data: bytes) -> None:
        if (connection := self.connections.get(link)) is None:
            return
        data, at = connection.rest + data, 0
        while (end := data.find(b"\r\n", at)) >= 0:
            line = data[at:end]
            if (kind := line[:4]) in (b"HPUB", b"PUB "):
                words = line.split(b" ")
                has_headers, size = kind == b"HPUB", int(words[-1])
                if len(data) < end + 4 + size:
                    break
                split = end + 2 + (int(words[-2]) if has_headers else 0)
                reply = words[2] if len(words) == (5 if has_headers else 4) else b""
                at = end + 4 + size
                self._published(
                    link, words[1], reply, data[end + 2 : split] if has_headers else None, data[split : at - 2]
                )
            else:
                at = end + 2
                if kind == b"PING":
                    link.down(b"PONG\r\n")
                elif kind == b"SUB ":
                    words = line.split()
                    connection.subscriptions[words[-1]] = words[1].split(b".")
                    connection.near.clear()
                elif kind == b"UNSU":
                    connection.subscriptions.pop(line.split()[1], None)
                    connection.near.clear()
            if link not in self.connections:
                return
        connection.rest = data[at:]

    def is_listening(self, subject: bytes) -> bool:
        return next(self._subscribed(subject), None) is not None

    def _subscribed(self, subject: bytes) -> Iterator[tuple[Link, bytes]]:
        words = subject.split(b".")
        key = tuple(words[:2])
        for link, connection in self.connections.items():
            if (near := connection.near.get(key)) is None:
                near = connection.near[key] = [s for s in connection.subscriptions.items() if _is_near(s[1], key)]
            for sid, pattern in near:
                if matches(pattern, words):
                    yield link, sid

    def deliver(self, to: bytes, subject: bytes, reply: bytes, headers: bytes | None, payload: bytes) -> int:
        """Deliver a message to every subscription on `to`, shown as on `subject`; return their number."""
        if self.lost_deliveries and reply.startswith(b"$JS.ACK.") and self.rng.random() < self.lost_deliveries:
            return 1
        found, size, answer_to = 0, len(payload), b" " + reply if reply else b""
        for link, sid in self._subscribed(to):
            found += 1
            if headers is None:
                link.down(b"MSG %b %b%b %d\r\n%b\r\n" % (subject, sid, answer_to, size, payload))
            else:
                sizes = len(headers), len(headers) + size
                link.down(b"HMSG %b %b%b %d %d\r\n%b%b\r\n" % (subject, sid, answer_to, *sizes, headers, payload))
        return found

    def answer(self, reply: bytes, document: dict[str, Any]) -> None:
        """Answer a request, unless the answer is lost. An empty document is an empty payload."""
        if reply and not (self.lost_answers and self.rng.random() < self.lost_answers):
            self.deliver(reply, reply, b"", None, json.dumps(document).encode() if document else b"")

    # Messages

    def _published(self, link: Link, subject: bytes, reply: bytes, headers: bytes | None, payload: bytes) -> None:
        if subject.startswith(b"$JS.API."):
            delay = self.rng.uniform(0, 0.0005)
            if self.late_requests and self.rng.random() < self.late_requests:
                delay = self.rng.uniform(0, self.LATEST)
            name = subject[8:].decode()
            self.world.at(delay, lambda: self._asked(link, name, reply, payload))
        elif subject.startswith(b"$JS.ACK."):
            words = subject.split(b".")
            stream = self.streams.get(words[2].decode())
            if stream is not None and (consumer := stream.consumers.get(words[3].decode())) is not None:
                consumer.take_reply(int(words[5]), payload)
                if reply:
                    self.answer(reply, {})
            elif reply:
                self.answer_nobody(reply, subject)
        elif subject.startswith(PREFIX):
            if (document := self.restores.take(subject, payload)) is None:
                self.answer_nobody(reply, subject)
            else:
                self.answer(reply, document)
        else:
            self.publish(subject, reply, headers, payload)

    def publish(self, subject: bytes, reply: bytes, headers: bytes | None, payload: bytes) -> None:
        """Take a message from any client."""
        listening, words, is_taken = self.deliver(subject, subject, reply, headers, payload), subject.split(b"."), False
        for stream in self.streams.values():
            if stream.takes(words):
                is_taken = True
                if not self._is_leaderless(stream.name):
                    publish(stream, subject, reply, headers, payload, lambda document: self.answer(reply, document))
                    for consumer in [*stream.consumers.values()]:
                        consumer.feed()
        if reply and not is_taken and not listening:
            self.answer_nobody(reply, subject)

    def answer_nobody(self, reply: bytes, subject: bytes) -> None:
        """Answer a request on a subject without subscribers."""
        self.deliver(reply, reply, b"", b"NATS/1.0 503\r\nNats-Subject: %b\r\n\r\n" % subject, b"")

    # The API

    def _is_leaderless(self, stream: str) -> bool:
        return self.world.now < self.leaderless.get(stream, 0.0)

    def _asked(self, link: Link, name: str, reply: bytes, payload: bytes) -> None:
        if not self.is_up:
            return
        self.requests += 1
        words = name.split(".")
        stale = self._stale(link, words)
        if stale is None and any(map(self._is_leaderless, words)):
            if self.rng.random() < 0.5:
                self.answer(reply, {"error": NO_LEADER})
            return
        if words[:3] == ["CONSUMER", "MSG", "NEXT"]:
            self._pulled(words[3], words[4], reply, payload)
            return
        if words[:2] == ["DIRECT", "GET"]:
            self._read_directly(words[2], ".".join(words[3:]), reply, payload)
            return
        self.world.note(f"nats asked {name}")
        try:
            document = stale or api.answer(self, words, json.loads(payload) if payload else {})
        except api.UnknownCall as error:
            self.world.note(f"nats answers nothing to {error}")
            return
        except ApiRefusal as error:
            document = {"error": error.body, **api.EMPTY.get(".".join(words[:2]), {})}
        except json.JSONDecodeError:
            document = {"error": {"code": 400, "err_code": 10025, "description": "invalid JSON"}}
        self.answer(reply, document)

    def _stale(self, link: Link, words: list[str]) -> dict[str, Any] | None:
        connection = self.connections.get(link)
        if connection is None or self.world.now >= connection.stale[0] or words[:2] != ["STREAM", "INFO"]:
            return None
        return connection.stale[1].get(words[2]) if self.rng.random() < 0.5 else None

    def _pulled(self, stream_name: str, consumer_name: str, reply: bytes, payload: bytes) -> None:
        stream = self.streams.get(stream_name)
        consumer = None if stream is None else self.consumer(stream, consumer_name)
        if consumer is None:
            self.answer_nobody(reply, f"$JS.API.CONSUMER.MSG.NEXT.{stream_name}.{consumer_name}".encode())
        else:
            consumer.pull(reply, json.loads(payload))

    def _read_directly(self, stream_name: str, subject: str, reply: bytes, payload: bytes) -> None:
        stream = self.streams.get(stream_name)
        if stream is None or not stream.config.get("allow_direct"):
            self.answer_nobody(reply, f"$JS.API.DIRECT.GET.{stream_name}".encode())
            return
        stream.expire()
        asked = {"last_by_subj": subject} if subject else json.loads(payload or b"{}")
        try:
            found = api.found_message(stream, asked)
        except ApiRefusal:
            self.deliver(reply, reply, b"", b"NATS/1.0 408 Empty Request\r\n\r\n", b"")
            return
        if found is None:
            self.deliver(reply, reply, b"", b"NATS/1.0 404 Message Not Found\r\n\r\n", b"")
            return
        own = (found.headers or b"NATS/1.0\r\n\r\n")[:-2]
        about = stream.name.encode(), found.subject, found.sequence, timestamp(found.time_ns).encode()
        lines = b"Nats-Stream: %b\r\nNats-Subject: %b\r\nNats-Sequence: %d\r\nNats-Time-Stamp: %b\r\n\r\n" % about
        self.deliver(reply, reply, b"", own + lines, found.payload)

    def consumer(self, stream: Stream, name: str) -> Consumer | None:
        """Return the consumer; None if it does not exist, or was idle for too long."""
        found = stream.consumers.get(name)
        if found is not None and found.is_idle:
            stream.forget_consumer(name)
            return None
        return found
