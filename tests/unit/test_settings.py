"""The models: what goes together, what is merged, what is never shown."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from common.settings.loader import changed, load, parse
from common.settings.root import Settings
from common.settings.service import NatsSettings

STORE = {"url": "s3://floe"}


def site(**feeds: Any) -> Settings:
    return Settings(site="us-east", store=STORE, egress=feeds)


def centre(*targets: dict[str, Any], **ingress: Any) -> Settings:
    return Settings(store=STORE, ingress={"targets": list(targets), **ingress})


def problem(make: Any) -> str:
    """What is wrong, `path: problem` joined by `; `."""
    with pytest.raises(ValidationError) as caught:
        make()
    return "; ".join(
        ".".join(map(str, error["loc"])) + ": " + error["msg"] for error in caught.value.errors(include_url=False)
    )


def test_a_feed_is_called_as_its_stream_unless_it_has_a_name():
    feeds = site(feeds=[{"stream": "A"}, {"stream": "A", "name": "B"}]).egress.feeds
    assert [feed.name for feed in feeds] == ["A", "B"]


def test_entries_win_over_defaults_nested_keys_one_by_one():
    settings = site(
        defaults={"max_age": "1h", "segment": {"max_age": "10s", "max_size": "1M"}},
        feeds=[{"stream": "A"}, {"stream": "B", "max_age": "2h", "segment": {"max_size": "2M"}}],
    )
    a, b = settings.egress.feeds
    assert (a.max_age, a.segment.max_age, a.segment.max_size) == (3600.0, 10.0, 2**20)
    assert (b.max_age, b.segment.max_age, b.segment.max_size) == (7200.0, 10.0, 2**21)


def test_defaults_of_ingress_stand_under_every_source():
    source = {"site": "s", "feed": "f"}
    settings = centre(
        {"stream": "T", "sources": [source, source | {"feed": "g", "subject_prefix": "x"}]},
        defaults={"subject_prefix": "p"},
    )
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
    settings = Settings(
        store=STORE, nats=NatsSettings(url="nats://a:1"), egress={"nats": {"user": "u", "password": "p"}}
    )
    assert settings.nats_for("egress").url == ("nats://a:1",)


def test_a_dumped_configuration_reads_back_equal():
    settings = centre({"stream": "T", "create": {}, "sources": [{"site": "s", "feed": "f", "subject_prefix": "p"}]})
    assert Settings.model_validate(settings.model_dump(by_alias=True)) == settings


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        site().site = "other"


def test_secrets_stand_in_no_representation():
    settings = Settings(
        store=STORE | {"access_key_id": "id", "secret_access_key": "canary-1"},
        nats={"user": "u", "password": "canary-2"},
        egress={"nats": {"user": "", "password": "", "token": "canary-3"}},
    )
    assert "canary" not in repr(settings) + str(settings) + settings.model_dump_json()
    assert settings.nats_for("egress").token.get_secret_value() == "canary-3"


def test_settings_with_secrets_of_files_and_variables_travel_to_executors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "secret").write_text("hidden\n")
    monkeypatch.setenv("WHERE", "spool")
    path = tmp_path / "central.yaml"
    secret = f"access_key_id: k, secret_access_key_file: {tmp_path}/secret"
    path.write_text(f'site: s\nspool_dir: "/${{WHERE}}"\nstore: {{url: "s3://floe", {secret}}}\n')
    settings = load(str(path))

    arrived = pickle.loads(pickle.dumps(settings))

    assert arrived == settings
    assert (arrived.spool_dir, arrived.store.secret_access_key.get_secret_value()) == ("/spool", "hidden")


# What SIGHUP finds changed

BEFORE = """
site: us-east
store: {url: s3://floe, access_key_id: AK, secret_access_key: former-secret-of-the-store}
nats: {user: floe, password: former-password-of-nats}
egress:
  defaults: {segment: {max_age: 5m}}
  feeds: [{stream: A}, {stream: B, segment: {max_age: 1m}}, {stream: C}]
  heartbeats: {headers: {Token: former-value-of-a-header}, subjects: [{subject: a.b}]}
compaction: {spark: {conf: {spark.hadoop.fs.s3a.secret.key: former-value-of-spark}}}
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("us-east", "eu-west", {"site": ("us-east", "eu-west")}),
        ("former-secret", "later-secret", {"store.secret_access_key": ("a secret", "a secret")}),
        ("former-password", "later-password", {"nats.password": ("a secret", "a secret")}),
        (", password: former-password-of-nats", ", password_file: FILE", {"nats.password_file": ("a secret", "FILE")}),
        ("user: floe, password: former-password-of-nats", "", {
            "nats.password": ("a secret", None), "nats.user": ("floe", ""),
        }),
        ("former-value-of-a", "later-value-of-a", {"egress.heartbeats.headers.Token": ("a value", "a value")}),
        ("former-value-of-spark", "later-value-of-spark", {
            "compaction.spark.conf.spark.hadoop.fs.s3a.secret.key": ("a value", "a value"),
        }),
        ("max_age: 5m", "max_age: 2m", {"egress.defaults.segment.max_age": ("5m", "2m")}),
        ("defaults: {segment: {max_age: 5m}}", "defaults: {segment: {max_age: 5m}, relay: true}", {
            "egress.defaults.relay": (None, "True"),
        }),
        ("max_age: 1m", "max_age: 3m", {"egress.feeds[B].segment.max_age": ("60.0", "180.0")}),
        ("{stream: A}, ", "", {"egress.feeds[A]": ("an entry", None)}),
        ("{stream: C}", "{stream: C}, {stream: D}", {"egress.feeds[D]": (None, "an entry")}),
        ("[{subject: a.b}]", "[{subject: a.c}]", {"egress.heartbeats.subjects[0].subject": ("a.b", "a.c")}),
        ("  feeds", "  nats: {user: floe, password: of-egress-alone}\n  feeds", {
            "egress.nats.password": ("a secret", "a secret"),
        }),
    ],
    ids=str,
)  # fmt: skip
def test_each_key_that_changed_is_named_once_and_no_secret_is_shown(
    tmp_path: Path, old: str, new: str, found: dict[str, tuple[str | None, str | None]]
) -> None:
    file = tmp_path / "password"
    file.write_text("former-password-of-nats")
    assert old in BEFORE
    [before] = parse(BEFORE, "before")
    [now] = parse(BEFORE.replace(old, new.replace("FILE", str(file))), "now")
    wanted = {key: tuple(str(file) if each == "FILE" else each for each in pair) for key, pair in found.items()}
    assert changed(before, now) == wanted
    assert changed(now, before).keys() == {key.replace("_file", "") for key in wanted}
    assert changed(now, now) == {}


