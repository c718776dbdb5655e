"""Reader of stream-replicator's configuration: its keys, durations, URLs and credentials.

A file from before 0.5 (`topics`, for NATS Streaming) is read in the form since then (`streams`). Each value keeps its
place and the name of its key, so that problems and remarks name what the file has.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import SecretStr

from common.migration.entries import Entries, Variable, YamlEntry
from common.settings.types import MAX_DURATION_S, format_duration
from common.settings.yaml import ListNode, MappingNode, Mark, Node, Problems, Scalar, suggest_key

# The kinds of values; the text names the kind in messages.
TEXT = "text"
NON_NEGATIVE_INTEGER = "a whole number from 0"
INTEGER = "a whole number"
NUMBER = "a number from 0"
FLAG = "true or false"
MAPPING = "a mapping of text"

Shape = Mapping[str, Any]  # a kind, the shape of a section, or a list with the shape that each of its sections has


@dataclass(frozen=True, slots=True)
class NamedSections:
    """A mapping from names that the user chose to sections of one shape."""

    shape: Shape


def all_of(kind: str | Shape, keys: str) -> dict[str, Any]:
    """Return the shape of a section whose keys all have the same kind."""
    return dict.fromkeys(keys.split(), kind)


TLS: Shape = all_of(TEXT, "ca cert key")
CHORIA: Shape = all_of(TEXT, "seed_file jwt_file collective")
ADVISORY: Shape = {"subject": TEXT, "reliable": FLAG}
HEARTBEAT_SUBJECT: Shape = {"subject": TEXT, "interval": TEXT, "headers": MAPPING}
HEARTBEATS: Shape = {"leader_election": FLAG, "interval": TEXT, "headers": MAPPING, "subjects": [HEARTBEAT_SUBJECT]} | {
    "tls": TLS,
    "choria": CHORIA,
    "url": TEXT,
}
STREAM: Shape = (
    all_of(TEXT, "name stream filter_subject target_stream target_subject_prefix target_subject_remove")
    | all_of(TEXT, "source_url target_url")
    | all_of(FLAG, "no_target_create ephemeral target_initiated")
    | {"start_sequence": NON_NEGATIVE_INTEGER, "start_time": TEXT, "start_delta": TEXT, "start_at_end": FLAG}
    | all_of(TLS, "tls source_tls target_tls")
    | all_of(CHORIA, "choria source_choria target_choria")
    | all_of(TEXT, "max_age inspect_field inspect_force_field inspect_header")
    | {"inspect_subject_token": INTEGER, "inspect_duration": TEXT, "warn_duration": TEXT}
    | {"size_trigger": NUMBER, "leader_election_name": TEXT, "advisory": ADVISORY}
)
FILE: Shape = (
    {"name": TEXT, "streams": [STREAM], "state_store": TEXT, "tls": TLS, "choria": CHORIA}
    | {"monitor_port": NON_NEGATIVE_INTEGER, "profiling": FLAG, "logfile": TEXT, "loglevel": TEXT}
    | {"heartbeats": HEARTBEATS}
)


@dataclass(frozen=True, slots=True)
class Note:
    """A key without a counterpart, or one that works differently; `text` gives the reason and the remedy."""

    path: str
    mark: Mark
    text: str

    def __str__(self) -> str:
        return f"{self.path} (line {self.mark.line}): {self.text}"


@dataclass(frozen=True, slots=True)
class FileKeys:
    """The keys of one section of the file. A key that is null counts as not given, as it does for stream-replicator.

    `paths`: of keys that have another place in the file, of the form before 0.5; empty for the present form.
    """

    mark: Mark
    path: str
    values: Mapping[str, Any]
    marks: Mapping[str, Mark]
    problems: Problems
    paths: Mapping[str, str] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value: text, int, float, bool, a mapping of headers, a section, or a tuple of sections."""
        return self.values.get(key, default)

    def text(self, key: str) -> str:
        """Return the value as text; empty if it is not given."""
        return str(self.values.get(key, ""))

    def key_path(self, key: str) -> str:
        return self.paths.get(key) or (f"{self.path}.{key}" if self.path else key)

    def mark_of(self, key: str) -> Mark:
        """Return the place of the value; that of the section if it is not given."""
        return self.marks.get(key, self.mark)

    def note(self, key: str, text: str) -> Note:
        return Note(self.key_path(key), self.mark_of(key), text)

    def notes_for(self, reasons: Mapping[str, str]) -> list[Note]:
        return [self.note(key, text) for key, text in reasons.items() if self.has(key)]

    def add_problem(self, key: str, problem: str) -> None:
        self.problems.add(self.mark_of(key), (self.key_path(key),), problem)

    def entry(self, key: str, value: Any = None) -> YamlEntry:
        return YamlEntry(key, self.get(key) if value is None else value, self.mark_of(key))

    def duration(self, key: str) -> list[YamlEntry]:
        """Return the key with its duration as Floe writes it; empty for 0, and for an invalid one, which is noted."""
        try:
            value = convert_duration(self.text(key))
        except ValueError as error:
            self.add_problem(key, str(error))
            return []
        return [] if value == "0s" else [self.entry(key, value)]


