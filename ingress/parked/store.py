"""The parked messages of a target in the object store: blocking, safe to call from several threads.

Ingress may put and read under `_floe/ingress/{target}/` and deletes nothing; an operator who asks for a
message writes there with credentials of their own.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from common.chain import Chain
from common.errors import OutcomeUnknown, Unavailable
from common.failpoints import failpoint
from common.objects.checksums import ChecksumMismatch
from common.objects.port import ObjectStore
from common.segments.keys import Layout
from common.segments.segment import Message
from common.service.logs import get_logger
from ingress import metrics
from ingress.checkpoint import ParkedAs
from ingress.parked.message import from_bytes, to_bytes
from ingress.parked.names import Entry, ParkedKeys, ParkedName
from ingress.rows.refusals import Oversize

log = get_logger("ingress.parked.store")

ROUNDS = 3  # of putting and reading back


@dataclass(frozen=True, slots=True)
class Parked:
    """A message as it was put aside, and why."""

    message: Message
    why: str


class ParkedStore:
    """What was put aside for `target`, kept as the state says now. Every method raises what the store raises.

    `kept_as` is set anew whenever another state is adopted.
    """

    def __init__(self, objects: ObjectStore, layout: Layout, target: str, kept_as: ParkedAs | str) -> None:
        self.target = target
        self.kept_as = ParkedAs(kept_as) if isinstance(kept_as, str) else kept_as
        self.keys = ParkedKeys(layout, target)
        self._objects = objects

    # Putting aside

    def park(self, chain: Chain, oversize: Oversize) -> None:
        """Return once the message is durable and read back; the same one may be put again and again."""
        message = oversize.message
        key, body = self.keys.message(self.name(chain, message.sequence)), to_bytes(chain, message)
        if self._objects.get(key) == body:
            return
        failpoint("ingress.before_park")
        self._keep(key, body, {"why": oversize.why})
        failpoint("ingress.after_park")
        labels = (self.target, chain.site, chain.feed, str(chain.partition))
        metrics.parked_messages.labels(*labels).inc()
        log.warning(
            "message parked",
            action="parked",
            target=self.target,
            sequence=message.sequence,
            why=oversize.why,
            **chain.log_context(),
        )

    def name(self, chain: Chain, sequence: int) -> ParkedName:
        """The message with this sequence, for the target of now."""
        return ParkedName(chain, sequence, self.kept_as.of(chain, sequence))

    # Marks

    def mark_left_out(self, name: ParkedName) -> None:
        """The intent whose piece leaves the message out is complete and may be closed."""
        self._keep(self.keys.left_out(name), b"{}")

    def mark_delivered(self, name: ParkedName) -> None:
        """The intent that holds the message is stored and may be closed."""
        self._keep(self.keys.delivered(name), b"{}")

    def answer(self, entry: Entry, why: str) -> None:
        """The request of `entry` was looked at: the message stays parked, and why."""
        body = json.dumps({"why": why}).encode()
        self._objects.put(self.keys.answered(entry.name, entry.asked), body)

    def ask(self, *entries: Entry) -> None:
        """Ask the service to try these again, once more than before."""
        for entry in entries:
            self._keep(self.keys.asked(entry.name, entry.answered + 1), b"{}")
        # Behind the requests: whoever sees it sees them.
        self._objects.put(self.keys.rung, secrets.token_hex(16).encode())

    def rung(self) -> str:
        """Another text whenever something was asked for; empty if nothing ever was."""
        info = self._objects.head(self.keys.rung)
        return "" if info is None else info.etag

    def may_be_delivered(self, name: ParkedName) -> bool:
        """Whether its chain has passed without the message, and it was not delivered since.

        Both marks are written before the state moves, so what this says holds for the state that was loaded
        before it was called.
        """
        head = self._objects.head
        return head(self.keys.left_out(name)) is not None and head(self.keys.delivered(name)) is None

    # Reading

    def entries(self, *, all_targets: bool = False) -> dict[ParkedName, Entry]:
        """Everything that was put aside and counts now, or all that was for streams of the target's name."""
        if all_targets:
            return self.keys.entries(self._objects.list(self.keys.prefix))
        found: dict[ParkedName, Entry] = {}
        for name in self.kept_as.names():
            found |= self.keys.entries(self._objects.list(self.keys.created_prefix(name)))
        return {name: found[name] for name in sorted(found) if name == self.name(name.chain, name.sequence)}

    def entry(self, name: ParkedName) -> Entry:
        """What there is of one message now, by one short listing."""
        return self.keys.entries(self._objects.list(self.keys.folder(name))).get(name, Entry(name))

    def read(self, name: ParkedName) -> Message | None:
        """The message; None if it is not there. Raises DataError (E-PARKED) where it is spoiled."""
        key = self.keys.message(name)
        raw = self._objects.get(key)
        return None if raw is None else from_bytes(key, raw, name.chain, name.sequence)

    def why(self, entry: Entry) -> str:
        """Why it is parked: the last answer, else what was said when it was put aside."""
        if entry.answered:
            return _why(self._objects.get(self.keys.answered(entry.name, entry.answered)))
        info = self._objects.head(self.keys.message(entry.name))
        return "" if info is None else info.metadata.get("why", "")

    def _keep(self, key: str, body: bytes, metadata: Mapping[str, str] | None = None) -> None:
        """Return once the store gives `body` back. Raises Unavailable where it never does."""
        sha256 = hashlib.sha256(body).hexdigest()
        for _ in range(ROUNDS):
            try:
                self._objects.put(key, body, sha256=sha256, metadata=metadata)
            except (OutcomeUnknown, ChecksumMismatch) as error:
                log.warning("put in doubt", action="put_in_doubt", key=key, error=str(error))
            if self._objects.get(key) == body:
                return
        raise Unavailable(f"{key}: put {ROUNDS} times and never read back as it was sent", code="E-READ-BACK")


def _why(raw: bytes | None) -> str:
    try:
        return str(json.loads(raw or b"{}").get("why", ""))
    except (ValueError, AttributeError):
        return ""
