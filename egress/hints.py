"""Commands to paste that need nothing but a chain."""

from __future__ import annotations

import shlex

from common.chain import Chain
from common.service.exits import command
from egress.partition import Partition


def resolve(feed: str, options: str = "", partition: int | None = None) -> str:
    """`floe egress resolve` for a feed, or for one partition of it."""
    named = "" if partition is None else f"--partition {partition}"
    return command("egress resolve", shlex.quote(feed), named, options)


def repartition(feed: str) -> str:
    """Cut a feed as it is configured now."""
    return command("egress repartition", "--feed", shlex.quote(feed))


def bring_back(partition: Partition, chain: Chain, *, continues: bool) -> str:
    """Make the stream again with what the archive holds of it: of its incarnation, or of all where that goes
    on with the history of the one before.
    """
    words = ["--site", partition.site, "--feed", shlex.quote(chain.feed)]
    words += ["--incarnation", str(chain.incarnation)] if chain.incarnation and not continues else []
    return command("replay", *words, "--target", shlex.quote(partition.stream), "--into-source --create")


def believe_listing(chain: Chain) -> str:
    """Have the listing of the chain believed as it is."""
    return resolve(chain.feed, "--believe-listing", chain.partition or None)
