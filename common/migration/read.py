"""How stream-replicator reaches servers, as Floe's section `nats`: URLs, credentials in them, TLS, Choria."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from common.migration.entries import Entries, Variable, YamlEntry
from common.settings.types import MAX_DURATION, format_duration
from common.settings.yaml import Items, Keys, Mark, Node, Problems, Scalar


class ValueKind(StrEnum):
    """What a key holds; the value is how a message calls it."""

    TEXT = "text"
    WHOLE = "a whole number from 0"
    ANY_WHOLE = "a whole number"
    NUMBER = "a number from 0"
    FLAG = "true or false"
    HEADERS = "a mapping of text"


@dataclass(frozen=True, slots=True)
class Many:
    """A list of sections."""

    of: Shape


Shape = Mapping[str, "ValueKind | Many | Shape"]

TLS: Shape = dict.fromkeys(("ca", "cert", "key"), ValueKind.TEXT)
CHORIA: Shape = dict.fromkeys(("seed_file", "jwt_file", "collective"), ValueKind.TEXT)
ADVISORY: Shape = {"subject": ValueKind.TEXT, "reliable": ValueKind.FLAG}
HEARTBEAT_SUBJECT: Shape = {
    "subject": ValueKind.TEXT,
    "interval": ValueKind.TEXT,
    "headers": ValueKind.HEADERS,
}
HEARTBEATS: Shape = {
    "leader_election": ValueKind.FLAG,
    "interval": ValueKind.TEXT,
    "headers": ValueKind.HEADERS,
    "subjects": Many(HEARTBEAT_SUBJECT),
    "tls": TLS,
    "choria": CHORIA,
    "url": ValueKind.TEXT,
}
STREAM: Shape = {
    **dict.fromkeys(("name", "stream", "filter_subject", "target_stream"), ValueKind.TEXT),
    **dict.fromkeys(("target_subject_prefix", "target_subject_remove"), ValueKind.TEXT),
    **dict.fromkeys(("source_url", "target_url"), ValueKind.TEXT),
    **dict.fromkeys(("no_target_create", "ephemeral", "target_initiated"), ValueKind.FLAG),
    "start_sequence": ValueKind.WHOLE,
    **dict.fromkeys(("start_time", "start_delta"), ValueKind.TEXT),
    "start_at_end": ValueKind.FLAG,
    **dict.fromkeys(("tls", "source_tls", "target_tls"), TLS),
    **dict.fromkeys(("choria", "source_choria", "target_choria"), CHORIA),
    **dict.fromkeys(("max_age", "inspect_field", "inspect_force_field", "inspect_header"), ValueKind.TEXT),
    "inspect_subject_token": ValueKind.ANY_WHOLE,
    **dict.fromkeys(("inspect_duration", "warn_duration"), ValueKind.TEXT),
    "size_trigger": ValueKind.NUMBER,
    "leader_election_name": ValueKind.TEXT,
    "advisory": ADVISORY,
}
FILE: Shape = {
    "name": ValueKind.TEXT,
    "streams": Many(STREAM),
    "state_store": ValueKind.TEXT,
    "tls": TLS,
    "choria": CHORIA,
    "monitor_port": ValueKind.WHOLE,
    "profiling": ValueKind.FLAG,
    "logfile": ValueKind.TEXT,
    "loglevel": ValueKind.TEXT,
    "heartbeats": HEARTBEATS,
}


def every_key(shape: Shape = FILE, prefix: str = "") -> Iterator[str]:
    """Every key by its path, such as `streams.advisory.subject`; sections too."""
    for key, kind in shape.items():
        yield prefix + key
        below = kind.of if isinstance(kind, Many) else kind
        if not isinstance(below, ValueKind):
            yield from every_key(below, f"{prefix}{key}.")


@dataclass(frozen=True, slots=True)
class Given:
    """A section of the file. A key that is null counts as not given, as it does for stream-replicator."""

    mark: Mark
    path: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    marks: Mapping[str, Mark] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        """Whether the file gives the key, be it an empty value."""
        return key in self.values

    def get(self, key: str, default: Any = None) -> Any:
        """Its value: text, int, float, bool, a mapping of headers, a section, or a tuple of sections."""
        return self.values.get(key, default)

    def text(self, key: str) -> str:
        """Its text; empty where it is not given."""
        return str(self.values.get(key, ""))

    def place(self, key: str) -> str:
        """The key's path in the file, such as `streams.0.stream`."""
        return f"{self.path}.{key}" if self.path else key

    def at(self, key: str) -> Mark:
        """Where its value stands; the section's place where it is not given."""
        return self.marks.get(key, self.mark)