def read(node: MappingNode, problems: Problems, shape: Shape = FILE, path: str = "") -> FileKeys:
    """Read the section `node`; unknown keys and values of a wrong kind are noted and left out."""
    given: dict[str, Any] = {}
    for key, below in node.entries.items():
        key_path = f"{path}.{key}" if path else key
        if key not in shape:
            problems.add(node.marks[key], (key_path,), f"unknown key of stream-replicator; {suggest_key(key, shape)}")
        elif not isinstance(below, Scalar) or below.value() is not None:
            value = _value(below, shape[key], problems, key_path)
            given |= {} if value is None else {key: value}
    return FileKeys(node.mark, path, given, {key: node.entries[key].mark for key in given}, problems)


def _value(node: Node, kind: str | Shape | list[Shape] | NamedSections, problems: Problems, path: str) -> Any:
    """Return the value of `node`; None, with a problem noted, if it is not of this kind."""
    if isinstance(kind, list):
        if isinstance(node, ListNode):
            found = [_value(item, kind[0], problems, f"{path}.{n}") for n, item in enumerate(node.items)]
            return tuple(each for each in found if each is not None)
        expected = "a list"
    elif isinstance(kind, NamedSections):
        if isinstance(node, MappingNode):
            named = (_value(below, kind.shape, problems, f"{path}.{name}") for name, below in node.entries.items())
            return tuple(each for each in named if each is not None)
        expected = "a mapping"
    elif isinstance(kind, Mapping):
        if isinstance(node, MappingNode):
            return read(node, problems, kind, path)
        expected = "a mapping"
    elif kind == MAPPING and isinstance(node, MappingNode):
        headers = {name: _value(item, TEXT, problems, f"{path}.{name}") for name, item in node.entries.items()}
        return {name: text for name, text in headers.items() if text is not None}
    else:
        value = node.value() if isinstance(node, Scalar) else None
        if _fits(value, kind):
            return value
        expected = kind + ("; quote it" if kind == TEXT and isinstance(value, bool | int | float) else "")
    # Never name the value found: it may be a password in a wrong place.
    problems.add(node.mark, (path,), f"expected {expected}, found something else")
    return None


_TYPES: Mapping[str, Any] = {TEXT: str, FLAG: bool, NUMBER: int | float, NON_NEGATIVE_INTEGER: int, INTEGER: int}


def _fits(value: Any, kind: str) -> bool:
    if kind not in _TYPES or not isinstance(value, _TYPES[kind]) or isinstance(value, bool) != (kind == FLAG):
        return False
    return kind not in (NUMBER, NON_NEGATIVE_INTEGER) or bool(value >= 0)


REPLICATOR_DURATION_FORM = "a duration of stream-replicator such as 500ms 5s 1m30s 1h 1d 1w 1M 1Y"

_DAYS = {"w": 7, "W": 7, "d": 1, "D": 1, "M": 30, "Y": 365, "y": 365}
_LONG = re.compile(r"([0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})([wWdDMYy])")
_GO_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(ns|us|µs|μs|ms|s|m|h)")
_GO = re.compile(rf"(?:{_GO_PART.pattern})+")
_SECONDS = dict.fromkeys(("us", "µs", "μs"), "1e-6") | {"ns": "1e-9", "ms": "1e-3", "s": "1", "m": "60", "h": "3600"}


