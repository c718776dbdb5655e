"""Header blocks, byte for byte: the provenance that Floe adds, and the escape that makes copied headers inert.

A block is `NATS/1.0`, lines, an empty line, each ended by CR LF. nats-server acts on a header if its name, with exactly
this spelling, follows a CR LF and is followed by a colon; servers before 2.11 check only the first occurrence of the
name. So `Floe-Original: Nats-Rollup: sub` is text, and the headers that Floe wants to act come first.

    NATS/1.0
    Nats-Expected-Last-Sequence: 41          first lines: Floe's own, they act
    Floe-Source: us-east NODE_DATA 0000 0 7 1700000000000000001
    Floe-Replay: 3f0c9a1be27d4455            only in a replay into the feed's own source
    Floe-Source: …                           former hops, only in a relay
    Content-Type: text/plain                 as the publisher wrote it
    Floe-Original: Nats-Msg-Id: a            as the publisher wrote it, escaped

A block of another form, or with a lone CR or LF in its lines (some readers start a new header there), is carried as
`Floe-Block: {Base64}`; an empty block as an empty `Floe-Original:`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass

from common.chain import Chain

SOURCE_HEADER = b"Floe-Source"
ORIGINAL_HEADER = b"Floe-Original"
BLOCK_HEADER = b"Floe-Block"
REPLAY_HEADER = b"Floe-Replay"

VERSION_LINE = b"NATS/1.0\r\n"
CRLF = b"\r\n"

_SOURCE_PREFIX = SOURCE_HEADER + b": "
_ORIGINAL_PREFIX = ORIGINAL_HEADER + b": "
_EMPTY_ORIGINAL = ORIGINAL_HEADER + b":"
_BLOCK_PREFIX = BLOCK_HEADER + b": "
_REPLAY_PREFIX = REPLAY_HEADER + b": "
_FLOE_PREFIXES = (_SOURCE_PREFIX, _ORIGINAL_PREFIX, _EMPTY_ORIGINAL, _BLOCK_PREFIX)


def header_lines(block: bytes) -> list[bytes]:
    """Return the lines of any block, without its first line and without empty lines."""
    return [line for line in block.split(CRLF)[1:] if line]


def parse_block(block: bytes) -> list[tuple[bytes, bytes]]:
    """Return names and values in order, with repeats, as written; one space after the colon belongs to the separator.

    A line without a colon is a name with an empty value.
    """
    parts = (line.partition(b":") for line in header_lines(block))
    return [(name, value.removeprefix(b" ")) for name, _, value in parts]


def build_block(block_lines: Iterable[bytes]) -> bytes:
    """Return a block of these lines, each `Name: value` without its CR LF.

    Raises ValueError for a line with CR or LF, and for an empty line.
    """
    wanted = list(block_lines)
    for line in wanted:
        if not line or b"\r" in line or b"\n" in line:
            raise ValueError(f"header line {line!r:.80}: expected text without CR and LF")
    return b"".join([VERSION_LINE, *(line + CRLF for line in wanted), CRLF])


def header_value(block: bytes | None, name: bytes) -> bytes | None:
    """Return the first value of `name` (any case), without surrounding spaces; None if there is none."""
    wanted = name.lower()
    for key, value in parse_block(block) if block is not None else []:
        if key.strip().lower() == wanted:
            return value.strip()
    return None


def parse_status_line(block: bytes | None) -> tuple[int, bytes] | None:
    """Return code and description of a status line such as `NATS/1.0 404 No Messages`; None if the block has none.

    A stored message may have such a line too: a status from the server itself comes without a `$JS.ACK…` reply.
    """
    first = (block or b"").partition(CRLF)[0]
    version, _, rest = first.partition(b" ")
    code, _, description = rest.partition(b" ")
    return (int(code), description) if version == b"NATS/1.0" and code.isdigit() else None


@dataclass(frozen=True, slots=True)
class Provenance:
    """The place of first storage of a message: its chain, and its sequence and timestamp (ns) there."""

    site: str
    feed: str
    incarnation: int
    partition: int
    sequence: int
    timestamp_ns: int

    @property
    def chain(self) -> Chain:
        """The chain. Raises ValueError if the parts are not a valid chain."""
        return Chain(self.site, self.feed, self.incarnation, self.partition)

    def line(self) -> bytes:
        """Return `Floe-Source: {site} {feed} {incarnation} {partition} {sequence} {timestamp_ns}`."""
        return b"%b%b %b %04d %d %d %d" % (
            _SOURCE_PREFIX,
            self.site.encode(),
            self.feed.encode(),
            self.incarnation,
            self.partition,
            self.sequence,
            self.timestamp_ns,
        )

    @classmethod
    def parse(cls, line: bytes) -> Provenance:
        """Parse the output of `line`, with or without the header's name. Raises ValueError."""
        words = line.removeprefix(_SOURCE_PREFIX).split(b" ")
        if len(words) != 6 or not all(word.isdigit() for word in words[2:]):
            raise ValueError(f"provenance {line!r:.120}: expected site, feed and four numbers")
        incarnation, partition, sequence, timestamp_ns = (int(word) for word in words[2:])
        return cls(words[0].decode(), words[1].decode(), incarnation, partition, sequence, timestamp_ns)


