"""The types of configuration values, and the base of every section: frozen, no unknown keys.

A file is read strictly: text is text, a duration needs its unit. In code the same models also take a duration in
seconds, so that a dumped model can be read back. A refusal states `expected …`; the loader adds the value that it
found, and never a secret.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import stat
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path as FilePath
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SecretStr,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from common.chain import FEED_PATTERN, SITE_PATTERN
from common.clock import TIME_FORM, parse_time
from common.logs import get_logger

log = get_logger(__name__)


DURATION_FORM = "a duration such as 500ms 5s 5m 1h30m 7d 1w"
SIZE_FORM = "a size such as 64K 100M 4G (binary, as NATS writes them)"
LISTEN_FORM = "an address such as 127.0.0.1:9464 or [::1]:9464"

MAX_DURATION_S = 100 * 365 * 86400.0  # seconds
MAX_SIZE_BYTES = 2**63 - 1  # bytes

_MILLISECONDS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}

_NUMBER = r"\d{1,19}(?:\.\d{1,9})?"
_DURATION = re.compile(rf"(?:{_NUMBER}(?:ms|[smhdw]))+", re.ASCII)
_DURATION_PART = re.compile(rf"({_NUMBER})(ms|[smhdw])", re.ASCII)
_SIZE = re.compile(rf"({_NUMBER})([KMGTP]?)(?:(?<=[KMGTP])i?B|(?<![KMGTP])B)?", re.ASCII)
_LISTEN = re.compile(r"(?:\[([\w.:%-]*)\]|([\w.%-]*)):([0-9]{1,5})")


def parse_duration(text: str) -> float:
    """Return seconds, from one or more numbers, each with its unit (ms s m h d w). Raises ValueError."""
    if not _DURATION.fullmatch(text):
        raise ValueError(f"expected {DURATION_FORM}, found {text!r:.60}")
    parts = _DURATION_PART.findall(text)
    seconds = sum(Decimal(number) * _MILLISECONDS[unit] for number, unit in parts) / 1000
    if seconds > MAX_DURATION_S:
        raise ValueError(f"expected at most {format_duration(MAX_DURATION_S)}, found {text!r:.60}")
    return float(seconds)


def format_duration(seconds: float) -> str:
    """Return the shortest text that `parse_duration` reads as `seconds`, to the millisecond; `0s` for nothing."""
    left, text = round(seconds * 1000), ""
    for unit, length in _MILLISECONDS.items():
        count, left = divmod(left, length)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def duration_words(seconds: float) -> str:
    """Return `seconds` for people, to two units: `0.2 s`, `12 s`, `4m31s`, `3d2h`."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    left, parts = round(seconds), list[str]()
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
    return "".join(parts[:2])


def format_age(seconds: float | None) -> str | None:
    """Return the age of an event for people: `3m20s ago`; None for never."""
    return None if seconds is None else f"{duration_words(seconds)} ago"


class StyledCell(NamedTuple):
    """A table cell with a colour by its name, or `dim`; used if the output has colours; empty: no colour."""

    text: object
    style: str


def size_words(size: float) -> str:
    """Return bytes for people, in the largest unit that leaves at least one: `812 B`, `2.1 KiB`, `100 MiB`."""
    if size < 1023.5:
        return f"{size:,.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1023.95 or unit == "TiB":
            break
    return f"{f'{size:,.1f}'.removesuffix('.0')} {unit}"


def format_count(count: int, what: str) -> str:
    """Return a count with its noun: `1 segment`, `2,000 segments`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def parse_size(text: str) -> int:
    """Return bytes: a number, alone or with K M G T P, each with or without B or iB; all binary. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    size = int(Decimal(match[1]) * _BYTES[match[2]]) if match else -1
    if not match or size > MAX_SIZE_BYTES:
        raise ValueError(f"expected {SIZE_FORM}, found {text!r:.60}")
    return size


def format_size(size: int) -> str:
    unit = next((u for u, n in reversed(_BYTES.items()) if size and size % n == 0), "")
    return f"{size // _BYTES[unit]}{unit}"


