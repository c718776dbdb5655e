"""Commands to paste that errors and views print: for each `floe` command, its words and the quoting of its values.

Those about the segments of a chain and its gaps are in `common/archive/`, those that repeat a replay or a restore
beside their requests; all are built by `floe_command`.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path

from common.chain import Chain
from common.exits import floe_command


def name_argument(site: str, feed: str, incarnation: int | None = None, partition: int | None = None) -> str:
    """Return the argument that names a feed, an incarnation or a chain, as far as the parts are given."""
    numbers = ["" if incarnation is None else f"/{incarnation:04d}", "" if partition is None else f"/{partition}"]
    return shlex.quote("".join([f"{site}/{feed}", *numbers]))


def option_words(given: Mapping[str, object]) -> list[str]:
    """Return options by their names, with quoted values: True gives an option alone, a list one for each of its values,
    any other value that is not true none.
    """
    words = list[str]()
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value:
            words += [f"{option} {shlex.quote(str(each))}" for each in (value if isinstance(value, list) else [value])]
    return words


# Stops of a feed


def resolve_command(feed: str | Chain, options: str = "") -> str:
    """Return the command that resolves a stop of a feed, or of one chain of it."""
    named = shlex.quote(str(feed))
    return floe_command("egress resolve", *((options, "--", named) if named.startswith("-") else (named, options)))


def believe_command(chain: Chain) -> str:
    return resolve_command(chain if chain.partition else chain.feed, "--believe-listing")


def repartition_command(feed: str) -> str:
    return floe_command("egress repartition", shlex.quote(feed))


def restore_command(chain: Chain, *, elsewhere: bool = False) -> str:
    """Return the command that restores the stream. `elsewhere`: with effects outside of its own subjects."""
    return floe_command("restore", name_argument(chain.site, chain.feed), "--allow-elsewhere" if elsewhere else "")


def import_command(folder: Path | str, feed: Chain) -> str:
    """Return the command that imports a backup into a feed, or continues."""
    return floe_command("import", shlex.quote(str(folder)), name_argument(feed.site, feed.feed))


# The archive


def list_command(chain: Chain) -> str:
    return floe_command("segments ls", shlex.quote(str(chain)))


def verify_command(named: str) -> str:
    """Return the command that verifies what `named` names: a site, a feed, an incarnation or a chain."""
    return floe_command("segments verify", shlex.quote(named))


# Stops of a target and of its chains


def checkpoint_command(target: str, *options: str) -> str:
    return floe_command("checkpoint set", f"--target {shlex.quote(target)}", *options)


def position_command(target: str, chain: Chain, sequence: int) -> str:
    """Return the command that continues `chain` at `sequence`."""
    return checkpoint_command(target, shlex.quote(str(chain)), f"--sequence {sequence}")


def resume_command(target: str, chain: Chain | None) -> str:
    """Return the command that resumes `chain`; None: all chains of the target."""
    named = "--all" if chain is None else shlex.quote(str(chain))
    return floe_command("chain resume", f"--target {shlex.quote(target)}", named)


def parked_command(target: str) -> str:
    return floe_command("parked ls", f"--target {shlex.quote(target)}")
