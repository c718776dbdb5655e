"""Keys of the objects in a bucket: formatting and parsing.

    {chain} = site={site}/feed={feed}/incarnation={k:04d}/partition={n}

    {prefix}/{chain}/level={l}/{last:020d}-{first:020d}-{digest}.parquet
    {prefix}/_floe/site={site}/feed={feed}/incarnation={k:04d}/stream.json
    {prefix}/_floe/site={site}/feed={feed}/incarnation={k:04d}/{config,consumers,deletions,restored}/{end:020d}-{digest}.json
    {prefix}/_floe/{chain}/{chain.json, floor.json, …}
    {prefix}/_floe/{chain}/state/{position:020d}-{digest}
    {prefix}/_floe/{chain}/gaps/{last:020d}-{first:020d}.json
    {prefix}/_floe/ingress/{target}/{positions.json, tails.json, clock, gaps/{chain}/…, starts/…}
    {prefix}/_floe/{tails/…, tombstones/…, ingress/{target}/…}
    {prefix}/_floe/tombstones/runs/{all, site={site}/all, site={site}/feed={feed}/all}.json
    {prefix}/_floe/quarantine/{digest}/{key}
    {prefix}/_floe/alive/{site}/{process}
    {prefix}/_floe/audit/{time}[/site={site}]/{digest}.json
    {prefix}/_floe/compare/{chain}/{copy}.json

The end of the coverage comes first in a segment's name, so a listing with `start_after(position)` returns
exactly the segments that reach the position. Parts that people name are percent-encoded by an allow-list.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from common.chain import SITE_PATTERN, Chain
from common.clock import NS_PER_S, format_time
from common.sequences import MAX_SEQUENCE, SequenceRange

MAX_LEVEL = 9
#: The kinds of captures, each a folder of its incarnation (`common.archive.captures`).
CAPTURES = ("config", "consumers", "deletions", "restored")
DIGEST_LENGTH = 16

_ENCODED = r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})+"
_INCARNATION = rf"site=(?P<site>{_ENCODED})/feed=(?P<feed>{_ENCODED})/incarnation=(?P<incarnation>[0-9]{{4}})"
_PARTITION = r"partition=(?P<partition>[0-9]{1,5})"
_CHAIN = f"{_INCARNATION}/{_PARTITION}"
_BOUNDS = r"(?P<last>[0-9]{20})-(?P<first>[0-9]{20})"
_DIGEST = rf"(?P<digest>[0-9a-f]{{{DIGEST_LENGTH}}})"
_LEVEL = re.compile(rf"{_CHAIN}/level=(?P<level>[0-9])")
_SEGMENT = re.compile(rf"{_BOUNDS}-{_DIGEST}\.parquet")
_CHAIN_DOCUMENT = re.compile(rf"_floe/{_CHAIN}/chain\.json")
_STATE = re.compile(rf"_floe/{_CHAIN}/state/(?P<position>[0-9]{{20}})-{_DIGEST}")
_CAPTURE = re.compile(rf"_floe/{_INCARNATION}/(?P<kind>{'|'.join(CAPTURES)})/(?P<end>[0-9]{{20}})-{_DIGEST}\.json")
_TOMBSTONE = re.compile(rf"_floe/tombstones/{_CHAIN}/{_BOUNDS}-{_DIGEST}\.json")
_CHAIN_OBJECT = re.compile(
    rf"_floe/{_INCARNATION}/(?:stream\.json|{_PARTITION}/(?:chain\.json|floor\.json|gaps/{_BOUNDS}\.json))"
)
_IN_CHAIN = re.compile(rf"(?:_floe/(?:compare/|tombstones/)?)?{_CHAIN}/.+", re.DOTALL)
# Objects under these prefixes have rules of their own.
_OTHER_OBJECTS = re.compile(
    rf"_floe/(?:(?:probe|ingress|alive|audit|quarantine|compare|site={_ENCODED}/feed={_ENCODED}/probe"
    "|tombstones/(?:reported|runs))/.+|tombstones/clock)",
    re.DOTALL,
)
_GAP = re.compile(rf"{_BOUNDS}\.json")
_TAIL = re.compile(
    rf"_floe/tails/(?P<site>{_ENCODED})/(?P<feed>{_ENCODED})/(?P<incarnation>[0-9]{{4}})/(?P<partition>[0-9]{{1,5}})"
)
_HEARTBEAT = re.compile(rf"_floe/alive/(?P<site>{_ENCODED})/(?P<process>{_ENCODED})")
_RUN = re.compile(rf"_floe/tombstones/runs/(?:site=(?P<site>{_ENCODED})/(?:feed=(?P<feed>{_ENCODED})/)?)?all\.json")
_POSITIONS = re.compile(rf"_floe/ingress/(?P<target>{_ENCODED})/positions\.json")


class SegmentName(NamedTuple):  # a listing may create a million: see SegmentRef
    """The parts of a segment's key. `digest`: the first 16 hex digits of the SHA-256 of its bytes."""

    chain: Chain
    level: int
    coverage: SequenceRange
    digest: str


