"""Mistakes on ordinary stores and servers: a busy store, one without conditions, small requests, a bucket set back."""

from __future__ import annotations

import re
from typing import Any

import common.jetstream.protocol
import common.objects.s3_errors
import common.segments.documents
import common.segments.store
from common.errors import ConfigError
from common.jetstream.api import ConsumerInfo
from common.objects.s3_errors import LATER, Meaning
from egress.archive import ArchiveWalks
from tests.sim.mutants.registry import change, mutant


@mutant
def busy_taken_for_a_mistake() -> None:
    """A store that asks to come back later counts as one that is configured wrongly, but for the names of S3."""

    def meaning(meaning_of: Any) -> Any:
        def strict(code: str, status: int, message: str = "") -> Meaning:
            found: Meaning = meaning_of(code, status, message)
            return Meaning(ConfigError, "check store.url") if found is LATER and status < 500 else found

        return strict

    change(common.objects.s3_errors, "meaning_of", meaning)


@mutant
def conditions_taken_for_granted() -> None:
    """Whatever is put needs a store that takes conditions."""

    class NoSuchRefusal(Exception):
        """Nobody raises it."""

    for module in (common.segments.store, common.segments.documents):
        change(module, "ConditionsRefused", lambda _: NoSuchRefusal)


@mutant
def size_of_requests_never_learnt() -> None:
    """A server that takes small requests only is asked for as much as ever."""
    change(common.jetstream.protocol, "_BATCH", lambda _: re.compile("never"))
    change(ConsumerInfo, "max_batch", lambda _: 0)


@mutant
def archive_never_looked_at_again() -> None:
    """Nobody looks whether what was put is there."""

    async def nothing(_self: ArchiveWalks) -> None: ...

    change(ArchiveWalks, "run", lambda _: nothing)
