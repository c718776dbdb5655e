"""Bucket notifications as Amazon and MinIO document them, other documents, and heartbeats."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.archive.documents import ChainDocument, ChainStore
from common.archive.heartbeats import ChainHeartbeat, HeartbeatObject
from common.archive.keys import Layout, SegmentName
from common.chain import Chain
from common.check_cli import _read_heartbeats
from common.clock import SystemClock
from common.errors import Unavailable
from common.objects.local import LocalObjects
from common.sequences import SequenceRange
from common.service.process import ThreadPool
from common.tasks import Stop
from egress.deps import Intervals, Tuning
from egress.heartbeats import ProcessHeartbeat
from ingress.discovery import notifications
from ingress.discovery.notifications import WrittenObject, chain_of, chains_in, parse_notification
from ingress.discovery.sites import Heartbeats
from tests.support.basics import soon
from tests.support.clock import ManualClock
from tests.support.stores import FaultyStore

LAYOUT = Layout("data")
CHAIN = Chain("us-east", "NODES")
ODD = Chain("us-east", "NODE DATA+%25=é".replace(" ", "_"), 3, 7)
BUCKET = "amzn-s3-demo-bucket"


def segment_key(chain: Chain = CHAIN, level: int = 0) -> str:
    return LAYOUT.segment(SegmentName(chain, level, SequenceRange(1, 9), "0123456789abcdef"))


def amazon(key: str, name: str = "ObjectCreated:Put", bucket: str = BUCKET, **more: Any) -> dict[str, Any]:
    """Return Amazon's event message structure, version 2.1, with the key url-encoded as documented."""
    stored = {"key": quote_plus(key), "size": 1024, "eTag": "d41d8cd98f00b204e9800998ecf8427e", "sequencer": "0055AE"}
    owned = {"name": bucket, "ownerIdentity": {"principalId": "A3NL1KOZZKExample"}, "arn": f"arn:aws:s3:::{bucket}"}
    head = {"eventVersion": "2.1", "eventSource": "aws:s3", "awsRegion": "us-west-2", "eventName": name}
    s3 = {"s3SchemaVersion": "1.0", "configurationId": "testConfigRule", "bucket": owned, "object": stored}
    return {**head, "eventTime": "1970-01-01T00:00:00.000Z", "s3": s3, **more}


def minio(key: str, name: str = "s3:ObjectCreated:Put", bucket: str = "floe") -> dict[str, Any]:
    """Return MinIO's notification, as its guide shows it on NATS."""
    more = {"eventVersion": "2.0", "eventSource": "minio:s3", "source": {"userAgent": "MinIO (linux; amd64)"}}
    return {"EventName": name, "Key": f"{bucket}/{key}", "Records": [amazon(key, name, bucket, **more)]}


def event_bridge(key: str, kind: str = "Object Created") -> dict[str, Any]:
    """Return Amazon's EventBridge message structure: the key is not encoded."""
    detail = {"version": "0", "bucket": {"name": BUCKET}, "object": {"key": key, "size": 5}, "reason": "PutObject"}
    return {"version": "0", "detail-type": kind, "source": "aws.s3", "region": "ca-central-1", "detail": detail}


def sns(document: Any) -> dict[str, Any]:
    """Return the document as SNS hands it to a queue without raw delivery."""
    head = {"Type": "Notification", "TopicArn": "arn:aws:sns:us-west-2:123456789012:MyTopic"}
    return {**head, "Subject": "Amazon S3 Notification", "Message": json.dumps(document), "SignatureVersion": "1"}


TEST_EVENT = {"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": BUCKET, "RequestId": "5582815E1AEA5ADF"}


def named(document: Any, bucket: str = BUCKET) -> set[Chain] | None:
    notice = parse_notification(json.dumps(document).encode())
    return None if notice is None else chains_in(notice, bucket, LAYOUT)


@pytest.mark.parametrize("chain", [CHAIN, ODD], ids=str)
def test_documents_of_every_kind_name_the_chain(chain: Chain) -> None:
    for key in (segment_key(chain), segment_key(chain, 2), LAYOUT.tail(chain), LAYOUT.chain_document(chain)):
        records = {"Records": [amazon(key)]}, {"Records": [amazon(key, "ObjectCreated:CompleteMultipartUpload")]}
        for document in (*records, sns(records[0]), event_bridge(key), sns(event_bridge(key))):
            assert named(document) == {chain}
        assert named(minio(key), "floe") == {chain}


