"""`floe config import-stream-replicator`: the result for each key, and for files that are no configuration."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import floe
from common.migration import read
from common.migration.read import FILE, TOPICS_FILE, Shape, convert_duration
from common.migration.write import Imported, import_stream_replicator, to_yaml
from common.settings.loader import parse_documents
from common.settings.root import Settings
from common.settings.yaml import ConfigFileError, Problems, parse_yaml
from tests.support.replicator_configs import DOCUMENTED, HEAD, KEYS, LOGINS, PARAMETERS, PARTITIONED, TOPICS

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "migrate.md"
SERVERS = {"S": "nats://s:4222,nats://r:4222", "S2": "nats://r, nats://s"}
WAY = "    source_url: nats://s:4222\n    target_url: nats://t:4222\n"


def imported(text: str) -> Imported:
    return import_stream_replicator(text.encode(), "sr.yaml")


def settings(found: Imported) -> dict[str, Settings]:
    """Return the settings in each file, with its variables set to `value`."""
    return {
        file.name: parse_documents(file.text.encode(), file.name, dict.fromkeys(file.variables, "value"))[0].settings
        for file in found.files
    }


def site(text: str) -> Settings:
    return settings(imported(text))["site.yaml"]


def central(text: str) -> Settings:
    return settings(imported(text))["central.yaml"]


def stream(*lines: str, name: str = "S") -> str:
    """Return one entry of `streams`."""
    return f"  - stream: {name}\n{WAY}" + "".join(f"    {line}\n" for line in lines)


def config(*streams: str, head: str = "name: A\n") -> str:
    return f"{head}streams:\n{''.join(streams)}"


def problems(text: str | bytes) -> list[str]:
    with pytest.raises(ConfigFileError) as error:
        import_stream_replicator(text if isinstance(text, bytes) else text.encode(), "sr.yaml")
    return list(error.value.problems)


def notes(text: str) -> dict[str, str]:
    return {note.path: note.text for note in imported(text).notes}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(floe.cli, ["config", *arguments], prog_name="floe")


def importing(folder: Path, text: str, *arguments: str) -> Result:
    (folder / "sr.yaml").write_text(text)
    return run("import-stream-replicator", str(folder / "sr.yaml"), *arguments)


# Valid files


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_documented_becomes_files_that_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = importing(tmp_path, DOCUMENTED[name], "--out-dir", str(tmp_path / "floe"))
    printed = importing(tmp_path, DOCUMENTED[name])
    (tmp_path / "both.yaml").write_text(printed.stdout)
    files = sorted((tmp_path / "floe").iterdir())
    assert (made.exit_code, [str(file) for file in files]) == (0, sorted(made.stdout.split())), made.output
    for variable in re.findall(r"\$\{(\w+)\}", printed.stdout):
        monkeypatch.setenv(variable, "value")
    for file in (*files, tmp_path / "both.yaml"):  # also as one file of all documents
        checked = run("check", "-c", str(file))
        assert checked.exit_code == 0, checked.output
    if name == "registration":
        assert "(site US-EAST, 2 feeds, 0 targets)" in checked.stdout
        assert "(0 feeds, 2 targets)" in checked.stdout


def test_the_worked_examples_are_sampled_as_they_were_and_a_renamed_copy_keeps_its_subjects() -> None:
    [feed] = site(DOCUMENTED["sampled"]).egress.feeds
    assert (feed.name, feed.stream, feed.inspect_field) == ("NODE_DATA", "NODE_DATA", "sender")
    assert (feed.inspect_duration, feed.warn_duration, feed.size_trigger) == (3600, 720, 1024)
    assert (feed.advisory.subject, feed.advisory.reliable) == ("NODE_DATA_ADVISORIES", True)
    assert feed.inspect_force_field == "force_copy"
    [target] = central(DOCUMENTED["renamed"]).ingress.targets
    [source] = target.sources
    assert (target.stream, source.site, source.feed) == ("FLEET_NODES", ("US-EAST",), ("NODE_DATA",))
    assert (source.subject_prefix, source.subject_remove) == ("FLEET_NODES", "NODE_DATA")
    assert target.subjects_to_create() == ("FLEET_NODES.>",)


def test_entries_that_split_a_stream_become_partitions_of_one_feed() -> None:
    found = settings(imported(PARTITIONED))

    [feed] = found["site.yaml"].egress.feeds
    [target] = found["central.yaml"].ingress.targets
    assert feed.filters() == ("NODES.US-EAST-1.0.>", "NODES.US-EAST-1.1.>")
    assert [source.feed for source in target.sources] == [("NODE_DATA",)]
    assert target.subjects_to_create() == feed.filters()


COPIES = [
    (["filter_subject: a.>", "name: one"], ["filter_subject: a.b", "name: two"], [("S", "a.>"), ("S_two", "a.b")]),
    (["inspect_field: x", "inspect_duration: 1h"], ["target_stream: W", "name: n"], [("S", ""), ("S_n", "")]),
    (["target_subject_prefix: a"], ["target_subject_prefix: b", "name: n"], [("S", ""), ("S_n", "")]),
]


@pytest.mark.parametrize(
    ("one", "other", "feeds"), COPIES, ids=["overlapping filters", "sampled and whole", "twice into one target"]
)
def test_copies_that_differ_are_named_apart(one: list[str], other: list[str], feeds: list[tuple[str, str]]) -> None:
    found = settings(imported(config(stream(*one), stream(*other))))
    assert [(feed.name, feed.filter_subject) for feed in found["site.yaml"].egress.feeds] == feeds
    sources = [source.feed for target in found["central.yaml"].ingress.targets for source in target.sources]
    assert sources == [(name,) for name, _ in feeds]


def test_each_source_is_a_site_and_each_target_a_centre_in_whatever_order_their_servers_are() -> None:
    centres = settings(imported(config(stream(), stream("target_stream: T2", "name: b").replace("t:4222", "u:4222"))))
    assert list(centres) == ["site.yaml", "central.yaml", "central-2.yaml"]
    assert [feed.name for feed in centres["site.yaml"].egress.feeds] == ["S"], "archived once"
    assert centres["central-2.yaml"].ingress.targets[0].stream == "T2"

    sites = settings(imported(config(stream(), stream(name="S2").replace("nats://s:4222", "nats://u:4222"))))
    assert list(sites) == ["site-A.yaml", "site-A-2.yaml", "central.yaml"]
    assert sites["site-A-2.yaml"].egress.nats.url == ("nats://u:4222",)
    assert [t.sources[0].site for t in sites["central.yaml"].ingress.targets] == [("A",), ("A-2",)]

    one, two = (stream(name=name).replace("nats://s:4222", urls) for name, urls in SERVERS.items())
    assert [file.name for file in imported(config(one, two)).files] == ["site.yaml", "central.yaml"]


def test_a_name_no_site_may_have_is_changed_and_noted() -> None:
    text = config(stream(), head='name: "us east/1"\n')

    assert site(text).site == "us-east-1"
    assert "choose a name" in imported(text).files[0].text


def test_targets_are_created_only_where_they_were_and_their_subjects_cannot_meet() -> None:
    clash = config(stream("target_subject_prefix: f"), stream("target_subject_prefix: f.x", name="S2"))
    apart = config(stream("target_subject_prefix: f.y"), stream("target_subject_prefix: f.x", name="S2"))
    never = config(stream("target_subject_prefix: f", "no_target_create: true"))

    assert [target.create for text in (clash, never) for target in central(text).ingress.targets] == [None] * 3
    assert [t.subjects_to_create() for t in central(apart).ingress.targets] == [("f.y.>",), ("f.x.>",)]


# Logins


@pytest.mark.parametrize("login", ["u:hush-hush", "hush-hush", "u:hush%2Dhush"], ids=["password", "token", "coded"])
def test_no_secret_is_printed(login: str, tmp_path: Path) -> None:
    text = config(stream()).replace("nats://s", f"nats://{login}@s")
    found = [importing(tmp_path, text, *more) for more in ((), ("--json",), ("--out-dir", str(tmp_path / "out")))]
    written = (tmp_path / "out" / "site.yaml").read_text()
    assert [result.exit_code for result in found] == [0, 0, 0]
    assert "hush" not in written + "".join(result.output for result in found)
    assert "${FLOE_SOURCE_" in written


@pytest.mark.parametrize(
    "rest",
    ["hush/x@s:4222", "hush#@s:4222", "hush@", "hush@s?hush", "hush@s,nats://v:hush@s", "hush@s:99999", "hush@[::1",
     "12?hush@s", "hush\u2105@s", "hush@s?credentials=x&jwt=hush", "hush@s?connect_timeout=9", "hush@s,ws://s"],
)  # fmt: skip
def test_a_url_that_cannot_be_read_is_refused_without_being_shown(rest: str) -> None:
    [problem] = problems(config(stream()).replace("nats://s:4222", f"nats://u:{rest}"))

    assert problem.startswith("sr.yaml:4:17: streams.0.source_url: ")
    assert "hush" not in problem


def test_a_parameter_that_is_almost_one_is_named() -> None:
    [problem] = problems(config(stream()).replace("nats://s:4222", "nats://s?credential=/c"))

    assert problem.endswith("found 'credential'; did you mean credentials?")


def test_headers_that_look_like_secrets_become_variables() -> None:
    beats = "heartbeats: {url: nats://s, headers: {Authorization: hush, from: here}, subjects: [{subject: a}]}\n"
    found = imported(config(stream()) + beats)

    assert "hush" not in found.files[0].text
    assert settings(found)["site.yaml"].egress.heartbeats.headers == {"Authorization": "value", "from": "here"}


def test_parameters_of_urls_become_keys_and_chorias_login_is_named_as_left_out_once() -> None:
    assert imported(LOGINS).files[0].text.count("Choria's login is not imported") == 1
    found = settings(imported(LOGINS))
    one = found["site-US-EAST.yaml"].egress.nats
    assert (one.credentials_file, one.connect_timeout, one.tls.ca) == ("/etc/nats.creds", 5, "/path/to/ca.pem")
    target = found["central.yaml"].ingress.nats
    assert (target.jwt_file, target.nkey_seed_file) == ("/etc/client.jwt", "/etc/client.nk")
    assert (target.tls.ca, target.tls.cert, target.tls.insecure) == ("/path/to/second-ca.pem", "", True)
    assert found["central-2.yaml"].ingress.nats.tls.handshake_first
    two = found["site-US-EAST-2.yaml"].egress.nats
    assert (two.user, two.password.get_secret_value()) == ("user", "value")
    assert two.url == ("nats://one.example.net:4222", "nats://two.example.net:4222")


def test_text_that_looks_like_a_variable_stays_text() -> None:
    text = config(stream('inspect_field: "${HOME} and $${x}"', "inspect_duration: 1h"))

    assert site(text).egress.feeds[0].inspect_field == "${HOME} and $${x}"


# Keys


STARTS = [
    (("start_delta: 1d", "start_sequence: 7", "start_at_end: true"), "start_at_end"),
    (("start_delta: 1d", "start_sequence: 7"), "start_sequence"),
    (("start_delta: 1d", "start_time: 2026-01-02T03:04:05Z"), "start_delta"),
    (("start_time: 2026-01-02T03:04:05+01:00",), "start_time"),
]


@pytest.mark.parametrize(("lines", "key"), STARTS)
def test_of_several_starts_the_one_counts_that_counted(lines: tuple[str, ...], key: str) -> None:
    feed = site(config(stream(*lines))).egress.feeds[0]
    starts = ("start_at_end", "start_sequence", "start_time", "start_delta")
    assert [name for name in starts if getattr(feed, name)] == [key]


def test_durations() -> None:
    """Drop fractions of an hour after days, as stream-replicator does."""
    theirs = ["1M", "1Y", "1.5d", "0.01d", "1W", "90s", "1m30s", "1500ms", " 5m ", ""]
    ours = ["4w2d", "52w1d", "1d12h", "0s", "1w", "1m30s", "1m30s", "1s500ms", "5m", "0s"]
    assert [convert_duration(each) for each in theirs] == ours


@pytest.mark.parametrize("text", ["5", "-5m", "1x", "1d2h", "nan", "infd", "1e3d", "5 m", "100us", "999Y", "١d"])
def test_durations_that_cannot_be_converted(text: str) -> None:
    [problem] = problems(config(stream(f'max_age: "{text}"')))

    assert problem.startswith("sr.yaml:6:14: streams.0.max_age: expected ")


def test_sampling_that_never_took_place_is_noted() -> None:
    found = notes(config(stream("inspect_subject_token: -1", "inspect_duration: 1h")))
    found |= notes(config(stream("inspect_field: x", "size_trigger: 5")))
    words = {"inspect_subject_token": "never sampled by this key", "inspect_field": "copies every message"}
    for key, part in {**words, "size_trigger": "no effect"}.items():
        assert part in found[f"streams.0.{key}"]


def test_every_key_is_carried_over_or_named() -> None:
    lines = ["ephemeral: true", "no_target_create: true", "leader_election_name: L"]
    lines += ["choria: {seed_file: a, jwt_file: b}", "source_tls: {cert: only}"]
    top = ["profiling: false\n", "logfile: l\n", "state_store: s\n", "loglevel: loud\n"]
    found = notes(config(stream(*lines), head="".join(top) + "name: A\n"))
    names = [*top, *(f"streams.0.{line}" for line in lines)]
    assert set(found) == {name.split(":")[0] for name in names}


def test_heartbeats_go_where_their_server_is_read() -> None:
    other = stream(name="S2").replace("nats://s:4222", "nats://two:4222")
    beats = "heartbeats: {url: 'nats://two', interval: 1m, subjects: [{subject: x.y, interval: 5s}]}\n"
    found = settings(imported(config(stream(), other) + beats))

    assert not found["site-A.yaml"].egress.heartbeats.subjects
    [subject] = found["site-A-2.yaml"].egress.heartbeats.subjects
    assert (subject.subject, subject.interval) == ("x.y", 5)
    assert found["site-A-2.yaml"].egress.heartbeats.interval == 60


def test_what_floe_refuses_is_named_in_the_imported_file() -> None:
    [problem] = problems(config(stream("inspect_field: x", "inspect_duration: 1h", "warn_duration: 2h")))

    assert problem.startswith("sr.yaml:8:20: egress.feeds.0.warn_duration: expected less than inspect_duration")
    assert problem.endswith("(site.yaml)")


# Files that are no configuration


WRONG_FILES = [
    ("name: !!python/object/apply:os.system ['touch %s']\n", "sr.yaml:1:7: name: expected a value, found the tag"),
    ("name: A\nname: B\n", "sr.yaml:2:1: name: expected each key once, found it on line 1 too"),
    ("name: A\nstreems: []\n", "sr.yaml:2:1: streems: unknown key of stream-replicator; did you mean streams?"),
    ("name: 1e3\n", "sr.yaml:1:7: name: expected text; quote it, found something else"),
    ("streams: []\n", "sr.yaml:1:1: name: expected a value (required), found nothing"),
    ("name: A\n---\nname: B\n", "sr.yaml:3:1: expected one document, found 2"),
    ("name: A\nstreams: [{stream: S}]\n", "sr.yaml:2:11: streams.0.source_url: expected a URL (required)"),
    (config(stream("start_sequence: -1")), "sr.yaml:6:21: egress.feeds.0.start_sequence: expected "),
    (HEAD + "streams:\n  - first: {source: s}\n", "sr.yaml:7:5: streams.0.first: unknown key of stream-replicator"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES)
def test_what_is_wrong_is_one_line_with_its_place(text: str, message: str) -> None:
    assert any(problem.startswith(message) for problem in problems(text)), problems(text)


@pytest.mark.parametrize(
    "data", [b"\xff\xfen\x00", b"\x00\x01\x02", b"name: \xe9\n", b"a: b: c\n", b"\t- x", b"{" * 1000, b"x" * 2_000_000]
)
def test_what_is_no_text_is_refused(data: bytes) -> None:
    assert all(problem.startswith("sr.yaml") for problem in problems(data))


def test_a_byte_order_mark_is_ignored_and_a_number_with_a_leading_zero_is_a_name() -> None:
    assert [site(f"{text}\nstreams: []\n").site for text in ("\ufeffname: A", "name: 012")] == ["A", "012"]


# The command


def test_problems_end_with_78_and_a_missing_file_too(tmp_path: Path) -> None:
    result, as_json = (importing(tmp_path, "name: A\nstreems: 1\nprofilin: 2\n", *more) for more in ((), ("--json",)))
    missing = run("import-stream-replicator", str(tmp_path / "none.yaml"))
    assert [each.exit_code for each in (result, as_json, missing, run("import-stream-replicator"))] == [78, 78, 78, 2]
    assert len(result.stderr.splitlines()) == 2
    assert [p["line"] for p in json.loads(as_json.stdout)["problems"]] == [2, 3]


def test_json_holds_all_and_no_file_is_overwritten_nor_written_where_it_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "central.yaml").write_text("mine")

    found = json.loads(importing(tmp_path, DOCUMENTED["whole"], "--json").stdout)
    assert [document["name"] for document in found["documents"]] == ["site.yaml", "central.yaml"]
    assert found["variables"] == ["FLOE_BUCKET", "FLOE_S3_KEY", "FLOE_S3_SECRET"]
    assert {"path": "logfile", "line": 5, "column": 10}.items() <= found["notes"][2].items()

    there, nowhere = (
        importing(tmp_path, DOCUMENTED["whole"], "--out-dir", str(tmp_path / to)) for to in (".", "sr.yaml/x")
    )
    assert (there.exit_code, (tmp_path / "central.yaml").read_text()) == (2, "mine")
    assert not (tmp_path / "site.yaml").exists()
    assert (nowhere.exit_code, len(nowhere.stderr.splitlines())) == (2, 1)


# The keys and the page


def every_key(shape: Shape = FILE, prefix: str = "") -> Iterator[str]:
    """Return every key by its path, such as `streams.advisory.subject`; sections too."""
    for key, kind in shape.items():
        yield prefix + key
        for below in kind if isinstance(kind, list) else [kind]:
            if not isinstance(below, str):
                yield from every_key(below, f"{prefix}{key}.")


def test_the_keys_are_those_of_the_program() -> None:
    # The keys of sections that occur in several places are named once.
    repeated = re.compile(r"^(streams|heartbeats)\.((source_|target_)?(tls|choria))\.")

    assert {key for key in every_key() if not repeated.match(key)} == set(KEYS)
    assert set(read.PARAMETERS) == set(PARAMETERS)


def test_the_page_on_migration_names_every_key() -> None:
    table = PAGE.read_text().split("<!-- keys: begin -->")[1].split("<!-- keys: end -->")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", " ".join(rows))) == {*KEYS, *(f"?{name}" for name in PARAMETERS)}


def test_the_form_before_0_5_becomes_feeds_with_a_remark_for_each_key_without_a_counterpart() -> None:
    found = settings(imported(TOPICS))
    [feed] = found["site.yaml"].egress.feeds
    assert (found["site.yaml"].site, feed.stream, feed.filter_subject) == ("dc1", "acme_cmdb", "acme.cmdb")
    assert (feed.inspect_field, feed.inspect_force_field, feed.inspect_duration) == ("host", "updated", 3600)
    assert (feed.warn_duration, feed.advisory.subject, feed.advisory.reliable) == (1800, "sr.advisories.cmdb", False)
    assert found["site.yaml"].egress.monitor.listen == ":10000"
    assert (found["site.yaml"].log.level, found["site.yaml"].nats.tls.ssl_dir) == ("debug", "/etc/sr/ssl")
    central = found["central.yaml"]
    [target] = central.ingress.targets
    assert (central.nats.tls.scheme, target.subjects_to_create()) == ("files", ("acme.cmdb",))
    remarked = "topic workers queued queue_group name monitor source_cluster_id target_cluster_id advisory.cluster"
    assert {*notes(TOPICS)} == {*(f"topics.cmdb.{key}" for key in remarked.split()), "state_dir", "logfile"}
    manual = TOPICS.replace("scheme: puppet, ssl_dir: /etc/sr/ssl", "scheme: manual, cert: c.pem, key: k.pem")
    assert "only with scheme: puppet" in notes(manual)["tls.identity"]
    assert site(manual).nats.tls.key == "k.pem"


def test_problems_of_the_form_before_0_5_are_where_they_are_in_the_file() -> None:
    wrong = TOPICS.replace("acme.cmdb", "[]").replace("workers", "worker")
    assert [line.partition(" of stream-rep")[0].partition(", found")[0] for line in problems(wrong)] == [
        "sr.yaml:7:12: topics.cmdb.topic: expected text",
        "sr.yaml:8:5: topics.cmdb.worker: unknown key",
    ]
    wrong = TOPICS.replace("    topic: acme.cmdb\n", "").replace("age: 1h", "age: soon").replace("t:4222", "t:x")
    found = {line.partition(": expected")[0].partition(": ")[2] for line in problems(wrong)}
    assert found == {"topics.cmdb.topic", "topics.cmdb.age", "topics.cmdb.target_url"}
    assert "unknown key" in problems(json.dumps({"topics": {}, "streams": []}))[0]
    found = {line.partition(": ")[2] for text in ("topics:\n", "topics: {}\n") for line in problems(text)}
    assert found == {"topics: expected at least one topic, found none"}


def test_every_key_of_the_form_before_0_5_is_on_the_page() -> None:
    table = PAGE.read_text().split("<!-- topics: begin -->")[1].split("<!-- topics: end -->")[0]
    rows = [row.split(" | ")[0] for row in table.strip().splitlines()[2:]]
    shape = {**TOPICS_FILE, "topics": [TOPICS_FILE["topics"].shape]}
    assert {*re.findall(r"`([^`]+)`", " ".join(rows))} == {
        key.removeprefix("topics.") for key in every_key(shape) if not key.startswith("topics.tls")
    }


def test_the_example_of_the_page_is_what_the_command_prints() -> None:
    given, *expected = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)

    found = import_stream_replicator(given.encode(), "sr.yaml")

    assert [file.text for file in found.files] == expected


@pytest.mark.parametrize("text", ["a", "true", "012", "1e5", "5", "no", "\x7f", "\u2028", "\ud800", "#", ": ", "~", ""])
def test_text_comes_back_from_yaml_as_it_was(text: str) -> None:
    [root] = parse_yaml(to_yaml({text: text, "k": text}).encode(), Problems("x"))
    assert (next(iter(root.entries)), root.entries["k"].value()) == (text, text)  # type: ignore[union-attr]


def test_a_comment_cannot_be_broken_out_of() -> None:
    text = imported(TOPICS.replace("  cmdb:", '  "a\\nb: c\\r\\x85d\\u2028e":')).files[0].text

    assert "topics.a b: c  d e.workers (line 8): " in text
    assert all(line.startswith("# ") for line in text.partition("site:")[0].splitlines())
