"""The whole header block of a copy, as ingress stores it."""

from common.nats.headers import CRLF, VERSION_LINE, Provenance, escape_lines


def escape(
    block: bytes | None,
    provenance: Provenance,
    control_headers: frozenset[bytes] = frozenset(),
    first_lines: tuple[bytes, ...] = (),
    *,
    relay: bool = False,
) -> bytes:
    """Return the block under which a message with the block `block` (None: without headers) is stored in a target.

    `first_lines`: Floe's own, without CR LF, such as `Nats-Expected-Last-Sequence: 5`. The others as of
    `escape_lines`.
    """
    own = b"".join([line + CRLF for line in first_lines]) + provenance.line() + CRLF
    return VERSION_LINE + own + escape_lines(block, control_headers, relay=relay) + CRLF
