"""Commands to paste that need nothing but a chain."""

from __future__ import annotations

from common.chain import Chain


def resolve(feed: str, options: str = "", partition: int | None = None) -> str:
    """`floe egress resolve` for a feed, or for one partition of it."""
    named = "" if partition is None else f" --partition {partition}"
    return f"floe egress resolve -c site.yaml {feed}{named} {options}".strip()


def believe_listing(chain: Chain) -> str:
    """Have the listing of the chain believed as it is."""
    return resolve(chain.feed, "--believe-listing", chain.partition or None)
