"""The key of each message: by what the sampler tells messages apart."""

from __future__ import annotations

import re
from collections.abc import Callable

from common.segments.columns import Columns
from egress.sampling.json_keys import JsonReader
from egress.sampling.key_reader import parse_path
from egress.sampling.settings import MAX_KEY_BYTES, Sampling

Keys = list[str | None]
Forces = list[bool] | None
#: From a batch to the key of each message, and whether each is forced (None: no force field).
Read = Callable[[Columns], tuple[Keys, Forces]]


class KeyReader:
    """Reads the keys of messages as `sampling` says; made once per session, for one thread."""

    def __init__(self, sampling: Sampling) -> None:
        self._read = _by_field(sampling) if sampling.field else _by_other(sampling)

    def read(self, columns: Columns) -> tuple[Keys, Forces]:
        """The key of each message, None where it has none; and whether each is forced to pass, None where the
        settings name no force field.
        """
        keys, forced = self._read(columns)
        return _without_long(keys), forced


def _without_long(keys: Keys) -> Keys:
    # A character is four bytes at most: mostly this one comparison is all.
    if max(map(len, filter(None, keys)), default=0) <= MAX_KEY_BYTES // 4:
        return keys
    return [None if key is None or len(key.encode()) > MAX_KEY_BYTES else key for key in keys]


def _by_field(sampling: Sampling) -> Read:
    field = parse_path(sampling.field)
    if not sampling.force_field:
        reader = JsonReader(field, None)
        return lambda columns: (reader.keys(columns.payloads), None)
    both = JsonReader(field, parse_path(sampling.force_field))
    return lambda columns: both.both(columns.payloads)


def _by_other(sampling: Sampling) -> Read:
    keys = _by_header(sampling.header) if sampling.header else _by_token(sampling.subject_token)
    if not sampling.force_field:
        return lambda columns: (keys(columns), None)
    force = JsonReader(None, parse_path(sampling.force_field))
    return lambda columns: (keys(columns), force.both(columns.payloads)[1])


def _by_header(name: str) -> Callable[[Columns], Keys]:
    """By the first header of this name, in any case, without the spaces around its value."""
    line = rb"\r\n[ \t]*" + re.escape(name.encode()) + rb"[ \t]*:([^\r\n]*)"
    find = re.compile(line, re.IGNORECASE).search

    def key(block: bytes | None) -> str | None:
        found = None if block is None else find(block)
        return None if found is None else _text(found[1].strip())

    return lambda columns: list(map(key, columns.headers))


def _by_token(token: int) -> Callable[[Columns], Keys]:
    """By one token of the subject, counted from 1, or by all of it (-1)."""
    if token < 0:
        return lambda columns: list(map(_text, columns.subjects))

    def key(subject: bytes) -> str | None:
        tokens = subject.split(b".", token)
        return _text(tokens[token - 1]) if len(tokens) >= token else None

    return lambda columns: list(map(key, columns.subjects))


def _text(raw: bytes) -> str | None:
    return raw.decode("utf-8", "backslashreplace") or None