def test_a_secret_in_a_file_is_no_change_and_another_file_is(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"

    def settings(file: Path, secret: str) -> Settings:
        file.write_text(secret)
        [found] = parse(f"store: {{url: s3://floe}}\nnats: {{user: floe, password_file: {file}}}", "file")
        return found

    before = settings(one, "the-first-secret")
    assert changed(before, settings(one, "the-second-secret")) == {}
    assert changed(before, settings(other, "the-first-secret")) == {"nats.password_file": (str(one), str(other))}


def test_the_subjects_of_a_new_stream_are_given_or_follow_from_the_prefixes():
    def subjects(create: Any, *prefixes: str) -> tuple[str, ...]:
        sources = [{"site": f"s{i}", "feed": "f", "subject_prefix": p} for i, p in enumerate(prefixes)]
        return centre({"stream": "T", "create": create, "sources": sources}).ingress.targets[0].subjects_to_create()

    assert subjects(None, "") == ()
    assert subjects({"subjects": ["a.>"]}, "") == ("a.>",)
    assert subjects({}, "p", "q.r", "p") == ("p.>", "q.r.>")
    assert subjects({}, "p.{site}", "q.{feed}.{partition}") == ("p.s0.>", "q.f.*.>")
    assert subjects({"subjects": ["p.*.>"]}, "p.{site}") == ("p.*.>",)


FEED = {"stream": "A"}
SOURCE = {"site": "s", "feed": "f"}


def target(**keys: Any) -> dict[str, Any]:
    return {"stream": "T", "sources": [SOURCE], **keys}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: site(feeds=[FEED | {"start_sequence": 5, "start_at_end": True}]),
            "start_at_end: expected at most one of the start keys, found start_sequence and start_at_end",
        ),
        (
            lambda: site(feeds=[FEED | {"filter_subject": "a.>", "partitions": ["a.1.>", "a.2.>"]}]),
            "filter_subject: expected either filter_subject or partitions, found both",
        ),
        (
            lambda: site(feeds=[FEED | {"partitions": {"count": 4, "subject": "a.>"}}]),
            "subject: expected {partition} in it where count is 4, found 'a.>'",
        ),
        (
            lambda: site(feeds=[FEED, {"stream": "B"}, {"stream": "C", "name": "A"}]),
            "feeds.2.name: expected a name of its own, found 'A' in feeds.0 and feeds.2",
        ),
        (
            lambda: site(feeds=[FEED | {"inspect_field": "x", "inspect_header": "y", "inspect_duration": "1h"}]),
            "inspect_header: expected at most one key to sample by, found inspect_field and inspect_header",
        ),
        (
            lambda: site(feeds=[FEED | {"inspect_subject_token": -1}]),
            "inspect_subject_token: expected inspect_duration beside it, found none",
        ),
        (
            lambda: site(feeds=[FEED | {"inspect_field": "x", "inspect_duration": "1h", "warn_duration": "1h"}]),
            "warn_duration: expected less than inspect_duration, found as much or more",
        ),
        (
            lambda: site(feeds=[FEED | {"advisory": {"subject": "A.%s"}}]),
            "advisory: expected inspect_field, inspect_header or inspect_subject_token beside it, found none",
        ),
        (lambda: site(state_bucket="FLOE_LEASES"), "state_bucket: expected another than lease_bucket"),
        (
            lambda: Settings(store=STORE, egress={"feeds": [FEED]}),
            "site: expected a name where egress has feeds, found none",
        ),
        (
            lambda: centre(target(), target()),
            "targets.1.stream: expected a stream of its own, found 'T' in targets.0 and targets.1",
        ),
        (
            lambda: centre(target(sources=[SOURCE, {"site": ["r", "s"], "feed": ["f"]}])),
            "sources.1: expected each feed of a site once, found s/f in sources.0 and sources.1",
        ),
        (
            lambda: centre(target(sources=[{"site": ["s", "s"], "feed": "f"}])),
            "site.1: expected each site once, found 's' twice",
        ),
        (
            lambda: centre(target(exclusive=False)),
            "delivery: expected at_least_once where exclusive is false, found exactly_once",
        ),
        (
            lambda: centre(target(create={})),
            "create: expected subjects where a source has no subject_prefix, found none",
        ),
        (
            lambda: centre(
                target(
                    sources=[
                        SOURCE | {"subject_prefix": "p", "subject_transform": {"source": ">", "destination": "x.>"}}
                    ]
                )
            ),
            "subject_transform: expected it without subject_prefix and subject_remove, found both",
        ),
        *(
            (
                lambda prefix=prefix: centre(target(sources=[SOURCE | {"subject_prefix": prefix}])),
                "subject_prefix: expected only {site}, {feed}, {incarnation} and {partition} in braces",
            )
            for prefix in ("f.{sites}", "f.{site", "f}.{site}", "f.{}", "f.{{site}}")
        ),
        (lambda: centre(target(sources=[])), "sources: expected at least one entry"),
        (
            lambda: centre(target(sources=[SOURCE | {"control_headers": ["Nats-Msg-Id"]}])),
            "expected a header that ingress does not set itself",
        ),
        (
            lambda: centre(target(sources=[SOURCE | {"control_headers": ["X-A"]}])),
            "expected a header of NATS such as Nats-TTL",
        ),
        (
            lambda: Settings(store=STORE, compaction={"levels": [{"from": 1, "to": 1}]}),
            "to: expected more than from, which is 1, found 1",
        ),
        (
            lambda: Settings(store=STORE, compaction={"levels": [{"from": 0, "to": 1, "min_size": "8G"}]}),
            "max_size: expected at least min_size, found less",
        ),
        (
            lambda: Settings(store=STORE, compaction={"levels": [{"from": 0, "to": 1}, {"from": 0, "to": 2}]}),
            "levels.1.from: expected each level read once, found 0 in levels.0 and levels.1",
        ),
        (
            lambda: NatsSettings(credentials_file="/c", token="t"),
            "token: expected one way to authenticate, found credentials_file and token",
        ),
        (lambda: NatsSettings(user="u"), "user: expected password or password_file beside it, found none"),
        (lambda: NatsSettings(password="p"), "password: expected user beside it, found none"),
        (lambda: NatsSettings(jwt_file="/j"), "jwt_file: expected nkey_seed_file beside it, found none"),
        (lambda: NatsSettings(tls={"cert": "/c"}), "cert: expected key beside it, found none"),
        (
            lambda: NatsSettings(url=["nats://a:1", "tls://b:1"]),
            "url: expected all of them nats:// or all of them tls://, found both",
        ),
        (
            lambda: NatsSettings(url=["nats://a:1", "nats://a:1"]),
            "url.1: expected each server once, found nats://a:1 twice",
        ),
        (
            lambda: Settings(store=STORE | {"access_key_id": "a"}),
            "access_key_id: expected secret_access_key or secret_access_key_file beside it, found none",
        ),
        (
            lambda: Settings(store=STORE | {"encryption": {"kms_key_id": "k"}}),
            "encryption.kms_key_id: expected mode sse-kms beside it, found none",
        ),
        (
            lambda: Settings(store={"url": "file:///data", "endpoint_url": "http://a:1"}),
            "endpoint_url: expected none beside a file:// store, found one",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_and_both_sides_named(make: Any, expected: str):
    assert expected in problem(make)


def test_all_that_does_not_go_together_in_a_section_is_told_at_once():
    told = problem(lambda: NatsSettings(credentials_file="/c", token="t", jwt_file="/j", password="p"))
    assert [part for part in ("token: ", "jwt_file: ", "password: ") if part in told] == [
        "token: ",
        "jwt_file: ",
        "password: ",
    ]


@pytest.mark.parametrize(
    "url", ["nats://h", "tls://h:4222", "nats://[::1]:4222", "nats://nats.us-east.example.net:4222"]
)
def test_nats_urls_have_a_scheme_a_host_and_perhaps_a_port(url: str):
    assert NatsSettings(url=url).url == (url,)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "nats://HOST:PORT or tls://HOST:PORT"),
        ("host:4222", "nats://HOST:PORT or tls://HOST:PORT"),
        ("http://h:1", "nats://HOST:PORT or tls://HOST:PORT"),
        ("nats://h:1/", "without a slash at its end"),
        ("nats://h:1/path", "no path"),
        ("nats://h:0", "a port from 1 to 65535"),
        ("nats://h:70000", "a port from 1 to 65535"),
        ("nats://::1:4222", "an IPv6 address in brackets"),
        ("nats://user:hunter2@h:1", "without user and password (they belong into user and password_file)"),
        ("nats://h:1?a=b", "no path"),
        ("nats:// h:1", "no path"),
        ([], "at least one entry"),
    ],
)
def test_other_nats_urls_are_refused_with_the_reason(url: Any, why: str):
    told = problem(lambda: NatsSettings(url=url))
    assert why in told
    assert "hunter2" not in told


