"""The commands that hints about a target's state end in."""

from __future__ import annotations

import shlex

from common.service.pasting import command


def set_command(target: str, *options: str) -> str:
    """`floe checkpoint set -c FILE --target STREAM …`, to paste; on a terminal it shows, and asks."""
    return command("checkpoint set", f"--target {shlex.quote(target)}", *options)
