"""Notifications as Amazon and MinIO document them, and everything else that may arrive instead."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chain import Chain
from common.segments.keys import Layout, SegmentName
from common.sequences import SequenceRange
from ingress.discovery.notifications import MAX_BYTES, Written, chain_of, chains_in, written

LAYOUT = Layout("data")
CHAIN = Chain("us-east", "NODES")
ODD = Chain("us-east", "NODE DATA+%25=é".replace(" ", "_"), 3, 7)
BUCKET = "amzn-s3-demo-bucket"


def segment_key(chain: Chain = CHAIN, level: int = 0) -> str:
    return LAYOUT.segment(SegmentName(chain, level, SequenceRange(1, 9), "0123456789abcdef"))


def amazon(key: str, name: str = "ObjectCreated:Put", bucket: str = BUCKET, **more: Any) -> dict[str, Any]:
    """Amazon's event message structure, version 2.1, key as its documentation says: url-encoded."""
    stored = {"key": quote_plus(key), "size": 1024, "eTag": "d41d8cd98f00b204e9800998ecf8427e", "sequencer": "0055AE"}
    owned = {"name": bucket, "ownerIdentity": {"principalId": "A3NL1KOZZKExample"}, "arn": f"arn:aws:s3:::{bucket}"}
    return {
        "eventVersion": "2.1",
        "eventSource": "aws:s3",
        "awsRegion": "us-west-2",
        "eventName": name,
        "eventTime": "1970-01-01T00:00:00.000Z",
        "userIdentity": {"principalId": "AIDAJDPLRKLG7UEXAMPLE"},
        "responseElements": {"x-amz-request-id": "C3D13FE58DE4C810"},
        "s3": {"s3SchemaVersion": "1.0", "configurationId": "testConfigRule", "bucket": owned, "object": stored},
        **more,
    }


def minio(key: str, name: str = "s3:ObjectCreated:Put", bucket: str = "floe") -> dict[str, Any]:
    """MinIO's notification, as its guide shows it on NATS."""
    more = {"eventVersion": "2.0", "eventSource": "minio:s3", "source": {"userAgent": "MinIO (linux; amd64)"}}
    return {"EventName": name, "Key": f"{bucket}/{key}", "Records": [amazon(key, name, bucket, **more)]}


def event_bridge(key: str, kind: str = "Object Created") -> dict[str, Any]:
    """Amazon's EventBridge message structure: the key as it is."""
    detail = {"version": "0", "bucket": {"name": BUCKET}, "object": {"key": key, "size": 5}, "reason": "PutObject"}
    return {"version": "0", "detail-type": kind, "source": "aws.s3", "region": "ca-central-1", "detail": detail}


def sns(document: Any) -> dict[str, Any]:
    """The document as SNS hands it to a queue without raw delivery."""
    head = {"Type": "Notification", "TopicArn": "arn:aws:sns:us-west-2:123456789012:MyTopic"}
    return {**head, "Subject": "Amazon S3 Notification", "Message": json.dumps(document), "SignatureVersion": "1"}


TEST_EVENT = {"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": BUCKET, "RequestId": "5582815E1AEA5ADF"}


def named(document: Any, bucket: str = BUCKET) -> set[Chain] | None:
    notice = written(json.dumps(document).encode())
    return None if notice is None else chains_in(notice, bucket, LAYOUT)


@pytest.mark.parametrize("chain", [CHAIN, ODD], ids=str)
def test_documents_of_every_kind_name_the_chain(chain: Chain) -> None:
    for key in (segment_key(chain), segment_key(chain, 2), LAYOUT.tail(chain), LAYOUT.chain_document(chain)):
        assert named({"Records": [amazon(key)]}) == {chain}
        assert named({"Records": [amazon(key, "ObjectCreated:CompleteMultipartUpload")]}) == {chain}
        assert named(sns({"Records": [amazon(key)]})) == {chain}
        assert named(event_bridge(key)) == {chain}
        assert named(sns(event_bridge(key))) == {chain}
        assert named(minio(key), "floe") == {chain}


def test_keys_may_be_encoded_as_the_server_likes_and_a_space_is_a_plus() -> None:
    key = segment_key(ODD)
    assert "%" in key
    for as_written in (quote_plus(key), quote(key), quote(key, safe="/="), key):
        record = amazon("")
        record["s3"]["object"]["key"] = as_written
        assert ODD in (named({"Records": [record]}) or ())
    [found] = written(json.dumps({"Records": [amazon("red flower.jpg")]}).encode()) or []
    assert found == Written(BUCKET, ("red flower.jpg", "red+flower.jpg"))


def test_an_accepted_gap_wakes_its_chain_and_several_records_name_several_chains() -> None:
    key = f"{LAYOUT.gaps_prefix(CHAIN)}{9:020d}-{1:020d}.json"
    assert chain_of(key, LAYOUT) == CHAIN
    chains = {Chain("us-east", "NODES", 0, n) for n in range(50)}
    assert named({"Records": [amazon(segment_key(chain)) for chain in chains]}) == chains


@pytest.mark.parametrize(
    "document",
    [
        TEST_EVENT,
        sns(TEST_EVENT),
        {"Records": []},
        {"Records": [amazon(segment_key(), "ObjectRemoved:Delete")]},
        {"Records": [amazon(segment_key(), "s3:ObjectRemoved:DeleteMarkerCreated")]},
        {"Records": [amazon(segment_key(), "s3:ObjectAccessed:Get")]},
        {"Records": [amazon(segment_key(), bucket="another")]},
        {"Records": [amazon("other/" + segment_key()), amazon(segment_key()[1:])]},
        {"Records": [amazon("data/_floe/tombstones/x"), amazon(f"{LAYOUT.states_prefix(CHAIN)}{1:020d}-0")]},
        {"Records": [None, 1, "x", [], {}, {"eventName": 5}, {"eventName": "ObjectCreated:Put", "s3": []}]},
        {"Records": [{"eventName": "ObjectCreated:Put", "s3": {"bucket": {"name": BUCKET}}}]},
        event_bridge(segment_key(), "Object Deleted"),
        {"detail": {}},
    ],
)
def test_what_says_nothing_new_names_nothing(document: Any) -> None:
    assert named(document) == set()


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"null", b"5", b"[]", b"{}", b"{", b"\xff\xfe", b'{"Records": {}}', b'{"Message": 5}'),
        b'{"Message": "\\ud800"}',
        b'{"Records": [' + b"9" * 100_000 + b"]}",
        b"[" * 900_000,
        b'{"Records":' * 80_000,
        b'{"Records":[{"eventName":"ObjectCreated:Put","s3":' + b"[" * 100_000,
    ],
    ids=lambda raw: raw[:20],
)
def test_garbage_is_told_from_notifications_and_raises_nothing(raw: bytes) -> None:
    assert written(raw) is None


def test_ten_megabytes_are_not_even_read() -> None:
    raw = json.dumps({"Records": [amazon(segment_key())] * 20_000}).encode()
    assert len(raw) > 10_000_000
    began = time.thread_time()
    assert written(raw) is None
    assert time.thread_time() - began < 0.01
    assert written(b" " * (MAX_BYTES + 1)) is None


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
    written(raw)