class StateName(NamedTuple):
    """The parts of a snapshot's key. `position`: the first sequence that the snapshot does not include.

    `digest`: the first 16 hex digits of the SHA-256 of its bytes.
    """

    chain: Chain
    position: int
    digest: str


class CaptureName(NamedTuple):
    """The parts of a capture's key. `chain`: partition 0 of the incarnation. `kind`: one of CAPTURES. `end`: the
    sequence up to which the archive covered at the time of the capture, 0: nothing.

    `digest`: the first 16 hex digits of the SHA-256 of its bytes.
    """

    chain: Chain
    kind: str
    end: int
    digest: str


@functools.lru_cache(4096)
def encode(part: str) -> str:
    """Return `part` with every character except `A-Z a-z 0-9 _ -` as `%XX` of its UTF-8."""
    return "".join(
        chr(byte) if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "_-") else f"%{byte:02X}"
        for byte in part.encode()
    )


@functools.lru_cache(1 << 14)  # a listing of all heartbeats names each site once
def decode(part: str) -> str | None:
    """Return the text that `encode` wrote as `part`; None for any other `part`."""
    try:
        text = unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        return None
    return text if encode(text) == part else None


@dataclass(frozen=True, slots=True)
class Layout:
    """Every key under one `prefix`, which may be empty and has no slash at either end.

    `…_prefix`: the common beginning of the keys of those objects; ends in a slash, except that of all documents.
    `parse_…`: the reverse of the method that makes the key; None for any other key.
    """

    prefix: str = ""

    @property
    def root(self) -> str:
        return f"{self.prefix}/" if self.prefix else ""

    def _under(self, path: str) -> str:
        return self.root + path

    def _relative(self, key: str) -> str:
        """Return the key below the prefix; empty for a key that is not under it."""
        root = self.root
        return key[len(root) :] if key.startswith(root) else ""

    def chain_prefixes(self, chain: Chain) -> tuple[str, ...]:
        path = _chain_path(chain)
        folders = ("", "_floe/", "_floe/tombstones/")
        return tuple(self._under(f"{folder}{path}/") for folder in folders)

    def chain_of_key(self, key: str) -> Chain | None:
        """Return the chain that the path of the key names, also for a foreign key; None if it names none."""
        return _chain(_IN_CHAIN.fullmatch(self._relative(key)))

    # Ownership of keys

    def is_foreign(self, key: str) -> bool:
        """True if the key is not one of Floe's: a segment or document of another name, or junk.

        Empty objects that consoles create as folders end in a slash; they are not counted.
        """
        if key.endswith("/"):
            return False
        is_tombstone = _chain(_TOMBSTONE.fullmatch(self._relative(key))) is not None
        return self.parse_segment(key) is None and not self._is_document(key) and not is_tombstone

    def can_quarantine(self, key: str) -> bool:
        """True if an operator may quarantine the object: a segment, a tombstone or a foreign key, under the prefix."""
        return bool(self._relative(key)) and not self._is_document(key)

    def _is_document(self, key: str) -> bool:
        relative = self._relative(key)
        named = _CHAIN_OBJECT.fullmatch(relative)
        of_chain = _chain(named) or self.parse_state(key) or self.parse_tail(key) or self.parse_capture(key)
        return of_chain is not None or _OTHER_OBJECTS.fullmatch(relative) is not None

    # Segments

    def partition_prefix(self, chain: Chain) -> str:
        return self._under(f"{_chain_path(chain)}/")

    def segments_prefix(self, chain: Chain, level: int) -> str:
        return f"{self.partition_prefix(chain)}level={level}/"

    def segment(self, name: SegmentName) -> str:
        """Return the key of a segment. Raises ValueError if a part is outside its range."""
        if not 0 <= name.level <= MAX_LEVEL:
            raise ValueError(f"level {name.level}: expected 0 to {MAX_LEVEL}")
        _check_digest(name.digest)
        bounds = f"{name.coverage.last:020d}-{name.coverage.first:020d}"
        return f"{self.segments_prefix(name.chain, name.level)}{bounds}-{name.digest}.parquet"

    def parse_segment(self, key: str) -> SegmentName | None:
        folder, _, name = self._relative(key).rpartition("/")
        match, found = _SEGMENT.fullmatch(name), _chain_and_level(folder)
        if not match or not found:
            return None
        first, last = int(match["first"]), int(match["last"])
        if not 1 <= first <= last <= MAX_SEQUENCE:
            return None
        return SegmentName(*found, SequenceRange(first, last), match["digest"])

    def start_after(self, chain: Chain, level: int, position: int) -> str:
        """Return a key that sorts after all segments that end before `position` and before all others."""
        return f"{self.segments_prefix(chain, level)}{position:020d}"

    # Documents about a chain

    def documents_prefix(self, site: str | None = None, feed: str | None = None, incarnation: int | None = None) -> str:
        of_site = "" if site is None else f"{encode(site)}/"
        of_feed = "" if site is None or feed is None else f"feed={encode(feed)}/"
        of_incarnation = "" if not of_feed or incarnation is None else f"incarnation={incarnation:04d}/"
        return self._under(f"_floe/site={of_site}{of_feed}{of_incarnation}")

    def stream_document(self, chain: Chain) -> str:
        return self._under(f"_floe/{_incarnation_path(chain)}/stream.json")

    def incarnation_prefix(self, chain: Chain) -> str:
        """Return the prefix of the segments of all partitions of the chain's incarnation."""
        return self._under(f"{_incarnation_path(chain)}/")

    def chain_document(self, chain: Chain) -> str:
        return self._under(f"_floe/{_chain_path(chain)}/chain.json")

    def parse_chain_document(self, key: str) -> Chain | None:
        return _chain(_CHAIN_DOCUMENT.fullmatch(self._relative(key)))

    def floor_document(self, chain: Chain) -> str:
        return self._under(f"_floe/{_chain_path(chain)}/floor.json")

    # Accepted gaps

    def gaps_prefix(self, chain: Chain) -> str:
        return self._under(f"_floe/{_chain_path(chain)}/gaps/")

    def skipped_prefix(self, target: str, chain: Chain | None = None) -> str:
        """Return the prefix of the gaps that the target skipped of a chain; without one, of all chains."""
        return f"{self.ingress_prefix(target)}gaps/" + (f"{_chain_path(chain)}/" if chain else "")

    def gap(self, prefix: str, gap: SequenceRange) -> str:
        return f"{prefix}{gap.last:020d}-{gap.first:020d}.json"

    def gaps_after(self, prefix: str, position: int) -> str:
        return f"{prefix}{position:020d}"

    def parse_gap(self, prefix: str, key: str) -> SequenceRange | None:
        match = _GAP.fullmatch(key[len(prefix) :]) if key.startswith(prefix) else None
        first, last = (int(match["first"]), int(match["last"])) if match else (0, 0)
        return SequenceRange(first, last) if 1 <= first <= last <= MAX_SEQUENCE else None

    # Snapshots of samplers

    def states_prefix(self, chain: Chain) -> str:
        return self._under(f"_floe/{_chain_path(chain)}/state/")

    def state(self, name: StateName) -> str:
        """Return the key of a snapshot. Raises ValueError if a part is outside its range."""
        if not 1 <= name.position <= MAX_SEQUENCE:
            raise ValueError(f"position {name.position}: expected 1 to 2^63-1")
        _check_digest(name.digest)
        return f"{self.states_prefix(name.chain)}{name.position:020d}-{name.digest}"

    def parse_state(self, key: str) -> StateName | None:
        match = _STATE.fullmatch(self._relative(key))
        chain = _chain(match)
        if not match or not chain:
            return None
        position = int(match["position"])
        return StateName(chain, position, match["digest"]) if 1 <= position <= MAX_SEQUENCE else None

    # Captures of an incarnation

    def captures_prefix(self, chain: Chain, kind: str) -> str:
        return self._under(f"_floe/{_incarnation_path(chain)}/{kind}/")

    def capture(self, name: CaptureName) -> str:
        """Return the key of a capture. Raises ValueError if a part is outside its range."""
        if name.kind not in CAPTURES or not 0 <= name.end <= MAX_SEQUENCE:
            raise ValueError(f"capture {name.kind} at {name.end}: expected one of {CAPTURES}, at 0 to 2^63-1")
        _check_digest(name.digest)
        return f"{self.captures_prefix(name.chain, name.kind)}{name.end:020d}-{name.digest}.json"

    def parse_capture(self, key: str) -> CaptureName | None:
        match = _CAPTURE.fullmatch(self._relative(key))
        chain = match and _parse_chain(match["site"], match["feed"], match["incarnation"], "0")
        if not match or not chain or (end := int(match["end"])) > MAX_SEQUENCE:
            return None
        return CaptureName(chain, match["kind"], end, match["digest"])

    def skip_captures(self, key: str) -> str:
        """Return `key`; for a capture, a key that sorts after all captures of its incarnation that may be numerous, and
        before its partitions.
        """
        if (name := self.parse_capture(key)) is None:
            return key
        return max(key, f"{self.captures_prefix(name.chain, 'deletions').removesuffix('/')}0")

    # Tails and tombstones

    def tails_prefix(self, site: str | None = None) -> str:
        return self._under("_floe/tails/" + (f"{encode(site)}/" if site is not None else ""))

    def tail(self, chain: Chain) -> str:
        parts = f"{encode(chain.site)}/{encode(chain.feed)}/{chain.incarnation:04d}/{chain.partition}"
        return self.tails_prefix() + parts

    def parse_tail(self, key: str) -> Chain | None:
        return _chain(_TAIL.fullmatch(self._relative(key)))

    def heartbeats_prefix(self, site: str | None = None) -> str:
        return self._under("_floe/alive/" + (f"{encode(site)}/" if site is not None else ""))

    def heartbeat(self, site: str, process: str) -> str:
        return f"{self.heartbeats_prefix(site)}{encode(process)}"

    def parse_heartbeat(self, key: str) -> tuple[str, str] | None:
        """Return the site and the process."""
        match = _HEARTBEAT.fullmatch(self._relative(key))
        site, process = (decode(match["site"]), decode(match["process"])) if match else (None, None)
        if site is None or process is None or not SITE_PATTERN.fullmatch(site):
            return None
        return site, process

    def tombstones_prefix(self, chain: Chain) -> str:
        return self._under(f"_floe/tombstones/{_chain_path(chain)}/")

    def reported_prefix(self, chain: Chain | None = None) -> str:
        """Return the prefix of the problems that compaction has reported: of all chains, or of one."""
        path = "_floe/tombstones/reported/"
        return self._under(f"{path}{_chain_path(chain)}/" if chain else path)

    def clock(self) -> str:
        return self._under("_floe/tombstones/clock")

    def runs_prefix(self) -> str:
        return self._under("_floe/tombstones/runs/")

    def run(self, site: str | None, feed: str | None) -> str:
        """Return the key of a compaction run: of all sites, of one, or of one feed of it."""
        of_site = "" if site is None else f"site={encode(site)}/"
        of_feed = "" if site is None or feed is None else f"feed={encode(feed)}/"
        return f"{self.runs_prefix()}{of_site}{of_feed}all.json"

    def parse_run(self, key: str) -> tuple[str | None, str | None] | None:
        """Return the site and the feed, each None for all."""
        if (match := _RUN.fullmatch(self._relative(key))) is None:
            return None
        site, feed = (None if part is None else decode(part) for part in match.group("site", "feed"))
        return (site, feed) if self.run(site, feed) == key else None

    def audit_prefix(self, at_ns: int | None = None) -> str:
        """Return the prefix of the audit records; with a time (ns since 1970) of those of its millisecond. It sorts
        before all later ones.
        """
        if at_ns is None:
            return self._under("_floe/audit/")
        whole = format_time(at_ns - at_ns % NS_PER_S).removesuffix("Z").replace("-", "").replace(":", "")
        return f"{self.audit_prefix()}{whole}{at_ns % NS_PER_S // 1_000_000:03d}Z"

    def audit_record(self, at_ns: int, site: str, digest: str) -> str:
        """Return the key of a record of this site, empty for none: a credential may be limited to a site's records."""
        of_site = f"site={encode(site)}/" if site else ""
        return f"{self.audit_prefix(at_ns)}/{of_site}{digest[:DIGEST_LENGTH]}.json"

    def compared(self, chain: Chain, copy: str) -> str:
        return self._under(f"_floe/compare/{_chain_path(chain)}/{encode(copy)}.json")

    def quarantine_key(self, key: str, digest: str) -> str:
        """Return the key in quarantine of the object at `key` with this SHA-256.

        Raises ValueError for a key that is not under the prefix.
        """
        if not (relative := self._relative(key)):
            raise ValueError(f"expected a key under {self.root}, found {key}")
        return f"{self.quarantine_prefix()}{digest[:DIGEST_LENGTH]}/{relative}"

    def quarantine_prefix(self) -> str:
        return self._under("_floe/quarantine/")

    def ingress_prefix(self, target: str) -> str:
        return self._under(f"_floe/ingress/{encode(target)}/")

    def ingress_positions(self, target: str) -> str:
        return f"{self.ingress_prefix(target)}positions.json"

    def ingress_tails(self, target: str) -> str:
        return f"{self.ingress_prefix(target)}tails.json"

    def ingress_targets_prefix(self) -> str:
        return self._under("_floe/ingress/")

    def parse_ingress_positions(self, key: str) -> str | None:
        match = _POSITIONS.fullmatch(self._relative(key))
        return decode(match["target"]) if match else None

    def ingress_clock(self, target: str) -> str:
        return f"{self.ingress_prefix(target)}clock"

    def start_document(self, target: str, site: str, feed: str) -> str:
        return f"{self.ingress_prefix(target)}starts/site={encode(site)}/feed={encode(feed)}/start.json"