def read(node: Keys, problems: Problems, shape: Shape = FILE, path: str = "") -> Given:
    """The section `node`; unknown keys and values of another kind are noted and left out."""
    given: dict[str, Any] = {}
    for key, below in node.entries.items():
        where = f"{path}.{key}" if path else key
        if key not in shape:
            problems.add(node.marks[key], (where,), _unknown(key, shape))
        elif not _is_null(below):
            value = _value(below, shape[key], problems, where)
            given |= {} if value is None else {key: value}
    marks = {key: node.entries[key].mark for key in given}
    return Given(node.mark, path, given, marks)


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value() is None


def _unknown(key: str, shape: Shape) -> str:
    close = difflib.get_close_matches(key, shape, n=1)
    hint = f"did you mean {close[0]}?" if close else f"expected one of {' '.join(shape)}"
    return f"unknown key of stream-replicator; {hint}"


def _value(node: Node, kind: ValueKind | Many | Shape, problems: Problems, path: str) -> Any:
    if isinstance(kind, Many):
        return _many(node, kind, problems, path)
    if kind is ValueKind.HEADERS:
        return _headers(node, problems, path)
    if isinstance(kind, ValueKind):
        return _scalar(node, kind, problems, path)
    if not isinstance(node, Keys):
        problems.add(node.mark, (path,), "expected a mapping, found something else")
        return None
    return read(node, problems, kind, path)


def _many(node: Node, kind: Many, problems: Problems, path: str) -> tuple[Given, ...] | None:
    if not isinstance(node, Items):
        problems.add(node.mark, (path,), "expected a list, found something else")
        return None
    found = [_value(item, kind.of, problems, f"{path}.{n}") for n, item in enumerate(node.items)]
    return tuple(each for each in found if each is not None)


def _headers(node: Node, problems: Problems, path: str) -> dict[str, str] | None:
    if not isinstance(node, Keys):
        problems.add(node.mark, (path,), "expected a mapping of text, found something else")
        return None
    found = {
        name: _scalar(item, ValueKind.TEXT, problems, f"{path}.{name}") for name, item in node.entries.items()
    }
    return {name: text for name, text in found.items() if text is not None}


def _scalar(node: Node, kind: ValueKind, problems: Problems, path: str) -> Any:
    value = node.value() if isinstance(node, Scalar) else None
    if _fits(value, kind):
        return value
    quote = "; quote it" if kind is ValueKind.TEXT and isinstance(value, bool | int | float) else ""
    # Never what was found: a password may stand where none belongs.
    problems.add(node.mark, (path,), f"expected {kind}{quote}, found something else")
    return None


def _fits(value: Any, kind: ValueKind) -> bool:
    if kind is ValueKind.FLAG or isinstance(value, bool):
        return isinstance(value, bool) and kind is ValueKind.FLAG
    if kind is ValueKind.TEXT:
        return isinstance(value, str)
    if kind is ValueKind.NUMBER:
        return isinstance(value, int | float) and value >= 0
    return isinstance(value, int) and (kind is ValueKind.ANY_WHOLE or value >= 0)


FORM = "a duration of stream-replicator such as 500ms 5s 1m30s 1h 1d 1w 1M 1Y"

_DAYS = {"w": 7, "W": 7, "d": 1, "D": 1, "M": 30, "Y": 365, "y": 365}
_LONG = re.compile(r"([0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})([wWdDMYy])")
_GO_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(ns|us|µs|μs|ms|s|m|h)")
_GO = re.compile(rf"(?:{_GO_PART.pattern})+")
_SECONDS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "μs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}


def convert(text: str) -> str:
    """The duration as Floe writes it; `0s` for an empty text. Raises ValueError with what was expected.

    A month is 30 days and a year 365, and parts of an hour of such a number are dropped, as there.
    """
    text = text.strip()
    if not text or text == "0":
        return "0s"
    seconds = _seconds(text)
    if seconds > MAX_DURATION:
        raise ValueError(f"expected at most {format_duration(MAX_DURATION)}, found more")
    if 0 < seconds < Decimal("0.001"):
        raise ValueError("expected at least 1ms, which is the smallest duration of Floe, found less")
    return format_duration(float(seconds))


