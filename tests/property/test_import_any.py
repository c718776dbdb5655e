"""Any file of stream-replicator becomes files of Floe that pass the check, or lines with places."""

import re
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from common.migration import read
from common.migration.write import Imported, import_stream_replicator
from common.settings.loader import parse_documents
from common.settings.yaml import ConfigFileError, Problem

WORDS = st.sampled_from(["a", "B_1", "é", "${X}", "x y", "*", "a.b", "#", "true", "012", "%s", '"', "\u2028"])
NAMES = st.sampled_from(["NODES", "N2", "REG-1"])
SUBJECTS = st.sampled_from(["a.>", "a.b", "a.*", "b.>", "c.0.>", "c.1.>", ">"])
DURATIONS = st.sampled_from(["1s", "5m", "1h", "2h", "1d", "1w", "1M", "1Y", "1.5d", "90m", "1h30m"])
FILES = st.sampled_from(["/etc/a.pem", "/x y.pem"])
HOSTS = ["nats://one:4222", "tls://two", "nats://[::1]:4222", "nats://u:hidden@one:4222", "three"]
URLS = st.sampled_from([*HOSTS, "nats://t?credentials=/c", "nats://one:4222,nats://two", "nats://j?jwt=/j&nkey=/n"])
TLS = st.fixed_dictionaries({}, optional=dict.fromkeys(read.TLS, FILES))
CHORIA = st.fixed_dictionaries({}, optional=dict.fromkeys(read.CHORIA, FILES))
HEADERS = st.dictionaries(st.sampled_from(["a", "X-Auth", "b.c"]), st.sampled_from(["1", "${Y}"]), max_size=2)

SAMPLED = {
    "warn_duration": st.sampled_from(["1h", "5m"]),
    "size_trigger": st.sampled_from([0, 1, 2.5, 1024]),
    "inspect_force_field": WORDS,
    "advisory": st.fixed_dictionaries({"subject": st.sampled_from(["adv.%s.%v", "adv"])}),
}
TOKENS = {"inspect_subject_token": st.sampled_from([-1, 0, 3])}
SAMPLING = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"inspect_field": WORDS, "inspect_duration": st.sampled_from(["2h", "1d"])}, optional=SAMPLED
    ),
    st.fixed_dictionaries({"inspect_header": WORDS}, optional={"inspect_duration": DURATIONS}),
    st.fixed_dictionaries(TOKENS, optional={"size_trigger": st.just(5)}),
)
STREAM = st.builds(
    lambda entry, sampling: {**entry, **sampling},
    st.fixed_dictionaries(
        {"stream": NAMES, "source_url": URLS, "target_url": URLS},
        optional={
            "name": NAMES,
            "filter_subject": SUBJECTS,
            "target_stream": NAMES,
            "target_subject_prefix": st.sampled_from(["fleet", "fleet.eu", "NODES"]),
            "target_subject_remove": st.sampled_from(["NODES", ".x.", "fleet"]),
            "start_sequence": st.sampled_from([0, 1, 2**62]),
            "start_delta": DURATIONS,
            "start_at_end": st.booleans(),
            "start_time": st.just("2026-01-02T03:04:05.123+01:00"),
            "max_age": DURATIONS,
            **dict.fromkeys(("tls", "source_tls", "target_tls"), TLS),
            **dict.fromkeys(("choria", "source_choria"), CHORIA),
            **dict.fromkeys(("ephemeral", "target_initiated", "no_target_create"), st.booleans()),
            "leader_election_name": WORDS,
        },
    ),
    SAMPLING,
)
BEAT = {"subject": st.sampled_from(["h.b", "h"])}
BEATS = st.lists(st.fixed_dictionaries(BEAT, optional={"interval": DURATIONS, "headers": HEADERS}), max_size=2)
HEARTBEATS = st.fixed_dictionaries(
    {"url": URLS, "subjects": BEATS},
    optional={"interval": st.sampled_from(["1s", "10s", "1d"]), "headers": HEADERS, "leader_election": st.booleans()},
)
FILE = st.fixed_dictionaries(
    {"name": WORDS, "streams": st.lists(STREAM, max_size=5)},
    optional={
        "tls": TLS,
        "choria": CHORIA,
        "monitor_port": st.sampled_from([0, 8080, 65535]),
        "profiling": st.booleans(),
        "logfile": WORDS,
        "loglevel": st.sampled_from(["debug", "info", "warn", "loud"]),
        "state_store": FILES,
        "heartbeats": HEARTBEATS,
    },
)


def imported(document: Any) -> Imported | tuple[Problem, ...]:
    """Return the imported files, or the problems of the file."""
    try:
        return import_stream_replicator(yaml.safe_dump(document, allow_unicode=True).encode(), "sr.yaml")
    except ConfigFileError as error:
        return error.found


@settings(max_examples=60)
@given(FILE)
def test_the_result_passes_the_check_and_loses_no_stream(document: dict[str, Any]) -> None:
    found = imported(document)
    if isinstance(found, tuple):
        # Only limits of Floe itself: warnings later than samples, intervals of more than a day, heartbeats
        # twice to one subject.
        assert all(problem.name == "sr.yaml" and problem.line for problem in found), found
        assert all(re.search("inspect_duration|1d|each subject once", problem.message) for problem in found), found
        return
    files = {
        file.name: parse_documents(file.text.encode(), file.name, dict.fromkeys(file.variables, "value"))[0].settings
        for file in found.files
    }
    feeds = {(s.site, feed.name): feed for s in files.values() for feed in s.egress.feeds}
    targets = [t for s in files.values() for t in s.ingress.targets]
    pairs = [(t.stream, pair) for t in targets for source in t.sources for pair in source.site_feed_pairs()]
    assert all(pair in feeds for _, pair in pairs)
    assert {pair for _, pair in pairs} == set(feeds)
    assert sum(len(feeds[pair].filters()) for _, pair in pairs) == len(document["streams"])
    assert all("hidden" not in file.text for file in found.files)


@settings(max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda below: (
            st.lists(below, max_size=3)
            | st.dictionaries(st.sampled_from([*read.STREAM, *read.FILE, "x"]), below, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_whatever_is_no_configuration_is_lines_with_places(document: Any) -> None:
    found = imported(document)

    if isinstance(found, tuple):
        assert found
        assert all(str(problem).startswith("sr.yaml") and "\n" not in str(problem) for problem in found)