def test_keys_may_be_encoded_as_the_server_likes_and_a_space_is_a_plus() -> None:
    key = segment_key(ODD)
    assert "%" in key
    for as_written in (quote_plus(key), quote(key), quote(key, safe="/="), key):
        record = amazon("")
        record["s3"]["object"]["key"] = as_written
        assert ODD in (named({"Records": [record]}) or ())
    [found] = parse_notification(json.dumps({"Records": [amazon("red flower.jpg")]}).encode()) or []
    assert found == WrittenObject(BUCKET, ("red flower.jpg", "red+flower.jpg"))


def test_an_accepted_gap_wakes_its_chain_and_several_records_name_several_chains() -> None:
    assert chain_of(f"{LAYOUT.gaps_prefix(CHAIN)}{9:020d}-{1:020d}.json", LAYOUT) == CHAIN
    chains = {Chain("us-east", "NODES", 0, n) for n in range(50)}
    assert named({"Records": [amazon(segment_key(chain)) for chain in chains]}) == chains


def test_what_is_no_news_names_nothing() -> None:
    for document in (
        TEST_EVENT,
        sns(TEST_EVENT),
        {"Records": []},
        {"Records": [amazon(segment_key(), "ObjectRemoved:Delete")]},
        {"Records": [amazon(segment_key(), bucket="another")]},
        {"Records": [amazon("other/" + segment_key()), amazon(segment_key()[1:])]},
        {"Records": [amazon("data/_floe/tombstones/x"), amazon(f"{LAYOUT.states_prefix(CHAIN)}{1:020d}-0")]},
        {"Records": [None, 1, "x", [], {}, {"eventName": 5}, {"eventName": "ObjectCreated:Put", "s3": []}]},
        {"Records": [{"eventName": "ObjectCreated:Put", "s3": {"bucket": {"name": BUCKET}}}]},
        event_bridge(segment_key(), "Object Deleted"),
        {"detail": {}},
    ):
        assert named(document) == set()


def test_garbage_is_no_notification_and_raises_nothing() -> None:
    for raw in (
        *(b"", b"null", b"5", b"[]", b"{}", b"{", b"\xff\xfe", b'{"Records": {}}', b'{"Message": 5}'),
        b'{"Message": "\\ud800"}',
        b'{"Records": [' + b"9" * 100_000 + b"]}",
        b"[" * 900_000,
        b'{"Records":' * 80_000,
        b'{"Records":[{"eventName":"ObjectCreated:Put","s3":' + b"[" * 100_000,
    ):
        assert (parse_notification(raw), parse_notification(b" " * (notifications.MAX_NOTIFICATION_BYTES + 1))) == (
            None,
            None,
        )


def test_envelopes_in_envelopes_are_opened_to_a_depth() -> None:
    document: Any = {"Records": [amazon(segment_key())]}
    for _ in range(3):
        document = sns(document)
        assert named(document) == {CHAIN}
    assert named(sns(document)) is None


NAMES = ["Records", "Message", "detail", "detail-type", "Event", "s3", "object", "key", "bucket", "name", "eventName"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=20,
)


@given(JSON, st.binary(max_size=200))
def test_no_document_and_no_bytes_raise(document: Any, raw: bytes) -> None:
    named(document)
    parse_notification(raw)


# Heartbeats

SEEN = Chain("us-east", "NODES")
PAIR = (SEEN.site, SEEN.feed)
PAIRS = frozenset({PAIR})


def away(*_args: Any, **_kwargs: Any) -> Any:
    raise Unavailable("away")


