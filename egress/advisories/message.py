"""An advisory as the message that is published."""

from __future__ import annotations

from dataclasses import dataclass

from common.jetstream.headers import build_block
from common.jetstream.protocol import frame
from egress.advisories.advisory import Writer
from egress.advisories.event import Advisory
from egress.advisories.subject import subject_of


@dataclass(frozen=True, slots=True)
class Message:
    """One message on the wire; `headers` carry its id, by which the stream knows it again."""

    subject: bytes
    payload: bytes
    headers: bytes

    def checked(self, max_payload: int) -> Message:
        """Itself. Raises ValueError where the server would not take it, and end the connection."""
        size = len(self.headers) + len(self.payload)
        if size > max_payload:
            raise ValueError(f"expected at most {max_payload} bytes, found {size}")
        return self

    def frame(self) -> bytes:
        """The bytes that publish it without an answer. Raises ValueError for what the wire cannot carry."""
        return frame(self.subject, self.payload, self.headers)


@dataclass(frozen=True, slots=True)
class Letters:
    """Makes messages for the subjects of `template`."""

    template: str
    writer: Writer

    def message(self, advisory: Advisory) -> Message:
        """The same for the same advisory."""
        document = self.writer.document(advisory)
        block = build_block([b"Nats-Msg-Id: " + document.event_id.encode()])
        return Message(subject_of(self.template, advisory).encode(), document.to_json(), block)