def convert_duration(text: str) -> str:
    """Convert to a duration as Floe writes it; `0s` for an empty text. Raises ValueError that names the expected form.

    As in stream-replicator, a month is 30 days and a year 365; days and longer units are rounded down to whole hours.
    """
    text = text.strip()
    if not text or text == "0":
        return "0s"
    if (seconds := _seconds(text)) > MAX_DURATION_S:
        raise ValueError(f"expected at most {format_duration(MAX_DURATION_S)}, found more")
    if 0 < seconds < Decimal("0.001"):
        raise ValueError("expected at least 1ms, which is the smallest duration of Floe, found less")
    return format_duration(float(seconds))


def _seconds(text: str) -> Decimal:
    if match := _LONG.fullmatch(text):
        hours = Decimal(match[1]) * _DAYS[match[2]] * 24
        return Decimal(math.floor(hours)) * 3600
    if not _GO.fullmatch(text):
        raise ValueError(f"expected {REPLICATOR_DURATION_FORM}, found {text!r:.60}")
    parts = _GO_PART.findall(text)
    return sum((Decimal(number) * Decimal(_SECONDS[unit]) for number, unit in parts), Decimal(0))


Side = Literal["source", "target"]

PARAMETERS = ("credentials", "jwt", "nkey", "tls_handshake_first", "insecure", "connect_timeout")
URL_FORM = "nats://[USER:PASSWORD@]HOST[:PORT][?credentials=FILE], or several with commas between"

_TRUE = ("1", "t", "T", "TRUE", "true", "True")
_FALSE = ("0", "f", "F", "FALSE", "false", "False", "")


@dataclass(frozen=True, slots=True)
class ReplicatorConnection:
    """The servers of one side. Equal connections are one place; the secret is compared, and never shown.

    `login`: the keys for authentication. `secret_key`: `password` or `token`, for a `secret` that is not empty.
    """

    servers: tuple[str, ...]
    login: tuple[tuple[str, str], ...]
    secret_key: str
    secret: SecretStr
    tls: tuple[tuple[str, str | bool], ...]
    connect_timeout: str

    @property
    def identity(self) -> object:
        """A value that is equal for the same servers, in any order, and the same way to connect to them."""
        return frozenset(self.servers), self.login, self.secret, self.tls, self.connect_timeout

    @property
    def host(self) -> str:
        return self.servers[0].partition("://")[2].rpartition(":")[0] if self.servers else ""

    def entry(self, side: Side, given: FileKeys) -> YamlEntry:
        mark = given.mark_of(f"{side}_url")
        url: object = self.servers[0] if len(self.servers) == 1 else list(self.servers)
        found = Entries(YamlEntry(key, value, mark) for key, value in (("url", url), *self.login))
        if self.secret:
            variable = f"FLOE_{side.upper()}_{self.secret_key.upper()}"
            note = f"set {variable} in the environment, or use {self.secret_key}_file"
            found.append(YamlEntry(self.secret_key, Variable(f"${{{variable}}}"), mark, [note]))
        if self.tls:
            tls = Entries(YamlEntry(key, value, mark) for key, value in self.tls)
            found.append(YamlEntry("tls", tls, mark))
        if self.connect_timeout:
            found.append(YamlEntry("connect_timeout", self.connect_timeout, mark))
        return YamlEntry("nats", found, mark)


def read_connection(stream: FileKeys, top: FileKeys, side: Side) -> tuple[ReplicatorConnection | None, list[Note]]:
    """Return the connection of one side of a stream, and notes on omitted keys; else None, with problems noted."""
    key, notes, tls = f"{side}_url", [], {}
    if not stream.text(key):
        stream.add_problem(key, "expected a URL (required), found nothing")
        return None, []
    for place, name in _inherited(stream, top, side, "choria"):
        reason = "Choria's login is not imported: issue a NATS credential for Floe and set credentials_file"
        notes.append(place.note(name, reason))
    for place, name in _inherited(stream, top, side, "tls"):
        section: FileKeys = place.get(name)
        tls = {each: section.text(each) for each in section.values if section.text(each)}
        if ("cert" in tls) != ("key" in tls):
            notes.append(place.note(name, "cert and key work only together, and stream-replicator used neither"))
            tls = {each: text for each, text in tls.items() if each == "ca"}
    found, remarks = read_url(stream, key, tls)
    return found, [*notes, *(stream.note(key, text) for text in remarks)]