@pytest.mark.parametrize("url", ["s3://floe", "s3://my.bucket-1", "file:///var/lib/floe", "file:///with%20space"])
def test_a_store_is_a_bucket_or_a_folder(url: str):
    assert Settings(store={"url": url}).store.url == url


@pytest.mark.parametrize(
    ("store", "why"),
    [
        ({"url": "s3://"}, "3 to 63 of a-z 0-9 . -"),
        ({"url": "s3://Floe"}, "3 to 63 of a-z 0-9 . -"),
        ({"url": "s3://ab"}, "3 to 63"),
        ({"url": "s3://a..b"}, "3 to 63"),
        ({"url": "s3://192.168.0.1"}, "3 to 63"),
        ({"url": "s3://floe/"}, "nothing behind the bucket (a path belongs into prefix)"),
        ({"url": "s3://key:secret@floe"}, "without credentials"),
        ({"url": "floe"}, "s3://BUCKET or file:///FOLDER"),
        ({"url": "gs://floe"}, "s3://BUCKET or file:///FOLDER"),
        ({"url": "file://relative"}, "an absolute folder"),
        ({"url": "file:///"}, "an absolute folder below /"),
        ({"url": "file:///a/../b"}, "an absolute folder"),
        ({"endpoint_url": "minio:9000"}, "https://HOST:PORT or http://HOST:PORT"),
        ({"endpoint_url": "http://minio:9000/"}, "without a slash at its end"),
        ({"endpoint_url": "http://minio:9000/path"}, "no path"),
        ({"endpoint_url": "http://u:p@minio:9000"}, "without user and password"),
        ({"prefix": "/data"}, "none beginning with . or _"),
        ({"prefix": "data/"}, "joined by /"),
        ({"prefix": "a//b"}, "joined by /"),
        ({"prefix": "a/../b"}, "none beginning with . or _"),
        ({"prefix": "_floe"}, "none beginning with . or _"),
        ({"region": ""}, "a value"),
    ],
)
def test_other_stores_are_refused_with_the_reason(store: dict[str, Any], why: str):
    assert why in problem(lambda: Settings(store=STORE | store))


