"""Reader of stream-replicator's configuration: its keys, durations, URLs and credentials.

A file from before 0.5 (`topics`, for NATS Streaming) is read in the form since then (`streams`). Each value keeps its
place and the name of its key, so that problems and remarks name what the file has.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import SecretStr

from common.settings.types import MAX_DURATION_S, format_duration
from common.settings.yaml import ListNode, MappingNode, Mark, Node, Problems, Scalar, suggest_key

# The kinds of values; the text names the kind in messages. Floe's check of the result examines the values themselves.
TEXT, NUMBER, FLAG, MAPPING = "text", "a number", "true or false", "a mapping of text"

Keys = dict[str, Any]  # a mapping of the result, as YAML has it
Shape = dict[str, Any]  # a kind, the shape of a section, or a list with the shape that each of its sections has


class Variable(str):
    """Text in which `${VAR}` is a variable; in other text it is escaped."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NamedSections:
    """A mapping from names that the user chose to sections of one shape."""

    shape: Shape


def all_of(keys: str, kind: str | Shape = TEXT) -> dict[str, Any]:
    """Return the shape of a section whose keys all have the same kind."""
    return dict.fromkeys(keys.split(), kind)


TLS: Shape = all_of("ca cert key")
CHORIA: Shape = all_of("seed_file jwt_file collective")
ADVISORY: Shape = {"subject": TEXT, "reliable": FLAG}
HEARTBEAT_SUBJECT: Shape = {"subject": TEXT, "interval": TEXT, "headers": MAPPING}
HEARTBEATS: Shape = {"leader_election": FLAG, "interval": TEXT, "headers": MAPPING, "subjects": [HEARTBEAT_SUBJECT]}
HEARTBEATS |= {"tls": TLS, "choria": CHORIA, "url": TEXT}
STREAM: Shape = {
    **all_of("name stream filter_subject target_stream target_subject_prefix target_subject_remove"),
    **all_of("source_url target_url start_time start_delta max_age leader_election_name"),
    **all_of("inspect_field inspect_force_field inspect_header inspect_duration warn_duration"),
    **all_of("no_target_create ephemeral target_initiated start_at_end", FLAG),
    **all_of("start_sequence inspect_subject_token size_trigger", NUMBER),
    **all_of("tls source_tls target_tls", TLS),
    **all_of("choria source_choria target_choria", CHORIA),
    "advisory": ADVISORY,
}
FILE: Shape = all_of("name state_store logfile loglevel") | {"monitor_port": NUMBER, "profiling": FLAG}
FILE |= {"streams": [STREAM], "tls": TLS, "choria": CHORIA, "heartbeats": HEARTBEATS}


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

    def duration(self, key: str) -> Keys:
        """Return the key with its duration as Floe writes it; empty for 0, and for an invalid one, which is noted."""
        try:
            value = convert_duration(self.text(key))
        except ValueError as error:
            self.add_problem(key, str(error))
            return {}
        return {} if value == "0s" else {key: value}


_TYPES: dict[str, Any] = {TEXT: str, NUMBER: int | float, FLAG: bool}


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
    expected = kind if isinstance(kind, str) else "a list" if isinstance(kind, list) else "a mapping"
    items: Iterable[tuple[object, Node]] | None = None
    inner: str | Shape = TEXT
    if isinstance(kind, list):
        inner, items = kind[0], enumerate(node.items) if isinstance(node, ListNode) else None
    elif isinstance(node, MappingNode):
        if isinstance(kind, dict):
            return read(node, problems, kind, path)
        if kind == MAPPING or isinstance(kind, NamedSections):
            inner, items = kind.shape if isinstance(kind, NamedSections) else TEXT, node.entries.items()
    elif isinstance(kind, str) and kind != MAPPING and isinstance(node, Scalar):
        if isinstance(value := node.value(), _TYPES[kind]) and isinstance(value, bool) == (kind == FLAG):
            return value
        expected += "; quote it" if kind == TEXT and value is not None else ""
    if items is not None:
        values = ((name, _value(item, inner, problems, f"{path}.{name}")) for name, item in items)
        found = {name: value for name, value in values if value is not None}
        return found if kind == MAPPING else tuple(found.values())
    # Never name the value found: it may be a password in a wrong place.
    problems.add(node.mark, (path,), f"expected {expected}, found something else")
    return None


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
    """The servers of one side. The secret is compared, and never shown.

    `keys`: those of the section `nats` beside `url` and the secret. `secret_key`: `password` or `token`, for a `secret`
    that is not empty.
    """

    servers: tuple[str, ...]
    keys: Keys
    secret_key: str
    secret: SecretStr

    @property
    def identity(self) -> object:
        """A value that is equal for the same servers, in any order, and the same way to connect to them."""
        return frozenset(self.servers), str(self.keys), self.secret

    def section(self, side: Side) -> Keys:
        """Return the section `nats`."""
        variable = Variable(f"${{FLOE_{side.upper()}_{self.secret_key.upper()}}}")
        own = {self.secret_key: variable} if self.secret else {}
        return {"url": self.servers[0] if len(self.servers) == 1 else list(self.servers), **self.keys, **own}


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


