"""The models of settings: valid combinations, merging of defaults, and secrets, which are never shown."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from common.clock import parse_time
from common.settings.loader import changed_keys, load, parse
from common.settings.root import Settings
from common.settings.service import NatsSettings
from common.settings.types import format_duration, format_size, parse_duration, parse_listen, parse_size

STORE, SOURCE = {"url": "s3://floe"}, {"site": "s", "feed": "f"}


def site(**feeds: Any) -> Settings:
    return Settings(site="us-east", store=STORE, egress=feeds)


def centre(*targets: dict[str, Any], **ingress: Any) -> Settings:
    return Settings(store=STORE, ingress={"targets": list(targets), **ingress})


def problem(make: Any, **keys: Any) -> str:
    """Return the problems as `path: problem`, joined by `; `."""
    with pytest.raises(ValidationError) as caught:
        make(**keys)
    errors = caught.value.errors(include_url=False)
    return "; ".join(".".join(map(str, error["loc"])) + ": " + error["msg"] for error in errors)


def test_entries_win_over_defaults_nested_keys_one_by_one():
    settings = site(
        defaults={"max_age": "1h", "segment": {"max_age": "10s", "max_size": "1M"}},
        feeds=[{"stream": "A"}, {"stream": "B", "max_age": "2h", "segment": {"max_size": "2M"}}],
    )
    a, b = settings.egress.feeds
    assert (a.max_age, a.segment.max_age, a.segment.max_size) == (3600.0, 10.0, 2**20)
    assert (b.max_age, b.segment.max_age, b.segment.max_size) == (7200.0, 10.0, 2**21)


def test_defaults_of_ingress_apply_to_every_source():
    target = {"stream": "T", "sources": [SOURCE, SOURCE | {"feed": "g", "subject_prefix": "x"}]}
    settings = centre(target, defaults={"subject_prefix": "p"})
    assert [s.subject_prefix for s in settings.ingress.targets[0].sources] == ["p", "x"]


def test_a_role_overrides_the_connection_key_by_key():
    settings = Settings(
        store=STORE,
        nats={"url": "nats://a:1", "connect_timeout": "1s", "tls": {"ca": "/ca", "insecure": True}},
        egress={"nats": {"credentials_file": "/c", "tls": {"insecure": False}}},
    )
    egress, ingress = settings.nats_for("egress"), settings.nats_for("ingress")
    assert (egress.url, egress.connect_timeout, egress.credentials_file) == (("nats://a:1",), 1.0, "/c")
    assert (egress.tls.ca, egress.tls.insecure, ingress.tls.insecure) == ("/ca", False, True)
    assert ingress.credentials_file == ""


def test_models_given_in_code_are_merged_as_files_are():
    nats = NatsSettings(url="nats://a:1")
    settings = Settings(store=STORE, nats=nats, egress={"nats": {"user": "u", "password": "p"}})
    assert settings.nats_for("egress").url == ("nats://a:1",)


def test_secrets_are_in_no_representation():
    settings = Settings(
        store=STORE | {"access_key_id": "id", "secret_access_key": "canary-1"},
        nats={"user": "u", "password": "canary-2"},
        egress={"nats": {"user": "", "password": "", "token": "canary-3"}},
    )
    assert "canary" not in repr(settings) + str(settings) + settings.model_dump_json()
    assert settings.nats_for("egress").token.get_secret_value() == "canary-3"


def test_settings_with_secrets_of_files_and_variables_travel_to_executors(tmp_path: Path, monkeypatch: Any):
    (tmp_path / "secret").write_text("hidden\n")
    monkeypatch.setenv("WHERE", "spool")
    path = tmp_path / "central.yaml"
    secret = f"access_key_id: k, secret_access_key_file: {tmp_path}/secret"
    path.write_text(f'site: s\nspool_dir: "/${{WHERE}}"\nstore: {{url: "s3://floe", {secret}}}\n')
    settings = load(str(path))

    arrived = pickle.loads(pickle.dumps(settings))

    assert arrived == settings
    assert (arrived.spool_dir, arrived.store.secret_access_key.get_secret_value()) == ("/spool", "hidden")


# Changes that SIGHUP finds

SECRET, VALUE = ("a secret", "a secret"), ("a value", "a value")

BEFORE = """
site: us-east
store: {url: s3://floe, access_key_id: AK, secret_access_key: former-secret-of-the-store}
nats: {user: floe, password: former-password-of-nats}
egress:
  feeds: [{stream: A}, {stream: B, segment: {max_age: 1m}}, {stream: C}]
  heartbeats: {headers: {Token: former-value-of-a-header}, subjects: [{subject: a.b}]}
compaction: {spark: {conf: {spark.hadoop.fs.s3a.secret.key: former-value-of-spark}}}
"""


def test_each_key_that_changed_is_named_once_and_no_secret_is_shown(tmp_path: Path) -> None:
    file, password = tmp_path / "password", "password: former-password-of-nats"
    file.write_text("former-password-of-nats")
    [before] = parse(BEFORE, "before")
    for old, new, found in (
        ("us-east", "eu-west", {"site": ("us-east", "eu-west")}),
        ("former-secret", "later-secret", {"store.secret_access_key": SECRET}),
        ("former-password", "later-password", {"nats.password": SECRET}),
        (password, "password_file: FILE", {"nats.password_file": ("a secret", "FILE")}),
        (f"user: floe, {password}", "", {"nats.password": ("a secret", None), "nats.user": ("floe", "")}),
        ("former-value-of-a", "later-value-of-a", {"egress.heartbeats.headers.Token": VALUE}),
        ("former-value-of-s", "later", {"compaction.spark.conf.spark.hadoop.fs.s3a.secret.key": VALUE}),
        ("max_age: 1m", "max_age: 3m", {"egress.feeds[B].segment.max_age": ("60.0", "180.0")}),
        ("{stream: A}, ", "", {"egress.feeds[A]": ("an entry", None)}),
        ("[{subject: a.b}]", "[{subject: a.c}]", {"egress.heartbeats.subjects[0].subject": ("a.b", "a.c")}),
        ("  feeds", "  nats: {user: floe, password: of-egress-alone}\n  feeds", {"egress.nats.password": SECRET}),
    ):
        assert old in BEFORE
        [now] = parse(BEFORE.replace(old, new.replace("FILE", str(file))), "now")
        wanted = {key: tuple(str(file) if each == "FILE" else each for each in pair) for key, pair in found.items()}
        assert changed_keys(before, now) == wanted
        assert changed_keys(now, before).keys() == {key.replace("_file", "") for key in wanted}
        assert changed_keys(now, now) == {}


def test_a_secret_in_a_file_is_no_change_and_another_file_is(tmp_path: Path) -> None:
    def settings(file: str, secret: str) -> Settings:
        (tmp_path / file).write_text(secret)
        [found] = parse(f"store: {{url: s3://floe}}\nnats: {{user: floe, password_file: {tmp_path / file}}}", "file")
        return found

    before, paths = settings("one", "the-first-secret"), (str(tmp_path / "one"), str(tmp_path / "other"))
    assert changed_keys(before, settings("one", "the-second-secret")) == {}
    assert changed_keys(before, settings("other", "the-first-secret")) == {"nats.password_file": paths}


def test_the_subjects_of_a_new_stream_are_given_or_follow_from_the_prefixes():
    def subjects(create: Any, *prefixes: str) -> tuple[str, ...]:
        sources = [{"site": f"s{i}", "feed": "f", "subject_prefix": p} for i, p in enumerate(prefixes)]
        return centre({"stream": "T", "create": create, "sources": sources}).ingress.targets[0].subjects_to_create()

    assert (subjects(None, ""), subjects({"subjects": ["a.>"]}, "")) == ((), ("a.>",))
    assert subjects({}, "p", "q.r", "p") == ("p.>", "q.r.>")
    assert subjects({}, "p.{site}", "q.{feed}.{partition}") == ("p.s0.>", "q.f.*.>")
    assert subjects({"subjects": ["p.*.>"]}, "p.{site}") == ("p.*.>",)


def feed(**keys: Any) -> dict[str, Any]:
    return {"egress": {"feeds": [{"stream": "A", **keys}]}}


def target(**keys: Any) -> dict[str, Any]:
    return {"stream": "T", "sources": [SOURCE], **keys}


def targets(*several: dict[str, Any]) -> dict[str, Any]:
    return {"ingress": {"targets": [*several]}}


def source(**keys: Any) -> dict[str, Any]:
    return targets(target(sources=[SOURCE | keys]))


def nats(**keys: Any) -> dict[str, Any]:
    return {"nats": keys}


def levels(*several: dict[str, Any]) -> dict[str, Any]:
    return {"compaction": {"levels": [*several]}}


SAMPLED = {"inspect_field": "x", "inspect_duration": "1h"}
ONE_START = "start_at_end: expected at most one of the start keys, found start_sequence and start_at_end"
BRACES = "subject_prefix: expected only {site}, {feed}, {incarnation} and {partition} in braces"
SAMPLING_KEY = "inspect_field, inspect_header or inspect_subject_token with it, found none"
TRANSFORM = {"source": ">", "destination": "x.>"}


def test_what_does_not_go_together_or_is_out_of_range_is_refused_with_both_sides():
    for keys, expected in (
        (feed(start_sequence=5, start_at_end=True), ONE_START),
        (feed(filter_subject="a.>", partitions=["a.1.>"]), "expected either filter_subject or partitions, found both"),
        (feed(partitions={"count": 4, "subject": "a.>"}), "expected {partition} in it if count is 4, found 'a.>'"),
        ({"egress": {"feeds": [{"stream": "A"}, {"stream": "C", "name": "A"}]}}, "found 'A' in feeds.0 and feeds.1"),
        (feed(**SAMPLED, inspect_header="y"), "one key to sample by, found inspect_field and inspect_header"),
        (feed(inspect_subject_token=-1), "inspect_subject_token: expected inspect_duration with it, found none"),
        (feed(**SAMPLED, warn_duration="1h"), "warn_duration: expected less than inspect_duration, found as much"),
        (feed(advisory={"subject": "A.%s"}), f"advisory: expected {SAMPLING_KEY}"),
        ({"egress": {"state_bucket": "FLOE_LEASES"}}, "state_bucket: expected a bucket other than lease_bucket"),
        ({**feed(), "site": ""}, "site: expected a name if egress has feeds, found none"),
        (targets(target(), target()), "targets.1.stream: expected each stream once, found 'T' in targets.0 and"),
        (targets(target(sources=[SOURCE, {"site": ["r", "s"], "feed": ["f"]}])), "s/f in sources.0 and sources.1"),
        (source(site=["s", "s"]), "site.1: expected each site once, found 's' twice"),
        (targets(target(exclusive=False)), "expected at_least_once if exclusive is false, found exactly_once"),
        (targets(target(create={})), "create: expected subjects if a source has no subject_prefix, found none"),
        (source(subject_prefix="p", subject_transform=TRANSFORM), "it without subject_prefix and subject_remove"),
        *((source(subject_prefix=each), BRACES) for each in ("f.{sites}", "f.{site", "{{site}}")),
        (targets(target(sources=[])), "sources: expected at least one entry"),
        (source(control_headers=["Nats-Msg-Id"]), "expected a header that ingress does not set itself"),
        (source(control_headers=["X-A"]), "expected a header of NATS such as Nats-TTL"),
        (levels({"from": 1, "to": 1}), "to: expected more than from, which is 1, found 1"),
        (levels({"from": 0, "to": 1, "min_size": "8G"}), "max_size: expected at least min_size, found less"),
        (levels({"from": 0, "to": 1}, {"from": 0, "to": 2}), "levels.1.from: expected each level read once, found 0"),
        (nats(credentials_file="/c", token="t"), "one way to authenticate, found credentials_file and token"),
        (nats(user="u"), "user: expected password or password_file with it, found none"),
        (nats(jwt_file="/j"), "jwt_file: expected nkey_seed_file with it, found none"),
        (nats(url=["nats://a:1", "tls://b:1"]), "all of them nats:// or all of them tls://, found both"),
        (nats(url=["nats://a:1", "nats://a:1"]), "url.1: expected each server once, found nats://a:1 twice"),
        ({"store": STORE | {"access_key_id": "a"}}, "secret_access_key or secret_access_key_file with it"),
        ({"store": STORE | {"encryption": {"kms_key_id": "k"}}}, "kms_key_id: expected mode sse-kms with it"),
        ({"store": {"url": "file:///data", "endpoint_url": "http://a:1"}}, "endpoint_url: expected none with a file"),
        # out of a range
        (feed(segment={"max_age": "100ms"}), "expected 1s to 1d (each segment is an object"),
        (feed(max_age="10ms"), "expected 0 or at least 1s"),
        (feed(start_sequence=2**63), "expected 0 to 9223372036854775807"),
        ({"egress": {"lease_ttl": "500ms"}}, "expected 1s to 10m (it is renewed every third of it)"),
    ):
        assert expected in problem(Settings, **{"store": STORE, "site": "us-east", **keys})
    found = problem(NatsSettings, credentials_file="/c", token="t", jwt_file="/j", password="p")
    assert all(part in found for part in ("token: ", "jwt_file: ", "password: ")), "all at once"


def test_urls_of_servers_and_stores_and_names_of_sites_are_taken():
    for url in ("nats://h", "tls://h:4222", "nats://[::1]:4222", "nats://nats.us-east.example.net:4222"):
        assert NatsSettings(url=url).url == (url,)
    for url in ("s3://floe", "s3://my.bucket-1", "file:///var/lib/floe", "file:///with%20space"):
        assert Settings(store={"url": url}).store.url == url
    for name in ("us-east", "US_EAST_1", "no", "012", "a" * 63):
        assert Settings(store=STORE, site=name).site == name


def test_other_nats_urls_are_refused_with_the_reason():
    for url, why in (
        ("host:4222", "nats://HOST:PORT or tls://HOST:PORT"),
        ("nats://h:1/", "without a slash at the end"),
        ("nats://h:1/path", "no path"),
        ("nats://h:0", "a port from 1 to 65535"),
        ("nats://::1:4222", "an IPv6 address in brackets"),
        ("nats://user:hunter2@h:1", "without user and password (they belong in user and password_file)"),
        ([], "at least one entry"),
    ):
        found = problem(NatsSettings, url=url)
        assert why in found
        assert "hunter2" not in found


def test_other_stores_are_refused_with_the_reason():
    for store, why in (
        ({"url": "s3://"}, "3 to 63 of a-z 0-9 . -"),
        ({"url": "s3://192.168.0.1"}, "3 to 63"),
        ({"url": "s3://floe/"}, "without a path after the bucket (a path belongs in prefix)"),
        ({"url": "s3://key:secret@floe"}, "without credentials"),
        ({"url": "floe"}, "s3://BUCKET or file:///FOLDER"),
        ({"url": "file://relative"}, "an absolute folder"),
        ({"url": "file:///"}, "an absolute folder below /"),
        ({"endpoint_url": "minio:9000"}, "https://HOST:PORT or http://HOST:PORT"),
        ({"endpoint_url": "http://minio:9000/"}, "without a slash at the end"),
        ({"endpoint_url": "http://u:p@minio:9000"}, "without user and password"),
        ({"prefix": "data/"}, "joined by /"),
        ({"prefix": "a/../b"}, "none beginning with . or _"),
        ({"region": ""}, "a value"),
    ):
        assert why in problem(Settings, store=STORE | store)


def test_other_names_are_no_sites_streams_or_subjects():
    sites = ["../x", "a b", "a" * 64, ".", "-a", "_a", "é", "🙂", "a\n", "a.b"]
    streams = ["a.b", "a b", "a*", "a>", "a/b", "a\\b", "a\tb", "x" * 256]
    subjects = ["a..b", ".a", "a.", "a b", "a.>.b", "a\r\nPUB"]
    advisories = ["adv.%x", "adv.%%x", "adv.%s.%V", "adv.%", "adv.%S.%v", "adv.%s%"]
    for keys, values, why in (
        (lambda name: {"site": name}, sites, "expected 1 to 63 of A-Z a-z 0-9 _ -"),
        (lambda name: feed(stream=name), streams, "expected a stream name"),
        (lambda name: feed(filter_subject=name), subjects, "expected a subject"),
        (lambda name: feed(**SAMPLED, advisory={"subject": name}), advisories, "%s for the event, %v for the value"),
    ):
        for value in values:
            assert why in problem(Settings, **{"store": STORE, "site": "us-east", **keys(value)})


def test_a_stream_that_flows_into_itself_is_a_loop():
    for elsewhere in ({}, {"nats": {"url": "nats://other:1"}}):
        ingress = {"targets": [target(stream="A")], **elsewhere}
        settings = Settings(site="s", store=STORE, ingress=ingress, **feed(name="f"))
        assert [key for key, _ in settings.loop_problems()] == ["ingress.targets.0.sources.0"] * (not elsewhere)


# Durations, sizes, times and addresses


def test_a_duration_is_a_sum_of_numbers_with_units():
    given = {"500ms": 0.5, "5s": 5, "5m": 300, "1h30m": 5400, "1.5h": 5400, "7d": 604800, "1w": 604800, "0s": 0}
    assert {text: parse_duration(text) for text in given} == given
    with pytest.raises(ValueError, match="expected at most 5214w2d, found '999999d'"):
        parse_duration("999999d")


@given(st.integers(0, 10**12), st.integers(0, 2**63 - 1))
def test_a_formatted_duration_reads_back_to_the_millisecond_and_a_size_exactly(milliseconds: int, size: int):
    assert round(parse_duration(format_duration(milliseconds / 1000)) * 1000) == milliseconds
    assert parse_size(format_size(size)) == size


def test_sizes_are_binary_as_nats_writes_them():
    given = {"0": 0, "1000": 1000, "64K": 65536, "64KB": 65536, "64KiB": 65536, "100M": 100 << 20, "1.5G": 3 << 29}
    given |= {"4G": 4 << 30, "2T": 2 << 40, "10B": 10}
    assert {text: parse_size(text) for text in given} == given


def test_a_time_is_exact_to_the_nanosecond():
    assert parse_time("1970-01-01T00:00:01.000000001Z") == 1_000_000_001
    assert parse_time("2026-01-02T03:04:05+01:00") == parse_time("2026-01-02T02:04:05Z")
    assert parse_time("1969-12-31T23:59:59.5Z") == -500_000_000


def test_an_address_is_host_and_port():
    given = {"127.0.0.1:9464": ("127.0.0.1", 9464), "[::1]:0": ("::1", 0), "localhost:80": ("localhost", 80)}
    given |= {":9464": ("0.0.0.0", 9464), "": None}
    assert {text: parse_listen(text) for text in given} == given


def test_other_texts_are_refused_and_the_message_shows_the_form():
    durations = ["", "5", "-5s", "5 minutes", "1e99h", "NaN", "5y", "s", "5s ", "٥s", "1h-5m"]
    sizes = ["", "-1", "1k", "5X", "5iB", "1e3", "NaN", "K", "1 M", "99999999P"]
    times = ["2026-01-02T03:04:05", "2026-01-02", "2026-02-30T00:00:00Z", "now", "1700000000"]
    addresses = ["9464", "127.0.0.1", "127.0.0.1:70000", "::1:9464", "a b:1", "host:port", "h:-1"]
    for read, texts, form in (
        (parse_duration, durations, "a duration such as 500ms 5s 5m 1h30m 7d 1w, found"),
        (parse_size, sizes, "a size such as 64K 100M 4G"),
        (parse_time, times, "a time with its zone such as 2026-01-02T03:04:05Z"),
        (parse_listen, addresses, r"an address such as 127\.0\.0\.1:9464"),
    ):
        for text in texts:
            with pytest.raises(ValueError, match=f"expected {form}"):
                pytest.fail(f"{text!r} is taken: {read(text)}")