def digest_of(content: bytes) -> str:
    """Return the digest of an object's content that its name holds: the first 16 hex digits of the SHA-256."""
    return hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]


def _check_digest(digest: str) -> None:
    if not re.fullmatch(_DIGEST, digest):
        raise ValueError(f"digest {digest!r}: expected {DIGEST_LENGTH} hex digits")


def _incarnation_path(chain: Chain) -> str:
    return f"site={encode(chain.site)}/feed={encode(chain.feed)}/incarnation={chain.incarnation:04d}"


def _chain_path(chain: Chain) -> str:
    return f"{_incarnation_path(chain)}/partition={chain.partition}"


def _chain(match: re.Match[str] | None) -> Chain | None:
    return match and _parse_chain(match["site"], match["feed"], match["incarnation"], match["partition"] or "0")


@functools.lru_cache(4096)  # a listing repeats one folder a thousand times
def _chain_and_level(folder: str) -> tuple[Chain, int] | None:
    match = _LEVEL.fullmatch(folder)
    chain = _chain(match)
    return (chain, int(match["level"])) if match and chain else None


@functools.lru_cache(1 << 16)  # a listing of all tails names each chain once
def _parse_chain(encoded_site: str, encoded_feed: str, incarnation: str, partition: str) -> Chain | None:
    site, feed = decode(encoded_site), decode(encoded_feed)
    if site is None or feed is None or str(int(partition)) != partition:
        return None
    try:
        return Chain(site, feed, int(incarnation), int(partition))
    except ValueError:
        return None
