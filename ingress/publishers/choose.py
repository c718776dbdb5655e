"""Choice of the publisher for a target, with the reasons against the better ones."""

from collections.abc import Mapping
from typing import Any

from common.errors import ConfigError
from common.exits import choices
from ingress.publishers.atomic import AtomicPublisher
from ingress.publishers.fast import FastPublisher
from ingress.publishers.publisher import SinglePublisher

Version = tuple[int, int, int]

FAST_SINCE: Version = (2, 14, 0)
ATOMIC_SINCE: Version = (2, 12, 0)
# Headers that an atomic batch accepts at some places only; in a fast batch each message is independent.
NOT_IN_ATOMIC = frozenset({b"nats-rollup"})
STREAM_EDIT_FLAGS = {"fast": "--allow-fast", "atomic": "--allow-batch"}  # options of the command `nats stream edit`


def objections(
    version: Version, config: Mapping[str, Any], control_headers: frozenset[bytes], *, exclusive: bool = True
) -> dict[str, str]:
    """Return the reason against each publisher, by name, the best first; an empty text if there is none.

    `config`: as the server echoes it: an older server silently drops settings it does not know, and would store the
    messages of a batch one by one. `exclusive`: no other publisher writes to the stream.
    """
    taking_effect = sorted(name.decode() for name in control_headers & NOT_IN_ATOMIC)
    fast = _against_server(version, FAST_SINCE, config, "allow_batched")
    atomic = _against_server(version, ATOMIC_SINCE, config, "allow_atomic")
    return {
        "fast": fast or ("" if exclusive else "exclusive is false, and a foreign message ends a whole batch"),
        "atomic": atomic or (f"{taking_effect[0]} is among control_headers" if taking_effect else ""),
        "single": "",
    }


def _against_server(version: Version, since: Version, config: Mapping[str, Any], key: str) -> str:
    if version < since:
        return f"nats-server {'.'.join(map(str, version))} is older than {since[0]}.{since[1]}"
    return "" if config.get(key) is True else f"the stream has {key} false"


def choose_publisher(target: str, setting: str, against: Mapping[str, str]) -> str:
    """Return the publisher for `setting` (`auto` or a name). Raises ConfigError if it is not offered."""
    if setting == "auto":
        return next(name for name, reason in against.items() if not reason)
    if against[setting]:
        message = f"target {target}: publisher: expected a supported one, found {setting}: {against[setting]}"
        edit = ("or, if only the stream lacks it", f"nats stream edit {target} {STREAM_EDIT_FLAGS[setting]}")
        raise ConfigError(message, hint=choices("set `publisher: auto`", edit), code="E-PUBLISHER")
    return setting


PUBLISHERS: Mapping[str, type[FastPublisher | AtomicPublisher | SinglePublisher]] = {
    each.name: each for each in (FastPublisher, AtomicPublisher, SinglePublisher)
}