@pytest.mark.parametrize("name", ["us-east", "US_EAST_1", "no", "012", "a" * 63])
def test_sites_are_short_plain_names(name: str):
    assert Settings(store=STORE, site=name).site == name


@pytest.mark.parametrize("name", ["../x", "a/b", "a b", "a" * 64, "a" * 300, ".", "-a", "_a", "é", "🙂", "a\n", "a.b"])
def test_other_names_are_no_sites(name: str):
    assert "expected 1 to 63 of A-Z a-z 0-9 _ -" in problem(lambda: Settings(store=STORE, site=name))


@pytest.mark.parametrize("name", ["a.b", "a b", "a*", "a>", "a/b", "a\\b", "a\tb", "x" * 256])
def test_names_that_nats_does_not_take_are_no_streams(name: str):
    assert "expected a stream name" in problem(lambda: site(feeds=[{"stream": name}]))


@pytest.mark.parametrize("subject", ["a..b", ".a", "a.", "a b", "a.>.b", "a\r\nPUB"])
def test_filters_are_subjects(subject: str):
    assert "expected a subject" in problem(lambda: site(feeds=[FEED | {"filter_subject": subject}]))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"feeds": [FEED | {"segment": {"max_age": "100ms"}}]}, "1s to 1d (each segment is an object"),
        ({"feeds": [FEED | {"segment": {"max_size": 1}}]}, "64K to 4G (smaller ones cost more requests"),
        ({"feeds": [FEED | {"segment": {"max_messages": 0}}]}, "1 to 100000000"),
        ({"feeds": [FEED | {"segment": {"compression_level": 23}}]}, "1 to 22"),
        ({"feeds": [FEED | {"max_age": "10ms"}]}, "0 or at least 1s"),
        ({"feeds": [FEED | {"start_sequence": 2**63}]}, "0 to 9223372036854775807"),
        ({"lease_ttl": "500ms"}, "1s to 10m (it is renewed every third of it)"),
        ({"memory_limit": "1M"}, "16M to 1T"),
        ({"kv_replicas": 6}, "0 to 5"),
        ({"shutdown_timeout": "0s"}, "1s to 1h"),
    ],
)
def test_values_out_of_range_are_refused_with_the_range_and_the_reason(keys: dict[str, Any], why: str):
    assert f"expected {why}" in problem(lambda: site(**keys))


@pytest.mark.parametrize("subject", ["adv.%x", "adv.%%x", "adv.%s.%V", "adv.%", "adv.%S.%v", "adv.%s%"])
def test_other_letters_in_the_subject_of_advisories_are_refused(subject: str):
    sampled = FEED | {"inspect_field": "sender", "inspect_duration": "1h"}
    told = problem(lambda: site(feeds=[sampled | {"advisory": {"subject": subject}}]))
    assert "%s for the event, %v for the value" in told


def test_zero_switches_off_what_may_be_off():
    assert site(feeds=[FEED | {"max_age": "0s"}]).egress.feeds[0].max_age == 0.0


def test_a_stream_that_flows_into_itself_is_a_loop():
    settings = Settings(
        site="s",
        store=STORE,
        egress={"feeds": [{"stream": "A", "name": "f"}]},
        ingress={"targets": [{"stream": "A", "sources": [SOURCE]}]},
    )
    elsewhere = Settings.model_validate(
        settings.model_dump(by_alias=True)
        | {"ingress": {"nats": {"url": "nats://other:1"}, "targets": [target(stream="A")]}}
    )
    assert [key for key, _ in settings.loops()] == ["ingress.targets.0.sources.0"]
    assert list(elsewhere.loops()) == []