async def test_while_the_store_is_away_or_hangs_nobody_becomes_silent_and_the_dead_stay_so(tmp_path: Path) -> None:
    store, clock = FaultyStore(LocalObjects(tmp_path)), ManualClock(time.time())
    documents = ChainStore(store, Layout(""))  # type: ignore[arg-type]
    documents.write_heartbeat(
        "host", HeartbeatObject(SEEN.site, "o", 0.0, (ChainHeartbeat("reading", 0.0, chain=SEEN),))
    )
    sites = Heartbeats(documents, ThreadPool("test", 1), clock, 300.0)
    is_away, hangs = False, 0.0

    def listed(real: Any, *args: Any, **more: Any) -> Any:
        clock.advance(hangs)
        return (away if is_away else real)(*args, **more)

    store.on("list", listed)

    async def look(seconds: float) -> bool:
        clock.advance(seconds)
        await sites.read(PAIRS)
        return sites.is_silent(sites.heartbeat_of(SEEN))

    assert not await look(0)
    assert not await look(60)
    is_away = True
    for seconds in (*[0.0] * 6, 400.0):
        hangs = seconds
        with pytest.raises(Unavailable):
            await look(60)
    is_away, hangs = False, 0.0
    assert not await look(60), "nobody could put anything there"
    assert not await look(120)
    assert await look(120), "it stays away while the store answers"
    is_away = True
    with pytest.raises(Unavailable):
        await look(60)
    is_away = False
    assert await look(60)


@pytest.mark.parametrize(("partitions", "counts"), [(1, False), (2, True)])
async def test_a_silent_partition_counts_only_while_its_feed_has_it(
    tmp_path: Path, partitions: int, counts: bool
) -> None:
    clock, documents = ManualClock(time.time()), ChainStore(LocalObjects(tmp_path), Layout(""))
    sites, former, new = Heartbeats(documents, ThreadPool("t", 1), clock, 300.0), Chain(*PAIR, 0, 1), Chain(*PAIR, 1)
    documents.create_chain(new, ChainDocument((), partitions, 1))
    for chain, turn in ((former, 1), (new, 1), (new, 2)):
        beat = HeartbeatObject(SEEN.site, "o", turn, (ChainHeartbeat("stopped", turn, chain=chain),))
        documents.write_heartbeat(f"host-{chain.incarnation}", beat)
        await sites.read(PAIRS)
        assert sites.heartbeat_of(chain) is not None, "a live process counts in any case"
        clock.advance(3600)
    assert (sites.heartbeat_of(former) is not None) is counts
    assert _read_heartbeats(documents, clock.now(), None).keys() == {new, *([former] if counts else [])}


@asynccontextmanager
async def living(store: Any, alive: float, missed: list[bool]) -> AsyncIterator[ChainStore]:
    """Put heartbeats into `store` during the context."""
    documents = ChainStore(store, Layout(""))
    deps: Any = SimpleNamespace(chains=documents, clock=SystemClock(), tuning=Tuning(intervals=Intervals(alive=alive)))
    sign, stop = (
        ProcessHeartbeat(SEEN.site, "host", "o", (), deps, cast(Any, None), partial(missed.append, False)),
        Stop(),
    )
    running = asyncio.create_task(sign.run(stop))
    yield documents
    await soon(lambda: len(documents.list_heartbeats()) == 1)
    stop.set()
    await running


async def test_a_heartbeat_without_an_answer_is_noted(tmp_path: Path) -> None:
    go, missed = threading.Event(), list[bool]()
    store = FaultyStore(LocalObjects(tmp_path)).on("put", lambda *_args, **_kwargs: go.wait(), nth=1)
    async with living(store, 0.6, missed):
        await soon(lambda: missed == [False])
        go.set()


async def test_a_heartbeat_that_could_not_be_put_is_put_soon(tmp_path: Path) -> None:
    async with living(FaultyStore(LocalObjects(tmp_path)).on("put", away, nth=1), 12.0, []):
        pass


async def test_a_site_with_thousands_of_heartbeats_makes_nobody_silent(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("ingress.discovery.sites.MAX_READS_PER_CHECK", 8)
    documents, threads = ChainStore(LocalObjects(tmp_path), Layout("data")), ThreadPool("t", 2)
    sites = Heartbeats(documents, threads, ManualClock(time.time()), 300.0)
    pairs = {(SEEN.site, SEEN.feed), ("a-site", "NODES")}
    for turn in range(5):
        for number in range(40):
            documents.write_heartbeat(f"p{number}", HeartbeatObject("a-site", "o", turn, ()))
        documents.write_heartbeat(
            "host", HeartbeatObject(SEEN.site, "o", turn, (ChainHeartbeat("reading", turn, chain=SEEN),))
        )
        await sites.read(pairs)
        assert sites.heartbeat_of(SEEN).time == turn
    threads.close()