def _connection(parts: list[SplitResult], tls: Mapping[str, str | bool]) -> tuple[ReplicatorConnection, list[str]]:
    servers = [_server(part) for part in parts]
    users = {(unquote(part.username or ""), part.password) for part in parts if "@" in part.netloc}
    options = _options(parts)
    if any(server.startswith("tls:") for server in servers):
        servers = [f"tls:{server.partition(':')[2]}" for server in servers]
    if len(users) > 1:
        raise ValueError("expected one user for all servers, found several")
    keys: Keys = {}
    remarks, secret_key, secret = [], "", ""
    if options.get("jwt"):
        keys = {"jwt_file": options["jwt"], "nkey_seed_file": options["nkey"]}
    elif options.get("credentials"):
        keys = {"credentials_file": options["credentials"]}
    if users and keys:
        remarks.append("the user of the URL is left out: the credential replaces it")
    for user, password in users if not keys else ():
        if password is None:  # a user alone is a token
            secret_key, secret = "token", user
        else:
            keys, secret_key, secret = {"user": user}, "password", unquote(password)
    if tls := {**tls, **_flags(options)}:
        keys["tls"] = tls
    try:
        if options.get("connect_timeout"):
            keys["connect_timeout"] = convert_duration(options["connect_timeout"])
    except ValueError as error:
        raise ValueError(f"the parameter connect_timeout: {error}") from None
    return ReplicatorConnection(tuple(dict.fromkeys(servers)), keys, secret_key, SecretStr(secret)), remarks


def _flags(options: Mapping[str, str]) -> dict[str, bool]:
    names = ("tls_handshake_first", "insecure")
    for name in names:
        if options.get(name, "") not in (*_TRUE, *_FALSE):
            raise ValueError(f"expected true or false for the parameter {name}, found something else")
    return {name.removeprefix("tls_"): True for name in names if options.get(name) in _TRUE}


# The form before 0.5

TOPIC_TLS: Shape = all_of("identity scheme ssl_dir ca cert key")
TOPIC: Shape = {
    **all_of(
        "topic source_url source_cluster_id target_url target_cluster_id queue_group name inspect update_flag age"
    ),
    **all_of("queued disable_source_tls disable_target_tls", FLAG),
    **all_of("workers monitor", NUMBER),
    "tls": TOPIC_TLS,
    "advisory": all_of("target cluster age"),
}
TOPICS_FILE: Shape = all_of("logfile state_dir") | all_of("debug verbose", FLAG)
TOPICS_FILE |= {"topics": NamedSections(TOPIC), "tls": TOPIC_TLS}

#: Keys of a topic by the names that they have in the result of `as_streams`.
_SAME = ("source_url", "target_url", "workers", "queued", "queue_group", "source_cluster_id", "target_cluster_id")
_RENAMED = {key: key for key in _SAME}
_RENAMED |= {"inspect_field": "inspect", "inspect_force_field": "update_flag", "inspect_duration": "age"}
_RENAMED |= {"durable_name": "name", "topic_monitor": "monitor"}

#: The section and the key in the file, and the value if it is another one.
_Origin = tuple[FileKeys, str] | tuple[FileKeys, str, Any]


def as_streams(old: FileKeys) -> FileKeys:
    """Return the file as `streams`, one for each topic. The site is named after the cluster of the first source."""
    topics: tuple[FileKeys, ...] = old.get("topics", ())
    site = next((each for each in topics if each.text("source_cluster_id")), None)
    level = next((key for key in ("debug", "verbose") if old.get(key)), "")
    return _section(
        old,
        {
            "streams": (old, "topics", tuple(_stream(topic, old) for topic in topics)),
            "name": (site, "source_cluster_id") if site else (old, "source_cluster_id", "site"),
            "monitor_port": (next((each for each in topics if each.has("monitor")), old), "monitor"),
            "logfile": (old, "logfile"),
            "state_store": (old, "state_dir"),
            **({"loglevel": (old, level, level.replace("verbose", "info"))} if level else {}),
        },
    )


def stream_of(topic: str) -> str:
    """Return the name of the JetStream stream that holds a topic of NATS Streaming."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", topic).strip("_") or "ALL"


def _stream(topic: FileKeys, old: FileKeys) -> FileKeys:
    name, place = topic.text("topic"), topic if topic.has("tls") else old
    found: dict[str, _Origin] = {
        "stream": (topic, "topic", name and stream_of(name)),
        "filter_subject": (topic, "topic", name),
        "name": (topic, "topic", stream_of(topic.path.rpartition(".")[2])),
        **{key: (topic, former) for key, former in _RENAMED.items()},
    }
    if (tls := place.get("tls")) is not None:
        is_puppet = tls.text("scheme") == "puppet"
        keys = ("scheme", "identity", "ssl_dir") if is_puppet else ("ca", "cert", "key")
        section = _section(tls, {key: (tls, key) for key in keys})
        sides = (side for side in ("source", "target") if not topic.get(f"disable_{side}_tls"))
        found |= {f"{side}_tls": (place, "tls", section) for side in sides}
        found |= {} if is_puppet else {"tls_identity": (tls, "identity")}
    if (advisory := topic.get("advisory")) is not None:
        found["advisory"] = topic, "advisory", _section(advisory, {"subject": (advisory, "target")})
        found["warn_duration"] = advisory, "age"
        found |= {"advisory_cluster": (advisory, "cluster")} if advisory.text("cluster") == "target" else {}
    return _section(topic, found)


def _section(given: FileKeys, found: Mapping[str, _Origin]) -> FileKeys:
    """Return a section with the values of these origins, by their new keys; those without a value are left out."""
    known = {key: each for key, each in found.items() if len(each) == 3 or each[0].has(each[1])}
    values = {key: each[2] if len(each) == 3 else each[0].get(each[1]) for key, each in known.items()}
    marks = {key: each[0].mark_of(each[1]) for key, each in known.items()}
    paths = {key: each[0].key_path(each[1]) for key, each in known.items()}
    return FileKeys(given.mark, given.path, values, marks, given.problems, paths)