def _inherited(stream: FileKeys, top: FileKeys, side: Side, key: str) -> list[tuple[FileKeys, str]]:
    places = ((stream, f"{side}_{key}"), (stream, key), (top, key))
    return [(place, name) for place, name in places if place.has(name)][:1]


def read_url(given: FileKeys, key: str, tls: Mapping[str, str]) -> tuple[ReplicatorConnection | None, list[str]]:
    """Return the connection that a URL and the TLS keys describe, and remarks; else None, with the problem noted.

    No message holds a part of the URL before its host is known to be valid.
    """
    try:
        return _connection([_parts(each.strip()) for each in given.text(key).split(",")], tls)
    except ValueError as error:
        given.add_problem(key, str(error))
        return None, []


def _parts(text: str) -> SplitResult:
    try:
        return urlsplit(text if "://" in text else f"nats://{text}")
    except ValueError:  # its message holds parts of the text
        raise ValueError(f"expected {URL_FORM}, found another") from None


def _server(part: SplitResult) -> str:
    try:
        host, port = part.hostname or "", part.port or 4222
    except ValueError:
        host, port = "", 0
    if part.scheme not in ("nats", "tls"):
        raise ValueError("expected a URL that begins with nats:// or tls://, found another")
    if not host or part.path not in ("", "/") or part.fragment:
        raise ValueError(f"expected {URL_FORM}; write / ? # @ in a password as %2F %3F %23 %40")
    return f"{part.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _options(parts: list[SplitResult]) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in parts:
        for name, value in parse_qsl(part.query, keep_blank_values=True):
            if name not in PARAMETERS:
                # Named only if it cannot be a part of a password with a ? in it.
                close = difflib.get_close_matches(name, PARAMETERS, n=1, cutoff=0.7)
                found_one = f"{name!r}; did you mean {close[0]}?" if close else "another"
                raise ValueError(f"expected the parameters {', '.join(PARAMETERS)}, found {found_one}")
            found[name] = value
    for given, other in (("jwt", "nkey"), ("nkey", "jwt")):
        if found.get(given) and not found.get(other):
            raise ValueError(f"expected the parameter {other} with {given}, found none")
    return found


def _connection(parts: list[SplitResult], tls: Mapping[str, str]) -> tuple[ReplicatorConnection, list[str]]:
    servers = [_server(part) for part in parts]
    users = {(unquote(part.username or ""), part.password) for part in parts if "@" in part.netloc}
    options = _options(parts)
    if any(server.startswith("tls:") for server in servers):
        servers = [f"tls:{server.partition(':')[2]}" for server in servers]
    if len(users) > 1:
        raise ValueError("expected one user for all servers, found several")
    keys: dict[str, str | bool] = {**tls, **_flags(options)}
    try:
        timeout = convert_duration(options["connect_timeout"]) if options.get("connect_timeout") else ""
    except ValueError as error:
        raise ValueError(f"the parameter connect_timeout: {error}") from None
    login: tuple[tuple[str, str], ...] = ()
    remarks, secret_key, secret = [], "", ""
    if options.get("jwt"):
        login = ("jwt_file", options["jwt"]), ("nkey_seed_file", options["nkey"])
    elif options.get("credentials"):
        login = (("credentials_file", options["credentials"]),)
    if users and login:
        remarks.append("the user of the URL is left out: the credential replaces it")
    for user, password in users if not login else ():
        if password is None:  # a user alone is a token
            secret_key, secret = "token", user
        else:
            login, secret_key, secret = (("user", user),), "password", unquote(password)
    unique, hidden = tuple(dict.fromkeys(servers)), SecretStr(secret)
    return ReplicatorConnection(unique, login, secret_key, hidden, tuple(keys.items()), timeout), remarks


def _flags(options: Mapping[str, str]) -> dict[str, bool]:
    names = ("tls_handshake_first", "insecure")
    for name in names:
        if options.get(name, "") not in (*_TRUE, *_FALSE):
            raise ValueError(f"expected true or false for the parameter {name}, found something else")
    return {name.removeprefix("tls_"): True for name in names if options.get(name) in _TRUE}


# The form before 0.5

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
