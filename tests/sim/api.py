"""The answers of the JetStream API to requests about streams and consumers."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from tests.sim.consumers import Consumer, check_new
from tests.sim.streams import ApiRefusal, StoredMessage, Stream, matches, timestamp

if TYPE_CHECKING:
    from tests.sim.nats import SimNats

Document = dict[str, Any]
DEFAULTS: Document = {"retention": "limits", "storage": "file", "num_replicas": 1, "max_age": 0}
NEVER = "0001-01-01T00:00:00Z"


def answer(nats: SimNats, words: list[str], asked: Document) -> Document:
    """Raises ApiRefusal."""
    match words:
        case ["INFO"]:
            return {"memory": 0, "storage": 0, "streams": len(nats.streams)}
        case ["STREAM", action, *rest]:
            return _of_stream(nats, action, rest, asked)
        case ["CONSUMER", action, name, *rest]:
            return _of_consumer(nats, action, _stream(nats, name), rest, asked)
    raise ApiRefusal(503, 10039, f"simulation: no such call {'.'.join(words)}")


def _stream(nats: SimNats, name: str) -> Stream:
    if (stream := nats.streams.get(name)) is None:
        raise ApiRefusal(404, 10059, "stream not found")
    stream.expire()
    return stream


def _of_stream(nats: SimNats, action: str, rest: list[str], asked: Document) -> Document:
    match action, rest:
        case "CREATE", [name]:
            return _create_stream(nats, name, asked)
        case "NAMES", []:
            return {"streams": sorted(nats.streams), "total": len(nats.streams)}
        case "UPDATE", [name]:
            _stream(nats, name).configure(asked)
            return stream_info(nats.streams[name], {})
        case "INFO", [name]:
            return stream_info(_stream(nats, name), asked)
        case "DELETE", [name]:
            stream = _stream(nats, name)
            del nats.streams[name]
            for consumer in stream.consumers.values():
                consumer.end_all(b"409 Consumer Deleted")
            return {"success": True}
        case "PURGE", [name]:
            return _purge(_stream(nats, name), asked)
        case "MSG", ["DELETE", name]:
            stream = _stream(nats, name)
            if asked["seq"] not in stream.messages:
                raise ApiRefusal(404, 10043, "message not found")
            stream.remove(asked["seq"], "deleted")
            return {"success": True}
        case "MSG", ["GET", name]:
            return {"message": _stored(_stream(nats, name), asked)}
    raise ApiRefusal(503, 10039, f"simulation: no such call of a stream: {action}")


def _create_stream(nats: SimNats, name: str, asked: Document) -> Document:
    if (found := nats.streams.get(name)) is not None:
        if {**found.config, **asked} != found.config:
            raise ApiRefusal(400, 10058, "stream name already in use with a different configuration")
        return stream_info(found, {})
    config = {"subjects": [name], **DEFAULTS, **asked, "name": name}
    nats.streams[name] = Stream(nats.world, config, nats.taps.get(name))
    return {**stream_info(nats.streams[name], {}), "did_create": True}


def _purge(stream: Stream, asked: Document) -> Document:
    upto = asked.get("seq", stream.last + 1)
    gone = [each for each in stream.sequences if each < upto]
    for sequence in gone:
        stream.remove(sequence, "deleted")
    if upto > stream.last + 1:
        stream.last, stream.first = upto - 1, upto
    return {"success": True, "purged": len(gone)}


def stream_info(stream: Stream, asked: Document) -> Document:
    first = stream.messages[stream.sequences[0]] if stream.sequences else None
    state: Document = {
        "messages": len(stream.sequences),
        "bytes": stream.size,
        "first_seq": stream.first,
        "last_seq": stream.last,
        "first_ts": timestamp(first.time_ns) if first else NEVER,
        "last_ts": timestamp(stream.last_ns) if stream.last_ns else NEVER,
        "num_subjects": len(stream.by_subject),
        "consumer_count": len(stream.consumers),
    }
    if stream.sequences and (deleted := stream.last - stream.first + 1 - len(stream.sequences)):
        state["num_deleted"] = deleted
    if "subjects_filter" in asked:
        pattern = asked["subjects_filter"].encode().split(b".")
        found = sorted(each for each in stream.by_subject if matches(pattern, each.split(b".")))
        state["subjects"] = {each.decode(): len(stream.by_subject[each]) for each in found[asked.get("offset", 0) :]}
    if asked.get("deleted_details"):
        state["deleted"] = [n for n in range(stream.first, stream.last + 1) if n not in stream.messages]
    times = {"created": timestamp(stream.created), "ts": timestamp(stream.world.time_ns())}
    return {"config": dict(stream.config), "state": state, **times}


def _stored(stream: Stream, asked: Document) -> Document:
    found: StoredMessage | None
    if "last_by_subj" in asked:
        same = stream.by_subject.get(asked["last_by_subj"].encode())
        found = stream.messages[same[-1]] if same else None
    elif "next_by_subj" in asked:
        pattern = asked["next_by_subj"].encode().split(b".")
        behind = stream.from_sequence(asked.get("seq", 1))
        found = next((each for each in behind if matches(pattern, each.subject.split(b"."))), None)
    else:
        found = stream.messages.get(asked["seq"])
    if found is None:
        raise ApiRefusal(404, 10037, "no message found")
    document = {
        "subject": found.subject.decode("utf-8", "replace"),
        "seq": found.sequence,
        "time": timestamp(found.time_ns),
        "data": base64.b64encode(found.payload).decode(),
    }
    return document if found.headers is None else {**document, "hdrs": base64.b64encode(found.headers).decode()}


def _of_consumer(nats: SimNats, action: str, stream: Stream, rest: list[str], asked: Document) -> Document:
    match action, rest:
        case "CREATE", [name, *_]:
            return _create_consumer(nats, stream, name, asked["config"])
        case "NAMES", []:
            names = [each for each in [*stream.consumers] if nats.consumer(stream, each) is not None]
            return {"consumers": names[asked.get("offset", 0) :], "total": len(names)}
        case "LIST", []:
            found = [each.info() for each in stream.consumers.values()]
            return {"consumers": found[asked.get("offset", 0) :], "total": len(found)}
    if (consumer := nats.consumer(stream, rest[0])) is None:
        raise ApiRefusal(404, 10014, "consumer not found")
    match action:
        case "INFO":
            return consumer.info()
        case "DELETE":
            stream.forget_consumer(consumer.name)
            consumer.end_all(b"409 Consumer Deleted")
            return {"success": True}
    raise ApiRefusal(503, 10039, f"simulation: no such call of a consumer: {action}")


def _create_consumer(nats: SimNats, stream: Stream, name: str, config: Document) -> Document:
    if (found := stream.consumers.get(name)) is not None:
        if found.config != config:
            raise ApiRefusal(400, 10148, "consumer already exists")
        return found.info()
    check_new(stream, name, config)
    consumer = stream.consumers[name] = Consumer(stream, name, config, nats.deliver)
    consumer.is_listening = nats.is_listening
    return consumer.info()
