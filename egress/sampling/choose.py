"""Which snapshots are worth reading, and in which order: pure, from what a listing shows.

A snapshot at position p holds what is folded of the sequences below p. It can be *followed* where the source
still holds everything from p on: up to where reading goes on it is folded again, and what comes behind shows
who is silent. It can be *built upon* wherever it stands at or below the place where reading goes on.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.segments.snapshots import SnapshotRef, newest_first


def to_follow(refs: Iterable[SnapshotRef], place_first: int, source_first: int) -> list[SnapshotRef]:
    """The snapshots from which reading can go on at `place_first` as if it had never stopped; newest first.

    `source_first`: the first sequence that the source holds.
    """
    return [ref for ref in to_build_upon(refs, place_first) if ref.position >= source_first]


def to_build_upon(refs: Iterable[SnapshotRef], place_first: int) -> list[SnapshotRef]:
    """The snapshots that say something of what was before `place_first` and nothing of the rest; newest
    first.
    """
    return sorted((ref for ref in refs if ref.position <= place_first), key=newest_first)


def may_be_of(label: str, digest: str) -> bool:
    """Whether an object with `label` can be a snapshot of the settings `digest`; a label may be lost."""
    return label in ("", digest)


def reason(is_known: bool, is_followed: bool, written_by: str, digest: str) -> str:
    """Why there was nothing to go on from: `settings`, `damaged` or `source`.

    `is_known`, `is_followed`: whether any snapshot says it is of the settings `digest`, and whether the
    source still follows one of those. `written_by`: the digest of the settings of the newest segment.
    """
    if is_known:
        return "damaged" if is_followed else "source"
    return "damaged" if written_by == digest else "settings"
