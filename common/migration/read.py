"""How stream-replicator reaches servers, as Floe's section `nats`: URLs, credentials in them, TLS, Choria."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from common.migration.durations import convert
from common.migration.entries import Entries, Entry, Variable
from common.migration.notes import Note
from common.migration.shape import Given
from common.settings.yaml import Mark, Problems

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
        found = Entries([Entry("url", url, mark)])
        found += [Entry(key, value, mark) for key, value in self.login]
        if self.secret:
            note = f"set {self.variable(side)} in the environment, or use {self.secret_key}_file"
            found.append(Entry(self.secret_key, Variable(f"${{{self.variable(side)}}}"), mark, [note]))
        if self.tls:
            found.append(Entry("tls", Entries([Entry(key, value, mark) for key, value in self.tls]), mark))
        if self.connect_timeout:
            found.append(Entry("connect_timeout", self.connect_timeout, mark))
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
