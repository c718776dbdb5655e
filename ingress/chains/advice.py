"""Commands that an operator pastes about one chain."""

from __future__ import annotations

import shlex

from common.chain import Chain
from common.sequences import SequenceRange
from common.service.pasting import command
from ingress.checkpoints.commands import set_command


def of_chain(chain: Chain) -> str:
    """The options that name a chain; incarnation and partition only where they are not the first."""
    words = ["--site", chain.site, "--feed", shlex.quote(chain.feed)]
    words += ["--incarnation", str(chain.incarnation)] if chain.incarnation else []
    words += ["--partition", str(chain.partition)] if chain.partition else []
    return " ".join(words)


def accept(chain: Chain, hole: SequenceRange) -> str:
    """Give up a hole, for all targets."""
    return command("gap accept", of_chain(chain), f"--first {hole.first} --last {hole.last} --yes")


def resume(target: str, chain: Chain) -> str:
    """Carry a paused chain again, or look again at one that has stopped."""
    return command("chain resume", f"--target {shlex.quote(target)}", of_chain(chain))


def set_position(target: str, chain: Chain, sequence: int) -> str:
    """Make a chain go on at `sequence`."""
    return set_command(target, of_chain(chain), f"--sequence {sequence} --yes")
