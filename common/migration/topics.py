"""The configuration of stream-replicator before 0.5 (`topics`, for NATS Streaming), in the form since then (`streams`).

Each value keeps its place and the name of its key, so that problems and remarks name what the file has.
"""

import re
from collections.abc import Iterator
from typing import Any

from common.migration.read import FLAG, NON_NEGATIVE_INTEGER, TEXT, FileKeys, NamedSections, Shape, all_of

TOPIC_TLS: Shape = all_of(TEXT, "identity scheme ssl_dir ca cert key")
TOPIC: Shape = (
    all_of(TEXT, "topic source_url source_cluster_id target_url target_cluster_id queue_group name")
    | all_of(TEXT, "inspect update_flag age")
    | all_of(FLAG, "queued disable_source_tls disable_target_tls")
    | all_of(NON_NEGATIVE_INTEGER, "workers monitor")
    | {"tls": TOPIC_TLS, "advisory": all_of(TEXT, "target cluster age")}
)
TOPICS_FILE: Shape = (
    {"topics": NamedSections(TOPIC), "tls": TOPIC_TLS}
    | all_of(TEXT, "logfile state_dir")
    | all_of(FLAG, "debug verbose")
)

#: Keys of a topic without a counterpart, by the names that they have in the result of `as_streams`.
_LEFT_OUT = "workers queued queue_group source_cluster_id target_cluster_id"
_RENAMED = {"inspect_field": "inspect", "inspect_force_field": "update_flag", "inspect_duration": "age"}


def as_streams(old: FileKeys) -> FileKeys:
    """Return the file as `streams`, one for each topic. The site is named after the cluster of the first source."""
    topics: tuple[FileKeys, ...] = old.get("topics", ())
    site = next((each for each in topics if each.text("source_cluster_id")), None)
    found: dict[str, tuple[str, FileKeys, Any]] = {"streams": ("topics", old, tuple(_stream(t, old) for t in topics))}
    found["name"] = ("source_cluster_id", site or old, site.text("source_cluster_id") if site else "site")
    if port := next((each for each in topics if each.has("monitor")), None):
        found["monitor_port"] = ("monitor", port, port.get("monitor"))
    level = next((key for key in ("debug", "verbose") if old.get(key)), "")
    found |= {"loglevel": (level, old, "debug" if level == "debug" else "info")} if level else {}
    for key, name in (("logfile", "logfile"), ("state_store", "state_dir")):
        found |= {key: (name, old, old.get(name))} if old.has(name) else {}
    return _section(old, found)


def stream_of(topic: str) -> str:
    """Return the name of the JetStream stream that holds a topic of NATS Streaming."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", topic).strip("_") or "ALL"


def _stream(topic: FileKeys, old: FileKeys) -> FileKeys:
    found: dict[str, tuple[str, FileKeys, Any]] = {}
    name = topic.text("topic")
    found["stream"] = ("topic", topic, name and stream_of(name))
    found["filter_subject"] = ("topic", topic, name)
    found["name"] = ("topic", topic, stream_of(topic.path.rpartition(".")[2]))
    same = {name: name for name in ("source_url", "target_url", *_LEFT_OUT.split())}
    renamed = {**same, **_RENAMED, "durable_name": "name", "topic_monitor": "monitor"}
    found |= {key: (name, topic, topic.get(name)) for key, name in renamed.items() if topic.has(name)}
    for side in ("source", "target"):
        tls = topic.get("tls") or old.get("tls")
        if tls is not None and not topic.get(f"disable_{side}_tls"):
            found[f"{side}_tls"] = ("tls", topic if topic.has("tls") else old, _section(tls, dict(_tls(tls))))
        if tls is not None and tls.has("identity") and tls.text("scheme") != "puppet":
            found["tls_identity"] = ("identity", tls, tls.text("identity"))
    if (advisory := topic.get("advisory")) is not None:
        subject = {"subject": ("target", advisory, advisory.text("target"))} if advisory.has("target") else {}
        found["advisory"] = ("advisory", topic, _section(advisory, subject))
        found |= {"warn_duration": ("age", advisory, advisory.text("age"))} if advisory.has("age") else {}
        if advisory.text("cluster") == "target":
            found["advisory_cluster"] = ("cluster", advisory, "target")
    return _section(topic, found)


def _tls(given: FileKeys) -> Iterator[tuple[str, tuple[str, FileKeys, Any]]]:
    is_puppet = given.text("scheme") == "puppet"
    for key in ("scheme", "identity", "ssl_dir") if is_puppet else ("ca", "cert", "key"):
        if given.has(key):
            yield key, (key, given, given.text(key))


def _section(given: FileKeys, found: dict[str, tuple[str, FileKeys, Any]]) -> FileKeys:
    """Return a section with the values `found`: by new key, its old key, the section that has it, and the value."""
    marks = {key: place.mark_of(name) for key, (name, place, _) in found.items()}
    paths = {key: place.key_path(name) for key, (name, place, _) in found.items()}
    return FileKeys(given.mark, given.path, {key: each[2] for key, each in found.items()}, marks, given.problems, paths)
