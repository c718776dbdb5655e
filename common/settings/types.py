"""The types of configuration values.

A file is read strictly: text is text, a duration needs its unit. In code the same models also take a duration
in seconds, so that a dumped model can be read back. What is refused is told as `expected …`; the loader adds
what it found, and never a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler, SecretStr, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from common.chain import FEED_PATTERN, SITE_PATTERN
from common.settings.units import (
    DURATION_FORM,
    LISTEN_FORM,
    SIZE_FORM,
    TIME_FORM,
    parse_duration,
    parse_listen,
    parse_size,
    parse_time,
)

#: The validation context of values that come from a file.
FROM_FILE = {"source": "file"}


class Expanded(str):
    """Text that `${VAR}` or a file put in place of `source`; it may stand for a number or a truth value."""

    __slots__ = ("source",)
    source: str

    def __new__(cls, text: str, source: str) -> Expanded:
        self = super().__new__(cls, text)
        self.source = source
        return self


def refuse(expected: str, **context: Any) -> PydanticCustomError:
    """The error for one value; the loader appends what was found."""
    return PydanticCustomError("floe_value", "expected {expected}", {"expected": expected, **context})


@dataclass(frozen=True, slots=True)
class Kind:
    """What a type is called in the documentation."""

    name: str


@dataclass(frozen=True)
class Range:
    """A value from `minimum` to `maximum` as they are written in a file; `why` stands in the message.

    `or_zero`: 0 is allowed below the minimum, and switches off.
    """

    minimum: str | int | None = None
    maximum: str | int | None = None
    why: str = ""
    or_zero: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: float) -> float:
        # The type of the value says how a bound is read: durations are float, sizes and numbers int.
        read: Callable[[str], float] = parse_duration if isinstance(value, float) else parse_size
        low, high = (read(b) if isinstance(b, str) else b for b in (self.minimum, self.maximum))
        inside = (low is None or value >= low) and (high is None or value <= high)
        if not inside and not (self.or_zero and value == 0):
            raise refuse(str(self) + (f" ({self.why})" if self.why else ""))
        return value

    def __str__(self) -> str:
        zero = "0 or " if self.or_zero else ""
        if self.minimum is None or self.maximum is None:
            return f"{zero}at {'most' if self.minimum is None else 'least'} {self.maximum or self.minimum}"
        return f"{zero}{self.minimum} to {self.maximum}"


def _core_scalar(text: str) -> Any:
    """What an expanded text stands for where no text is wanted."""
    if re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", text):
        return int(text)
    return {"true": True, "false": False}.get(text, text)


def _text(value: Any) -> Any:
    if isinstance(value, str):
        return str(value)
    raise refuse("text" + ("; quote it" if isinstance(value, bool | int | float) else ""))


def _whole(value: Any) -> Any:
    value = _core_scalar(value) if isinstance(value, Expanded) else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse("a whole number")
    return value


def _flag(value: Any) -> Any:
    value = _core_scalar(value) if isinstance(value, Expanded) else value
    if not isinstance(value, bool):
        raise refuse("true or false")
    return value


def _duration(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and info.context != FROM_FILE:
        return float(value)
    return _parsed(value, parse_duration, DURATION_FORM)


def _size(value: Any, _info: ValidationInfo) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    return _parsed(value, parse_size, SIZE_FORM)


def _parsed(value: Any, parse: Callable[[str], Any], form: str) -> Any:
    try:
        return parse(str(value)) if isinstance(value, str) else _raise(form)
    except ValueError as error:
        limit = re.match(r"expected (at most .*), found", str(error))
        raise refuse(limit[1] if limit else form) from error


def _raise(form: str) -> Any:
    raise refuse(form)


def _secret(value: Any) -> Any:
    return value if isinstance(value, SecretStr) else _text(value)


def matching(pattern: re.Pattern[str], form: str) -> AfterValidator:
    """Empty text, or text that is one match of `pattern`; `form` says what that is."""

    def check(value: str) -> str:
        if value and not pattern.fullmatch(value):
            raise refuse(form)
        return value

    return AfterValidator(check)


def readable(parse: Callable[[str], Any], form: str) -> AfterValidator:
    """Empty text, or text that `parse` takes."""

    def check(value: str) -> str:
        if value:
            _parsed(value, parse, form)
        return value

    return AfterValidator(check)


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


# Lists come as tuples: what is loaded never changes.
OneOrMore = BeforeValidator(_as_tuple)

Text = Annotated[str, BeforeValidator(_text), Kind("text")]
Whole = Annotated[int, BeforeValidator(_whole), Kind("number")]
Flag = Annotated[bool, BeforeValidator(_flag), Kind("true or false")]
Duration = Annotated[float, BeforeValidator(_duration), Kind("duration")]
Size = Annotated[int, BeforeValidator(_size), Kind("size")]
Secret = Annotated[SecretStr, BeforeValidator(_secret), Kind("secret")]

_PATH = re.compile(r"[^\x00-\x1f\x7f]{1,4095}")
_LABEL = re.compile(r"[^\x00-\x1f\x7f]{1,255}")
_BUCKET = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SUBJECT = re.compile(r"[^\s.*>\x00-\x1f\x7f]+(\.[^\s.*>\x00-\x1f\x7f]+)*")
_FILTER = re.compile(r"([^\s.>\x00-\x1f\x7f]+(\.[^\s.>\x00-\x1f\x7f]+)*(\.>)?|>)")

Path = Annotated[Text, matching(_PATH, "a path without control characters"), Kind("path")]
Label = Annotated[Text, matching(_LABEL, "at most 255 characters on one line")]
SiteName = Annotated[
    Text,
    matching(SITE_PATTERN, "1 to 63 of A-Z a-z 0-9 _ -, the first not _ or -"),
    Kind("name"),
]
StreamName = Annotated[
    Text,
    matching(FEED_PATTERN, "a stream name: 1 to 255 characters without space . * > / \\"),
    Kind("name"),
]
BucketName = Annotated[Text, matching(_BUCKET, "1 to 64 of A-Z a-z 0-9 _ -"), Kind("name")]
Subject = Annotated[Text, matching(_SUBJECT, "a subject without wildcards and empty tokens"), Kind("subject")]
SubjectFilter = Annotated[
    Text, matching(_FILTER, "a subject, * and a last > allowed, without empty tokens"), Kind("subject")
]
Time = Annotated[Text, readable(parse_time, TIME_FORM), Kind("time")]
Listen = Annotated[Text, readable(parse_listen, LISTEN_FORM), Kind("address")]


def is_subject(text: str) -> bool:
    """Whether `text` can be published to: no wildcards, spaces, control characters or empty tokens."""
    return bool(_SUBJECT.fullmatch(text))


def is_filter(text: str) -> bool:
    """Whether `text` is a subject filter: a subject, `*` and a last `>` allowed, without empty tokens."""
    return bool(_FILTER.fullmatch(text))


def required(value: Any) -> Any:
    """Refuses empty text and empty lists where a value must stand."""
    if not value:
        raise refuse("a value" if isinstance(value, str) else "at least one entry")
    return value


Required = AfterValidator(required)