def parse_listen(text: str) -> tuple[str, int] | None:
    """Return host and port to listen on (port 0: any free one); `:9464`: all addresses; None for an empty text: no
    listener. Raises ValueError.
    """
    if not text:
        return None
    if not (match := _LISTEN.fullmatch(text)) or int(match[3]) > 65535:
        raise ValueError(f"expected {LISTEN_FORM}, found {text!r:.60}")
    return match[1] or match[2] or "0.0.0.0", int(match[3])  # noqa: S104  (asked for by leaving the host out)


#: The validation context of values that come from a file.
FROM_FILE = {"source": "file"}


class ExpandedText(str):
    """Text that `${VAR}` or a file replaced `source` with; it may represent a number or a truth value."""

    __slots__ = ("source",)
    source: str

    def __new__(cls, text: str, source: str) -> ExpandedText:
        self = super().__new__(cls, text)
        self.source = source
        return self

    def __reduce__(self) -> tuple[type[ExpandedText], tuple[str, str]]:
        """Support pickling: settings travel to Spark's executors."""
        return ExpandedText, (str(self), self.source)


def value_error(expected: str) -> PydanticCustomError:
    return PydanticCustomError("floe_value", "expected {expected}", {"expected": expected})


@dataclass(frozen=True, slots=True)
class TypeName:
    """The name of a type in the documentation."""

    name: str


@dataclass(frozen=True)
class Range:
    """A value from `minimum` to `maximum`, both as written in a file; `reason` is part of the message.

    `or_zero`: 0 is allowed below the minimum, and switches the feature off.
    """

    minimum: str | int | None = None
    maximum: str | int | None = None
    reason: str = ""
    or_zero: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: float) -> float:
        # The type of the value decides how a bound is parsed: durations are float, sizes and numbers int.
        read: Callable[[str], float] = parse_duration if isinstance(value, float) else parse_size
        low, high = (read(b) if isinstance(b, str) else b for b in (self.minimum, self.maximum))
        inside = (low is None or value >= low) and (high is None or value <= high)
        if not inside and not (self.or_zero and value == 0):
            raise value_error(str(self) + (f" ({self.reason})" if self.reason else ""))
        return value

    def __str__(self) -> str:
        zero = "0 or " if self.or_zero else ""
        if self.minimum is None or self.maximum is None:
            return f"{zero}at {'most' if self.minimum is None else 'least'} {self.maximum or self.minimum}"
        return f"{zero}{self.minimum} to {self.maximum}"


def _core_scalar(text: str) -> Any:
    if re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", text):
        return int(text)
    return {"true": True, "false": False}.get(text, text)


def _text(value: Any) -> Any:
    if isinstance(value, str):
        return str(value)
    raise value_error("text" + ("; quote it" if isinstance(value, bool | int | float) else ""))