def escape_lines(block: bytes | None, control_headers: frozenset[bytes], *, relay: bool = False) -> bytes:
    """Return the lines for the block of a copy, from `block`, the message's own; each with its CR LF; empty for None.

    `control_headers`: lower-case names of headers that may act again. `relay`: Floe itself wrote the stream. Its
    `Floe-Source` lines stay hops, lines that it escaped stay escaped, and other lines that it added are dropped.
    """
    if block is None:
        return b""
    if (inner := _valid_lines(block)) is None:
        return _BLOCK_PREFIX + base64.b64encode(block) + CRLF
    if not inner:
        return _EMPTY_ORIGINAL + CRLF
    lowered = inner.lower()
    if b"nats-" not in lowered and b"floe-" not in lowered:
        return inner
    if relay and (written := _floe_lines(block)) is not None:
        written = [line for line in written if not line.startswith(_REPLAY_PREFIX)]
        kept = [line if line.startswith(_FLOE_PREFIXES) else _escape_line(line, control_headers) for line in written]
    else:
        kept = [_escape_line(line, control_headers) for line in inner.split(CRLF)[:-1]]
    return CRLF.join([*kept, b""])


def _escape_line(line: bytes, control_headers: frozenset[bytes]) -> bytes:
    start = line[:5].lower()
    if start != b"floe-" and (start != b"nats-" or line.partition(b":")[0].lower() in control_headers):
        return line
    return _ORIGINAL_PREFIX + line


def _valid_lines(block: bytes) -> bytes | None:
    """Return the lines, each with its CR LF, of a block that `build_block` would build; None for any other block."""
    if not block.startswith(VERSION_LINE) or not block.endswith(b"\r\n\r\n"):
        return None
    inner = block[len(VERSION_LINE) : -2]
    ends = inner.count(CRLF)
    if inner.count(b"\n") != ends or inner.count(b"\r") != ends or b"\n\r\n" in inner or inner[:2] == CRLF:
        return None
    return inner


def split_provenance(block: bytes | None) -> tuple[Provenance | None, bytes | None]:
    """Return the newest provenance and the publisher's own block; (None, `block`) if Floe did not write the block."""
    provenances, original = _parse_floe_block(block)
    return (provenances[0], original) if provenances else (None, block)


def parse_provenances(block: bytes | None) -> list[Provenance]:
    """Return all provenances, the newest first; more than one only after a relay.

    Empty for a block that Floe did not write.
    """
    return _parse_floe_block(block)[0]


def is_replayed(block: bytes) -> bool:
    """True if Floe wrote the block when it replayed a feed into its own source.

    Valid only if the source of `Floe-*` headers is trusted; a publisher's own header of that name is escaped.
    """
    return any(line.startswith(_REPLAY_PREFIX) for line in _floe_lines(block) or [])


def _parse_floe_block(block: bytes | None) -> tuple[list[Provenance], bytes | None]:
    written = None if block is None else _floe_lines(block)
    try:
        provenances = [Provenance.parse(line) for line in written or [] if line.startswith(_SOURCE_PREFIX)]
        rest = [line for line in written or [] if not line.startswith((_SOURCE_PREFIX, _REPLAY_PREFIX))]
        return provenances, _original_block(rest)
    except ValueError:
        return [], None


def _original_block(written: list[bytes]) -> bytes | None:
    if not written:
        return None
    if written == [_EMPTY_ORIGINAL]:
        return build_block([])
    if len(written) == 1 and written[0].startswith(_BLOCK_PREFIX):
        return base64.b64decode(written[0].removeprefix(_BLOCK_PREFIX), validate=True)
    return build_block(line.removeprefix(_ORIGINAL_PREFIX) for line in written)


def _floe_lines(block: bytes) -> list[bytes] | None:
    """Return the lines from `Floe-Source` on, if only `Nats-*` lines come before; None for other blocks."""
    found = (_valid_lines(block) or b"").split(CRLF)[:-1]
    for index, line in enumerate(found):
        if line.startswith(_SOURCE_PREFIX):
            return found[index:]
        if not line.startswith(b"Nats-"):
            return None
    return None
