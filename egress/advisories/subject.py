"""The subject of an advisory: a template in which `%s` stands for the event and `%v` for the value.

A value is whatever a publisher wrote, a subject is a command to the server: what would end it, match others
or make an empty token is escaped as in a URL (`%20`), and `%` itself, so that different values have different
subjects. Dots stay: `node1.example.net` makes three tokens, as with stream-replicator.
"""

from __future__ import annotations

import hashlib
import re

from common.settings.advisory_subject import EVENT, MAX_VALUE, VALUE
from egress.advisories.event import Advisory

HASH_DIGITS = 32  # what a value that was cut to MAX_VALUE ends in, after a ~

# Spaces of all kinds, control characters, wildcards, half surrogates; dots that would make an empty token.
_UNSAFE = re.compile(r"[\s\x00-\x20\x7f-\x9f*>%\ud800-\udfff]|^\.|\.$|(?<=\.)\.")
_PLACES = re.compile("%[sv]")
_WHOLE_ESCAPES = re.compile(rb"(?:%[0-9A-F]{2}|[^%])*")


def safe(value: str) -> str:
    """`value` as tokens of a subject: never empty, no dot at either end, at most `MAX_VALUE` bytes."""
    text = _UNSAFE.sub(_escape, value) or "%"
    raw = text.encode()
    if len(raw) <= MAX_VALUE:
        return text
    digest = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_DIGITS]
    room = raw[: MAX_VALUE - HASH_DIGITS - 1]
    whole = _WHOLE_ESCAPES.match(room)
    assert whole is not None
    return f"{whole[0].decode('utf-8', 'ignore')}~{digest}"


def _escape(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def subject_of(template: str, advisory: Advisory) -> str:
    """Where `advisory` is published; a subject that can be published to, where the template is valid."""
    words = {EVENT: advisory.event.value, VALUE: safe(advisory.value)}
    # Both in one go: what a value brings in is not looked at again.
    return _PLACES.sub(lambda match: words[match[0]], template)


def filter_of(template: str) -> str:
    """The narrowest filter that takes every subject of the template."""
    tokens: list[str] = []
    for token in template.split("."):
        if VALUE in token:
            return ".".join([*tokens, ">"])
        tokens.append("*" if EVENT in token else token)
    return ".".join(tokens)
