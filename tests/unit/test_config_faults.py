"""What people write wrongly into a file: `floe config check` ends with 78 and says each in one line, at its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import floe

SITE = "site: us-east\n"
STORE = "store: {url: s3://floe}\n"
HEAD = SITE + STORE
DURATION = "expected a duration such as 500ms 5s 5m 1h30m 7d 1w, found"
NAME = "expected 1 to 63 of A-Z a-z 0-9 _ -, the first not _ or -, found"
NATS_URL = "expected nats://HOST:PORT or tls://HOST:PORT"
S3_URL = "expected https://HOST:PORT or http://HOST:PORT"


def feed(keys: str) -> str:
    return f"{HEAD}egress: {{feeds: [{{stream: A, {keys}}}]}}\n"


def target(keys: str) -> str:
    return f"{HEAD}ingress: {{targets: [{{stream: T, {keys}}}]}}\n"


def nats(keys: str) -> str:
    return f"{HEAD}nats: {{{keys}}}\n"


def store(keys: str) -> str:
    return f"{SITE}store: {{url: s3://floe, {keys}}}\n"


SOURCE = "{site: a, feed: f}"
WRONG = [
    # A section that nobody knows is named: what stands in it cannot be judged
    (f"{HEAD}colours: {{feeds: [{{stream: A}}]}}\n", "3:1: colours: unknown key; expected one of"),
    (feed("sample_rate: 1.5"), "3:30: egress.feeds.0.sample_rate: unknown key; expected one of"),
    # Durations and sizes
    (feed("max_age: -5s"), f"3:39: egress.feeds.0.max_age: {DURATION} -5s"),
    (feed("max_age: 5 minutes"), f"3:39: egress.feeds.0.max_age: {DURATION} 5 minutes"),
    (feed("max_age: 1e99h"), f"3:39: egress.feeds.0.max_age: {DURATION} 1e99h"),
    (feed("max_age: NaN"), f"3:39: egress.feeds.0.max_age: {DURATION} NaN"),
    (feed("segment: {max_size: 10XB}"), "3:50: egress.feeds.0.segment.max_size: expected a size such as 64K 100M 4G"),
    (feed("segment: {max_age: 100ms}"), "3:49: egress.feeds.0.segment.max_age: expected 1s to 1d (each segment is"),
    (feed("segment: {max_size: 1}"), "3:50: egress.feeds.0.segment.max_size: expected 64K to 4G (smaller ones cost"),
    (f"{HEAD}egress: {{lease_ttl: 0s}}\n", "3:21: egress.lease_ttl: expected 1s to 10m"),
    # What does not go together
    (
        f"{HEAD}egress: {{feeds: [{{stream: A}}, {{stream: A}}]}}\n",
        "3:31: egress.feeds.1.name: expected a name of its own",
    ),
    (
        f"{HEAD}ingress: {{targets: [{{stream: T, sources: [{SOURCE}]}}, {{stream: T, sources: [{SOURCE}]}}]}}\n",
        "3:74: ingress.targets.1.stream: expected a stream of its own",
    ),
    (target(f"sources: [{SOURCE}, {SOURCE}]"), "3:63: ingress.targets.0.sources.1: expected each feed of a site once"),
    (
        target(f"exclusive: false, delivery: exactly_once, sources: [{SOURCE}]"),
        "3:61: ingress.targets.0.delivery: expected at_least_once where exclusive is false",
    ),
    (
        target("create: {subjects: [other.>]}, sources: [{site: a, feed: f, subject_prefix: 'fleet.{site}'}]"),
        "3:52: ingress.targets.0.create.subjects: expected subjects that take what sources.0 makes (fleet.a.>), found",
    ),
    (
        target("sources: [{site: [a, b], feed: f, control_headers: [Nats-Rollup]}]"),
        "3:84: ingress.targets.0.sources.0.control_headers: expected nats-rollup only where no other site has",
    ),
    (feed("inspect_duration: 1h"), "3:48: egress.feeds.0.inspect_duration: expected inspect_field, inspect_header or"),
    # Names
    *((f"site: {name}\n{STORE}", f"1:7: site: {NAME}") for name in ("../x", "a/b", "a b", "x" * 300, ".", "🚀")),
    # The store
    (f"{SITE}store: {{url: 's3://A_b'}}\n", "2:14: store.url: expected s3://BUCKET, the bucket 3 to 63 of a-z 0-9 . -"),
    (store("endpoint_url: minio:9000"), f"2:39: store.endpoint_url: {S3_URL}"),
    (store("endpoint_url: 'https://h/path'"), f"2:39: store.endpoint_url: {S3_URL}"),
    (store("endpoint_url: 'https://h/'"), f"2:39: store.endpoint_url: {S3_URL} without a slash at its end"),
    (store("endpoint_url: 'https://u:hunter2@h'"), f"2:39: store.endpoint_url: {S3_URL} without user and password"),
    # NATS
    (nats("url: []"), "3:13: nats.url: expected at least one entry, found an empty list"),
    (nats("url: 'nats://u:hunter2@h'"), f"3:13: nats.url: {NATS_URL} without user and password"),
    (nats("url: ['nats://a', 'tls://b']"), "3:13: nats.url: expected all of them nats:// or all of them tls://"),
    (nats("url: 'nats://a:0'"), f"3:13: nats.url: {NATS_URL} with a port from 1 to 65535"),
    (nats("url: 'nats://a:70000'"), f"3:13: nats.url: {NATS_URL} with a port from 1 to 65535"),
    (nats("url: 'nats://::1:4222'"), f"3:13: nats.url: {NATS_URL} (an IPv6 address in brackets; no path)"),
]


@pytest.mark.parametrize(("text", "line"), WRONG, ids=[line.partition(" expected")[0] for _, line in WRONG])
def test_a_bad_file_is_told_in_one_line_at_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.yaml").write_text(text)

    result = CliRunner().invoke(floe.cli, ["config", "check", "f.yaml"])

    [told] = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (78, "")
    assert told.startswith(f"error[E-CONFIG]: f.yaml:{line}")
    assert "hunter2" not in told