def _exactly(kind: type, form: str, *words: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        value = _core_scalar(value) if isinstance(value, ExpandedText) else value
        if type(value) is not kind and value not in words:
            raise value_error(form)
        return value

    return BeforeValidator(check)


def _duration(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and info.context != FROM_FILE:
        return float(value)
    return _parsed(value, parse_duration, DURATION_FORM)


def _size(value: Any) -> Any:
    is_bytes = isinstance(value, int) and not isinstance(value, bool)
    return _parsed(str(value) if is_bytes else value, parse_size, SIZE_FORM)


def _parsed(value: Any, parse: Callable[[str], Any], form: str) -> Any:
    if not isinstance(value, str):
        raise value_error(form)
    try:
        return parse(value)
    except ValueError as error:
        limit = re.match(r"expected (at most .*), found", str(error))
        raise value_error(limit[1] if limit else form) from error


def matching(pattern: re.Pattern[str], form: str) -> AfterValidator:
    """Return a validator for empty text, or text that matches all of `pattern`; messages describe it as `form`."""

    def check(value: str) -> str:
        if value and not pattern.fullmatch(value):
            raise value_error(form)
        return value

    return AfterValidator(check)


def readable(parse: Callable[[str], Any], form: str) -> AfterValidator:
    def check(value: str) -> str:
        if value:
            _parsed(value, parse, form)
        return value

    return AfterValidator(check)


NEVER = "never"
MIN_PERIOD, MAX_PERIOD = "1s", "1d"  # of a period


def parse_period(text: str) -> float:
    """Return seconds; 0 for `never`. Raises ValueError."""
    return 0.0 if text == NEVER else parse_duration(text)


def _check_period(text: str) -> str:
    form = f"never, or a duration from {MIN_PERIOD} to {MAX_PERIOD}"
    if text not in ("", NEVER):
        seconds = _parsed(text, parse_duration, form)
        if not parse_duration(MIN_PERIOD) <= seconds <= parse_duration(MAX_PERIOD):
            raise value_error(form)
    return text


# Lists become tuples: a loaded configuration never changes.
OneOrMore = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)

Text = Annotated[str, BeforeValidator(_text), TypeName("text")]
Whole = Annotated[int, _exactly(int, "a whole number"), TypeName("number")]
Flag = Annotated[bool, _exactly(bool, "true or false"), TypeName("true or false")]
FlagOrMoving = Annotated[
    bool | str, _exactly(bool, "true, false or moving", "moving"), TypeName("true \\| false \\| moving")
]
Duration = Annotated[float, BeforeValidator(_duration), TypeName("duration")]
Size = Annotated[int, BeforeValidator(_size), TypeName("size")]
Secret = Annotated[
    SecretStr,
    BeforeValidator(lambda value: value if isinstance(value, SecretStr) else _text(value)),
    TypeName("secret"),
]

_PATH = re.compile(r"[^\x00-\x1f\x7f]{1,4095}")
_LABEL = re.compile(r"[^\x00-\x1f\x7f]{1,255}")
_BUCKET = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SUBJECT = re.compile(r"[^\s.*>\x00-\x1f\x7f]+(\.[^\s.*>\x00-\x1f\x7f]+)*")
_FILTER = re.compile(r"([^\s.>\x00-\x1f\x7f]+(\.[^\s.>\x00-\x1f\x7f]+)*(\.>)?|>)")

Path = Annotated[Text, matching(_PATH, "a path without control characters"), TypeName("path")]
Label = Annotated[Text, matching(_LABEL, "at most 255 characters on one line")]
SiteName = Annotated[Text, matching(SITE_PATTERN, "1 to 63 of A-Z a-z 0-9 _ -, the first not _ or -"), TypeName("name")]
StreamName = Annotated[
    Text, matching(FEED_PATTERN, "a stream name: 1 to 255 characters without space . * > / \\"), TypeName("name")
]
StreamPattern = Annotated[
    Text,
    matching(
        re.compile(r"[^\s.>/\\\x00-\x1f\x7f]{1,255}"), "a stream name, with * for any text, without space . > / \\"
    ),
    TypeName("name"),
]
SitePattern = Annotated[
    Text,
    matching(re.compile(r"[A-Za-z0-9*][A-Za-z0-9_*-]{0,62}"), "1 to 63 of A-Z a-z 0-9 _ - and *, the first not _ or -"),
    TypeName("name"),
]
BucketName = Annotated[Text, matching(_BUCKET, "1 to 64 of A-Z a-z 0-9 _ -"), TypeName("name")]
Subject = Annotated[Text, matching(_SUBJECT, "a subject without wildcards and empty tokens"), TypeName("subject")]
SubjectFilter = Annotated[
    Text, matching(_FILTER, "a subject, * and a last > allowed, without empty tokens"), TypeName("subject")
]
Time = Annotated[Text, readable(parse_time, TIME_FORM), TypeName("time")]
#: An interval, or `never`; empty if the key's description gives a default for it.
Period = Annotated[Text, AfterValidator(_check_period), TypeName("duration or never")]
Listen = Annotated[Text, readable(parse_listen, LISTEN_FORM), TypeName("address")]


def is_subject(text: str) -> bool:
    """True if messages can be published to `text`: no wildcards, spaces, control characters or empty tokens."""
    return bool(_SUBJECT.fullmatch(text))


def is_filter(text: str) -> bool:
    """True if `text` is a subject filter: a subject, `*` and a last `>` allowed, without empty tokens."""
    return bool(_FILTER.fullmatch(text))


def required(value: Any) -> Any:
    if not value:
        raise value_error("a value" if isinstance(value, str) else "at least one entry")
    return value


Required = AfterValidator(required)


_HOST_URL = re.compile(
    r"(?P<scheme>[a-z0-9]+)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(?P<port>[0-9]{1,5}))?"
)
_S3_BUCKET = re.compile(r"[a-z0-9](?:[a-z0-9.-]{1,61})[a-z0-9]")
_IP = re.compile(r"[0-9]+(\.[0-9]+){3}")


def host_url(schemes: Sequence[str], credentials: str, *, or_empty: bool = False) -> AfterValidator:
    """Return a validator for `scheme://host[:port]` only; `credentials`: the keys for user and password instead."""
    form = " or ".join(f"{scheme}://HOST:PORT" for scheme in schemes)

    def check(text: str) -> str:
        match = _HOST_URL.fullmatch(text)
        if or_empty and not text:
            return text
        if "@" in text:
            raise value_error(f"{form} without user and password (they belong in {credentials})")
        if text.endswith("/"):
            raise value_error(f"{form} without a slash at the end")
        if not match or match["scheme"] not in schemes:
            raise value_error(f"{form} (an IPv6 address in brackets; no path)")
        if match["port"] and not 1 <= int(match["port"]) <= 65535:
            raise value_error(f"{form} with a port from 1 to 65535")
        return text

    return AfterValidator(check)


def is_plaintext(url: str) -> bool:
    """True if data sent to `url` leaves this host without TLS."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return url.startswith("http:") and not ipaddress.ip_address(host).is_loopback
    return url.startswith("http:") and host != "localhost"


def check_store_url(text: str) -> str:
    scheme, _, rest = text.partition("://")
    if scheme == "file":
        folder = unquote(rest)
        if folder[:1] != "/" or not folder.strip("/") or ".." in folder.split("/") or "\0" in folder:
            raise value_error("file:///FOLDER with an absolute folder below /")
        return text
    if "@" in text:
        belong = "they belong in access_key_id and secret_access_key_file"
        raise value_error(f"s3://BUCKET without credentials ({belong})")
    if scheme != "s3":
        raise value_error("s3://BUCKET or file:///FOLDER")
    if "/" in rest:
        raise value_error("s3://BUCKET without a path after the bucket (a path belongs in prefix)")
    if not _S3_BUCKET.fullmatch(rest) or ".." in rest or _IP.fullmatch(rest):
        form = "3 to 63 of a-z 0-9 . -, beginning and ending with a letter or digit"
        raise value_error(f"s3://BUCKET, the bucket {form}")
    return text


EVENT_PLACEHOLDER, VALUE_PLACEHOLDER = "%s", "%v"
MAX_VALUE_BYTES = 512  # bytes that a value may take in a subject
MAX_ADVISORY_SUBJECT_BYTES = 3500  # bytes; a server takes lines of 4,096, which also hold a reply subject

_UNKNOWN_PLACEHOLDER = re.compile("%(?![sv%])")


def _check_advisory(template: str) -> str:
    if not template:
        return template
    if not is_subject(template.replace(EVENT_PLACEHOLDER, "s").replace(VALUE_PLACEHOLDER, "v")):
        raise value_error("a subject without wildcards and empty tokens, %s and %v allowed")
    if _UNKNOWN_PLACEHOLDER.search(template):
        raise value_error("%s for the event, %v for the value, and no % before another letter")
    first = template.partition(".")[0]
    if VALUE_PLACEHOLDER in first or first.startswith("$"):
        # A value comes from a publisher, so it must not choose the beginning of the subject, such as $JS.API.
        raise value_error("a first token that has no %v and does not begin with $")
    if len(template.replace(VALUE_PLACEHOLDER, "v" * MAX_VALUE_BYTES).encode()) > MAX_ADVISORY_SUBJECT_BYTES:
        raise value_error(f"at most {MAX_ADVISORY_SUBJECT_BYTES} bytes, counting {MAX_VALUE_BYTES} for each %v")
    return template


AdvisorySubject = Annotated[Text, AfterValidator(_check_advisory), TypeName("subject")]


_FILE_SECRETS: weakref.WeakValueDictionary[int, FileSecret] = weakref.WeakValueDictionary()


def regular_file(path: str | FilePath) -> FilePath:
    """Return `path` if it is a regular file. Raises OSError if it is missing, and for a pipe, a device or a folder."""
    if not stat.S_ISREG((found := FilePath(path)).stat().st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return found


class FileSecret(SecretStr):
    """A secret that `read` found in the file `path`.

    It stays until the file is read again: after the secret was refused, or on SIGHUP. So a file that is newer than the
    server's secret does no harm. `read` raises ValueError for content that is not a secret, never with the content.
    """

    def __init__(self, value: str, path: str, read: Callable[[str], str]) -> None:
        super().__init__(value)
        self.path, self._read = path, read
        _FILE_SECRETS[id(self)] = self

    def reread(self) -> bool:
        """Read the file again; return True if the secret is another one now. From any thread."""
        try:
            found = self._read(self.path)
        except ValueError as error:
            log.warning("secret reread failed", action="secret_reread_failed", error=str(error))
            return False
        if found == self._secret_value:
            return False
        self._secret_value = found
        log.info("secret reread", action="secret_reread", file=self.path)
        return True


def reread_all_secrets() -> None:
    for secret in list(_FILE_SECRETS.values()):
        secret.reread()


def option(default: Any, meaning: str) -> Any:
    return Field(default, description=meaning)


def needed(meaning: str) -> Any:
    return Field(description=meaning)


class Section(BaseModel):
    """A section of the configuration. Defaults are validated too, so they have the form of values in a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        """Yield problems between keys: the key to point at (dotted, within the section) and the problem.

        Called once every value is valid by itself.
        """
        yield from ()

    def keys_set(self, *names: str) -> list[str]:
        """Return those of the keys that are set (not empty, not 0, not false)."""
        return [name for name in names if getattr(self, name)]

    def require_together(self, one: str, other: str) -> Iterator[tuple[str, str]]:
        for present, missing in ((one, other), (other, one)):
            value = getattr(self, missing)
            if getattr(self, present) and not value:
                file = f" or {missing}_file" if isinstance(value, SecretStr) else ""
                yield present, f"expected {missing}{file} with it, found none"

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> Any:
        """Return the given keys, completed from other keys; called before any value is validated."""
        return given

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        return cls.completed(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _refuse_combinations(self) -> Self:
        if problems := list(self.combination_problems()):
            text = "; ".join(f"{key}: {problem}" for key, problem in problems)
            raise PydanticCustomError("floe_combination", "{text}", {"text": text, "problems": problems})
        return self


def to_plain(value: Any) -> Any:
    return value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, Section) else value


def merge(defaults: Any, entry: Any) -> Any:
    """Return `entry` over `defaults`, nested mappings key by key; if either is not a mapping, `entry` wins."""
    defaults, entry = to_plain(defaults), to_plain(entry)
    if not isinstance(defaults, Mapping) or not isinstance(entry, Mapping):
        return entry
    both = {name: merge(defaults[name], value) for name, value in entry.items() if name in defaults}
    return {**defaults, **entry, **both}


def merge_entries(section: Any, key: str, defaults: Any) -> Any:
    if not isinstance(section, Mapping) or not isinstance(section.get(key), list | tuple):
        return section
    return {**section, key: [merge(defaults, entry) for entry in section[key]]}


def find_repeated(values: Iterable[Hashable]) -> Iterator[tuple[int, int]]:
    first: dict[Hashable, int] = {}
    for index, value in enumerate(values):
        if first.setdefault(value, index) != index:
            yield first[value], index
