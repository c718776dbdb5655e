"""Mistakes on ordinary stores and servers: a busy store, one without conditions, small requests, a bucket set back."""

import re
from typing import Any

import common.archive.documents
import common.nats.protocol
import common.objects.s3_errors
from common.errors import ConfigError
from common.nats.api import ConsumerInfo
from common.objects.s3_errors import RETRY_LATER, Meaning
from egress.archive import ArchiveWalks
from tests.sim.mutants.registry import change, changing, mutant


@mutant
def busy_taken_for_a_mistake() -> None:
    """A store that answers "later" counts as misconfigured, except under the error names of S3."""

    @changing(common.objects.s3_errors, "error_meaning")
    def strict(meaning_of: Any, code: str, status: int, message: str = "") -> Meaning:
        found: Meaning = meaning_of(code, status, message)
        return Meaning(ConfigError, "check store.url") if found is RETRY_LATER and status < 500 else found


@mutant
def conditions_taken_for_granted() -> None:
    """Every put needs a store that takes conditions."""

    class NoSuchRefusal(Exception):
        """An error that nobody raises."""

    change(common.archive.documents, "ConditionalPutRefused", lambda _: NoSuchRefusal)


@mutant
def size_of_requests_never_learnt() -> None:
    """A server that takes small requests only gets requests of the usual size for ever."""
    change(common.nats.protocol, "_BATCH_EXCEEDED", lambda _: re.compile("never"))
    change(ConsumerInfo, "max_batch", lambda _: 0)


@mutant
def archive_never_looked_at_again() -> None:
    """No check that archived segments still exist."""

    async def nothing(_self: ArchiveWalks) -> None: ...

    change(ArchiveWalks, "run", lambda _: nothing)
