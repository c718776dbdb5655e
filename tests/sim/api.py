"""The answers of the JetStream API to requests about streams and consumers."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

from tests.sim.consumers import Consumer, check_config, check_new
from tests.sim.streams import ApiRefusal, StoredMessage, Stream, matches, patterns_meet, timestamp

if TYPE_CHECKING:
    from tests.sim.nats import SimNats

Document = dict[str, Any]
DEFAULTS: Document = {"retention": "limits", "storage": "file", "num_replicas": 1, "max_age": 0}
#: The fields beside the error in an answer to these calls.
EMPTY: dict[str, Document] = {"CONSUMER.NAMES": {"consumers": []}, "CONSUMER.LIST": {"consumers": []}}
NEVER = "0001-01-01T00:00:00Z"


class UnknownCall(Exception):
    """An API call that no server knows or answers."""


def answer(nats: SimNats, words: list[str], asked: Document) -> Document:
    """Return the answer to one request. Raises ApiRefusal."""
    match words:
        case ["INFO"]:
            return {"memory": 0, "storage": 0, "streams": len(nats.streams)}
        case ["STREAM", action, *rest]:
            return _of_stream(nats, action, rest, asked)
        case ["CONSUMER", action, name, *rest]:
            return _of_consumer(nats, action, _stream(nats, name), rest, asked)
    raise UnknownCall(".".join(words))


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
            pattern = asked.get("subject", ">").encode().split(b".")
            names = sorted(each.name for each in nats.streams.values() if _overlap(pattern, each.patterns))
            return {"streams": names, "total": len(names)}
        case "UPDATE", [name]:
            _stream(nats, name).configure(_update(nats.streams[name], asked))
            return stream_info(nats.streams[name], {})
        case "INFO", [name]:
            return stream_info(_stream(nats, name), asked)
        case "RESTORE", [name]:
            return nats.restores.begin(name, asked)
        case "DELETE", [name]:
            stream = _stream(nats, name)
            del nats.streams[name]
            for consumer in stream.consumers.values():
                consumer.end_all(b"409 Consumer Deleted")
            at = timestamp(nats.world.time_ns())
            body = json.dumps({"stream": name, "action": "delete", "timestamp": at}).encode()
            nats.publish(f"$JS.EVENT.ADVISORY.STREAM.DELETED.{name}".encode(), b"", None, body)
            return {"success": True}
        case "PURGE", [name]:
            return _purge(_stream(nats, name), asked)
        case "MSG", ["DELETE", name]:
            stream = _stream(nats, name)
            if stream.config.get("deny_delete"):
                raise ApiRefusal(500, 10057, "message delete not permitted")
            if not 0 < asked["seq"] <= stream.last:
                raise ApiRefusal(500, 10057, "stream store EOF")
            if asked["seq"] not in stream.messages:
                raise ApiRefusal(400, 10043, f"sequence {asked['seq']} not found")
            stream.remove(asked["seq"], "deleted")
            return {"success": True}
        case "MSG", ["GET", name]:
            return {"message": _stored(_stream(nats, name), asked)}
    raise UnknownCall(f"STREAM.{action}")


def _create_stream(nats: SimNats, name: str, asked: Document) -> Document:
    if asked.get("name") != name:
        raise ApiRefusal(400, 10056, "stream name in subject does not match request")
    if (found := nats.streams.get(name)) is not None:
        if _completed(asked) != found.config:
            raise ApiRefusal(400, 10058, "stream name already in use with a different configuration")
        return {**stream_info(found, {}), "did_create": True}
    config = _completed(asked)
    patterns = [each.encode().split(b".") for each in config["subjects"]]
    if any(_overlap(pattern, other.patterns) for other in nats.streams.values() for pattern in patterns):
        raise ApiRefusal(400, 10065, "subjects overlap with an existing stream")
    nats.streams[name] = Stream(nats.world, config, nats.taps.get(name))
    return {**stream_info(nats.streams[name], {}), "did_create": True}


def _completed(asked: Document) -> Document:
    return {"subjects": [asked["name"]], **DEFAULTS, **asked}


def _update(stream: Stream, asked: Document) -> Document:
    """Return the configuration that an update asks for: all of it, not only the changes. Raises ApiRefusal."""
    if not asked.get("name"):
        raise ApiRefusal(500, 10052, "stream name is required and can not contain '.', '*', '>', '\\', '/'")
    if asked["name"] != stream.name:
        raise ApiRefusal(400, 10056, "stream name in subject does not match request")
    config = _completed(asked)
    if config["storage"] != stream.config["storage"]:
        raise ApiRefusal(500, 10052, "stream configuration update can not change storage type")
    return config


def _overlap(pattern: list[bytes], others: list[list[bytes]]) -> bool:
    return any(patterns_meet(pattern, each) for each in others)


def _purge(stream: Stream, asked: Document) -> Document:
    if stream.config.get("deny_purge"):
        raise ApiRefusal(500, 10110, "stream purge not permitted")
    if asked.get("keep") and asked.get("seq"):
        raise ApiRefusal(400, 10003, "bad request")
    upto = asked.get("seq") or stream.last + 1
    pattern = asked.get("filter", ">").encode().split(b".")
    gone = [n for n in stream.sequences if n < upto and matches(pattern, stream.messages[n].subject.split(b"."))]
    gone = gone[: len(gone) - asked.get("keep", 0)] if len(gone) > asked.get("keep", 0) else []
    for sequence in gone:
        stream.remove(sequence, "deleted")
    if upto > stream.last + 1:
        stream.last, stream.first = upto - 1, upto
    if "filter" not in asked:
        for consumer in stream.consumers.values():
            consumer.purged(stream.first)
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
        if state["deleted"]:
            state["num_deleted"] = len(state["deleted"])
    times = {"created": timestamp(stream.created), "ts": timestamp(stream.world.time_ns())}
    return {"config": dict(stream.config), "state": state, **times}


def found_message(stream: Stream, asked: Document) -> StoredMessage | None:
    """Return the message that a request asks for, or None. Raises ApiRefusal if it asks for nothing."""
    if "last_by_subj" in asked:
        subject = asked["last_by_subj"].encode()
        if (same := stream.by_subject.get(subject)) is not None:
            return stream.messages[same[-1]]
        newest = [each[-1] for key, each in stream.by_subject.items() if matches(subject.split(b"."), key.split(b"."))]
        return stream.messages[max(newest)] if newest else None
    if "next_by_subj" in asked:
        pattern = asked["next_by_subj"].encode().split(b".")
        behind = stream.from_sequence(asked.get("seq", 1))
        return next((each for each in behind if matches(pattern, each.subject.split(b"."))), None)
    if not asked.get("seq"):
        raise ApiRefusal(400, 10003, "bad request")
    return stream.messages.get(asked["seq"])


def _stored(stream: Stream, asked: Document) -> Document:
    if (found := found_message(stream, asked)) is None:
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
        case "CREATE", [name, *subject]:
            if subject and asked["config"].get("filter_subjects"):
                raise ApiRefusal(400, 10137, "consumer with multiple subject filters cannot use subject based API")
            return _create_consumer(nats, stream, name, asked["config"], asked.get("action", ""))
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
    raise UnknownCall(f"CONSUMER.{action}")


def _create_consumer(nats: SimNats, stream: Stream, name: str, asked: Document, action: str) -> Document:
    config = {"deliver_policy": "all", "ack_policy": "none", **asked}
    if nats.max_request_batch:
        config.setdefault("max_batch", nats.max_request_batch)
    check_config(config)
    found = nats.consumer(stream, name)
    if found is None:
        if action == "update":
            raise ApiRefusal(400, 10149, "consumer does not exist")
        check_new(stream, name, config)
        consumer = stream.consumers[name] = Consumer(stream, name, config, nats.deliver)
        consumer.is_listening = nats.is_listening
        return consumer.info()
    if found.config != config:
        if action == "create":
            raise ApiRefusal(400, 10148, "consumer already exists")
        found.update(config)
    return found.info()