def _seconds(text: str) -> Decimal:
    if match := _LONG.fullmatch(text):
        hours = Decimal(match[1]) * _DAYS[match[2]] * 24
        return Decimal(math.floor(hours)) * 3600
    if not _GO.fullmatch(text):
        raise ValueError(f"expected {FORM}, found {text!r:.60}")
    return sum((Decimal(number) * _SECONDS[unit] for number, unit in _GO_PART.findall(text)), Decimal(0))


@dataclass(frozen=True, slots=True)
class Note:
    """A key that has no counterpart, or one that works otherwise; `text` says why and what to do."""

    path: str
    mark: Mark
    text: str

    def __str__(self) -> str:
        return f"{self.path} (line {self.mark.line}): {self.text}"


Side = Literal["source", "target"]

PARAMETERS = ("credentials", "jwt", "nkey", "tls_handshake_first", "insecure", "connect_timeout")
URL_FORM = "nats://[USER:PASSWORD@]HOST[:PORT][?credentials=FILE], or several with commas between"

_TRUE = ("1", "t", "T", "TRUE", "true", "True")
_FALSE = ("0", "f", "F", "FALSE", "false", "False", "")


class Hidden:
    """A secret that is only compared."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hidden) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "***"

    def __bool__(self) -> bool:
        return bool(self._text)


@dataclass(frozen=True, slots=True)
class Connection:
    """The servers of one side. Equal ones are one place; the secret takes part, and is never shown.

    `login`: the keys by which it authenticates. `secret_key`: `password` or `token` where `secret` is one.
    """

    servers: tuple[str, ...]
    login: tuple[tuple[str, str], ...] = ()
    secret_key: str = ""
    secret: Hidden = field(default_factory=lambda: Hidden(""))
    tls: tuple[tuple[str, str | bool], ...] = ()
    connect_timeout: str = ""

    @property
    def identity(self) -> object:
        """Equal for the same servers, in whatever order they are named, and the same way to them."""
        return frozenset(self.servers), self.login, self.secret, self.tls, self.connect_timeout

    @property
    def host(self) -> str:
        """The first server without scheme and port, for comments."""
        return self.servers[0].partition("://")[2].rpartition(":")[0] if self.servers else ""

    def entries(self, side: Side, mark: Mark) -> Entries:
        """The section `nats`; a secret is a variable, `variable(side)`."""
        url: object = self.servers[0] if len(self.servers) == 1 else list(self.servers)
        found = Entries([YamlEntry("url", url, mark)])
        found += [YamlEntry(key, value, mark) for key, value in self.login]
        if self.secret:
            note = f"set {self.variable(side)} in the environment, or use {self.secret_key}_file"
            found.append(YamlEntry(self.secret_key, Variable(f"${{{self.variable(side)}}}"), mark, [note]))
        if self.tls:
            found.append(
                YamlEntry("tls", Entries([YamlEntry(key, value, mark) for key, value in self.tls]), mark)
            )
        if self.connect_timeout:
            found.append(YamlEntry("connect_timeout", self.connect_timeout, mark))
        return found

    def variable(self, side: Side) -> str:
        """The environment variable that the secret is expected in; empty where there is none."""
        return f"FLOE_{side.upper()}_{self.secret_key.upper()}" if self.secret else ""


def connection(
    stream: Given, top: Given, side: Side, problems: Problems
) -> tuple[Connection | None, list[Note]]:
    """The connection of one side of a stream, and what of it is left out; None, with problems noted, where
    it cannot be.
    """
    key = f"{side}_url"
    if not stream.text(key):
        problems.add(stream.at(key), (stream.place(key),), "expected a URL (required), found nothing")
        return None, []
    notes = _choria(stream, top, side)
    tls, tls_notes = _tls(stream, top, side)
    found = read_url(
        stream.text(key), tls, lambda text: problems.add(stream.at(key), (stream.place(key),), text)
    )
    extra = [] if found is None else [Note(stream.place(key), stream.at(key), text) for text in found[1]]
    return found and found[0], [*notes, *tls_notes, *extra]


def _inherited(stream: Given, top: Given, side: Side, key: str) -> tuple[Given, str] | None:
    """The most specific section of that kind, which replaces the others as a whole."""
    for place, name in ((stream, f"{side}_{key}"), (stream, key), (top, key)):
        if place.has(name):
            return place, name
    return None


def _choria(stream: Given, top: Given, side: Side) -> list[Note]:
    found = _inherited(stream, top, side, "choria")
    if found is None:
        return []
    place, name = found
    why = "Choria's login is not carried over: issue a NATS credential for Floe and set credentials_file"
    return [Note(place.place(name), place.at(name), why)]


def _tls(stream: Given, top: Given, side: Side) -> tuple[dict[str, str | bool], list[Note]]:
    found = _inherited(stream, top, side, "tls")
    if found is None:
        return {}, []
    place, name = found
    section: Given = place.get(name)
    keys: dict[str, str | bool] = {
        key: section.text(key) for key in ("ca", "cert", "key") if section.text(key)
    }
    if ("cert" in keys) == ("key" in keys):
        return keys, []
    why = "cert and key work only together, and stream-replicator used neither"
    notes = [Note(place.place(name), place.at(name), why)]
    return {key: value for key, value in keys.items() if key == "ca"}, notes


def read_url(text: str, tls: Mapping[str, str | bool], problem: Any) -> tuple[Connection, list[str]] | None:
    """The connection that `text` and the TLS keys ask for, and remarks; None after calling `problem`.

    No message ever holds a part of `text` before the host was found to be one.
    """
    try:
        parts = [urlsplit(_with_scheme(each.strip())) for each in text.split(",")]
        servers = [_server(part) for part in parts]
        users = {(unquote(part.username or ""), part.password) for part in parts if "@" in part.netloc}
        options = _options(parts)
        return _connection(servers, users, options, dict(tls))
    except ValueError as error:
        problem(str(error))
        return None


def _with_scheme(text: str) -> str:
    return text if "://" in text else f"nats://{text}"


def _server(part: SplitResult) -> str:
    try:
        host, port = part.hostname or "", part.port or 4222
    except ValueError:
        host, port = "", 0
    if part.scheme not in ("nats", "tls"):
        raise ValueError("expected a URL that begins with nats:// or tls://, found another")
    if not host or part.path not in ("", "/") or part.fragment:
        raise ValueError(f"expected {URL_FORM}; a / ? # or @ in a password as %2F %3F %23 %40")
    return f"{part.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _options(parts: list[SplitResult]) -> dict[str, str]:
    """The query parameters, each with its last value."""
    found: dict[str, str] = {}
    for part in parts:
        for name, value in parse_qsl(part.query, keep_blank_values=True):
            if name not in PARAMETERS:
                # Named only where it cannot be a part of a password with a ? in it.
                close = difflib.get_close_matches(name, PARAMETERS, n=1, cutoff=0.7)
                found_one = f"{name!r}; did you mean {close[0]}?" if close else "another"
                raise ValueError(f"expected the parameters {', '.join(PARAMETERS)}, found {found_one}")
            found[name] = value
    for one, other in (("jwt", "nkey"), ("nkey", "jwt")):
        if found.get(one) and not found.get(other):
            raise ValueError(f"expected the parameter {other} beside {one}, found none")
    return found


def _connection(
    servers: list[str],
    users: set[tuple[str, str | None]],
    options: dict[str, str],
    tls: dict[str, str | bool],
) -> tuple[Connection, list[str]]:
    if any(server.startswith("tls:") for server in servers):
        servers = [f"tls:{server.partition(':')[2]}" for server in servers]
    if len(users) > 1:
        raise ValueError("expected one user for all servers, found several")
    for name in ("handshake_first", "insecure"):
        option = f"tls_{name}" if name == "handshake_first" else name
        tls |= {name: True} if _flag(option, options.get(option, "")) else {}
    timeout = _timeout(options.get("connect_timeout", ""))
    login, remarks = _files(options), []
    secret_key, secret = "", Hidden("")
    if users and login:
        remarks.append("the user of the URL is left out: the credential takes its place")
    elif users:
        login, secret_key, secret = _user(*users.pop())
    unique = tuple(dict.fromkeys(servers))
    return Connection(unique, login, secret_key, secret, tuple(tls.items()), timeout), remarks


def _flag(name: str, text: str) -> bool:
    if text in _TRUE:
        return True
    if text not in _FALSE:
        raise ValueError(f"expected true or false for the parameter {name}, found something else")
    return False


def _timeout(text: str) -> str:
    try:
        return convert(text) if text else ""
    except ValueError as error:
        raise ValueError(f"the parameter connect_timeout: {error}") from None


def _files(options: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    if options.get("jwt"):
        return ("jwt_file", options["jwt"]), ("nkey_seed_file", options["nkey"])
    return (("credentials_file", options["credentials"]),) if options.get("credentials") else ()


def _user(user: str, password: str | None) -> tuple[tuple[tuple[str, str], ...], str, Hidden]:
    if password is None:  # a user alone is a token
        return (), "token", Hidden(user)
    return (("user", user),), "password", Hidden(unquote(password))
