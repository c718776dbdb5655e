"""Commands to paste about one chain or one target, and what to do about a hole."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from common.chain import Chain
from common.segments.documents import of_chain, way_out, way_out_filled
from common.segments.quarantine import quarantine_command
from common.sequences import SequenceRange
from common.service.exits import command


def set_command(target: str, *options: str) -> str:
    """`floe checkpoint set -c FILE --target STREAM …`, to paste; on a terminal it shows, and asks."""
    return command("checkpoint set", f"--target {shlex.quote(target)}", *options)


__all__ = ["resume", "set_position", "way_out", "way_out_filled", "way_out_of"]

SHOWN = 5  # damaged segments


def way_out_of(chain: Chain, hole: SequenceRange, damaged: Sequence[str]) -> str:
    """What to do about a hole; first about segments that would cover it and are `damaged`: their keys."""
    if not damaged:
        return way_out(chain, hole)
    away = "\n".join(map(quarantine_command, damaged[:SHOWN]))
    text = "put a good copy of the damaged segment back; or put it away, so that egress may archive it again:"
    return f"{text}\n{away}\n{way_out(chain, hole)}"


def resume(target: str, chain: Chain) -> str:
    """Carry a paused chain again, or look again at one that has stopped."""
    return command("chain resume", f"--target {shlex.quote(target)}", of_chain(chain))


def set_position(target: str, chain: Chain, sequence: int) -> str:
    """Make a chain go on at `sequence`."""
    return set_command(target, of_chain(chain), f"--sequence {sequence} --yes")
