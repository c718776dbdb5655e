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


def amazon(key: str, name: str = "ObjectCreated:Put", bucket: str = BUCKET) -> dict[str, Any]:
    """Amazon's event message structure, version 2.1, key as its documentation says: url-encoded."""
    return {
        "eventVersion": "2.1",
        "eventSource": "aws:s3",
        "awsRegion": "us-west-2",
        "eventTime": "1970-01-01T00:00:00.000Z",
        "eventName": name,
        "userIdentity": {"principalId": "AIDAJDPLRKLG7UEXAMPLE"},
        "requestParameters": {"sourceIPAddress": "127.0.0.1"},
        "responseElements": {
            "x-amz-request-id": "C3D13FE58DE4C810",
            "x-amz-id-2": "FMyUVURIY8/IgAtTv8xRjskZQpcIZ9KG4V5Wp6S7S/JRWeUWerMUE5JgHvANOjpD",
        },
        "s3": {
            "s3SchemaVersion": "1.0",
            "configurationId": "testConfigRule",
            "bucket": {
                "name": bucket,
                "ownerIdentity": {"principalId": "A3NL1KOZZKExample"},
                "arn": f"arn:aws:s3:::{bucket}",
            },
            "object": {
                "key": quote_plus(key),
                "size": 1024,
                "eTag": "d41d8cd98f00b204e9800998ecf8427e",
                "versionId": "096fKKXTRTtl3on89fVO.nfljtsv6qko",
                "sequencer": "0055AED6DCD90281E5",
            },
        },
    }


def minio(key: str, name: str = "s3:ObjectCreated:Put", bucket: str = "floe") -> dict[str, Any]:
    """MinIO's notification, as its guide shows it on NATS."""
    return {
        "EventName": name,
        "Key": f"{bucket}/{key}",
        "Records": [
            {
                "eventVersion": "2.0",
                "eventSource": "minio:s3",
                "awsRegion": "",
                "eventTime": "2019-10-22T09:27:27Z",
                "eventName": name,
                "userIdentity": {"principalId": "AKIAIOSFODNN7EXAMPLE"},
                "requestParameters": {
                    "accessKey": "AKIAIOSFODNN7EXAMPLE",
                    "region": "",
                    "sourceIPAddress": "172.16.118.255",
                },
                "responseElements": {
                    "x-amz-request-id": "15CFEDF8D4736ED9",
                    "x-minio-deployment-id": "0170a4cc-dca6-4e72-86f1-c0cc760dff7f",
                    "x-minio-origin-endpoint": "http://172.17.0.2:9000",
                },
                "s3": {
                    "s3SchemaVersion": "1.0",
                    "configurationId": "Config",
                    "bucket": {
                        "name": bucket,
                        "ownerIdentity": {"principalId": "AKIAIOSFODNN7EXAMPLE"},
                        "arn": f"arn:aws:s3:::{bucket}",
                    },
                    "object": {
                        "key": quote_plus(key),
                        "size": 224662,
                        "eTag": "5fc7298143efe1276d39a3466d4e255f-1",
                        "contentType": "application/octet-stream",
                        "userMetadata": {"content-type": "application/octet-stream"},
                        "sequencer": "15CFEDF8D5304D1A",
                    },
                },
                "source": {"host": "172.16.118.255", "port": "", "userAgent": "MinIO (linux; amd64)"},
            }
        ],
    }


def event_bridge(key: str, kind: str = "Object Created") -> dict[str, Any]:
    """Amazon's EventBridge message structure: the key as it is."""
    return {
        "version": "0",
        "id": "17793124-05d4-b198-2fde-7ededc63b103",
        "detail-type": kind,
        "source": "aws.s3",
        "account": "111122223333",
        "time": "2021-11-12T00:00:00Z",
        "region": "ca-central-1",
        "resources": [f"arn:aws:s3:::{BUCKET}"],
        "detail": {
            "version": "0",
            "bucket": {"name": BUCKET},
            "object": {
                "key": key,
                "size": 5,
                "etag": "b1946ac92492d2347c6235b4d2611184",
                "version-id": "IYV3p45BT0ac8hjHg1houSdS1a.Mro8e",
                "sequencer": "617f08299329d189",
            },
            "request-id": "N4N7GDK58NMKJ12R",
            "requester": "123456789012",
            "source-ip-address": "1.2.3.4",
            "reason": "PutObject",
        },
    }


def sns(document: Any) -> dict[str, Any]:
    """The document as SNS hands it to a queue without raw delivery."""
    return {
        "Type": "Notification",
        "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
        "TopicArn": "arn:aws:sns:us-west-2:123456789012:MyTopic",
        "Subject": "Amazon S3 Notification",
        "Message": json.dumps(document),
        "Timestamp": "2012-05-02T00:54:06.655Z",
        "SignatureVersion": "1",
        "Signature": "EXAMPLEw6JRN…",
        "SigningCertURL": "https://sns.us-west-2.amazonaws.com/SimpleNotificationService.pem",
        "UnsubscribeURL": "https://sns.us-west-2.amazonaws.com/?Action=Unsubscribe",
    }


TEST_EVENT = {
    "Service": "Amazon S3",
    "Event": "s3:TestEvent",
    "Time": "2014-10-13T15:57:02.089Z",
    "Bucket": BUCKET,
    "RequestId": "5582815E1AEA5ADF",
    "HostId": "8cLeGAmw098X5cv4Zkwcmo8vvZa3eH3eKxsPzbB9wrR+YstdA6Knx4Ip8EXAMPLE",
}


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


def test_keys_may_be_encoded_as_the_server_likes() -> None:
    key = segment_key(ODD)
    assert "%" in key
    for as_written in (quote_plus(key), quote(key), quote(key, safe="/="), key):
        record = amazon("")
        record["s3"]["object"]["key"] = as_written
        assert ODD in (named({"Records": [record]}) or ())


def test_a_space_is_a_plus() -> None:
    [found] = written(json.dumps({"Records": [amazon("red flower.jpg")]}).encode()) or []
    assert found == Written(BUCKET, ("red flower.jpg", "red+flower.jpg"))


def test_an_accepted_gap_wakes_its_chain() -> None:
    key = f"{LAYOUT.gaps_prefix(CHAIN)}{9:020d}-{1:020d}.json"
    assert chain_of(key, LAYOUT) == CHAIN


def test_several_records_name_several_chains() -> None:
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
        b"",
        b"null",
        b"5",
        b'"text"',
        b"[]",
        b"{}",
        b"{",
        b"\xff\xfe",
        b'{"Records": {}}',
        b'{"Message": 5}',
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["Records", "Message", "detail", "detail-type", "Event", "s3", "object", "key"])
            | st.sampled_from(["bucket", "name", "eventName"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_no_document_raises(document: Any) -> None:
    named(document)


@given(st.binary(max_size=200))
def test_no_bytes_raise(raw: bytes) -> None:
    written(raw)
