"""Mistakes of egress with the streams of an account."""

from typing import Any

import egress.account_watch
from egress.account import AccountListing
from tests.sim.mutants.registry import changing, mutant


@mutant
def account_listed_only_once() -> None:
    """Streams that are made later are never found."""

    @changing(AccountListing, "read")
    async def first_answer(read: Any, self: AccountListing, *given: Any) -> Any:
        if not hasattr(self, "first"):
            vars(self)["first"] = await read(self, *given)
        return vars(self)["first"]


@mutant
def unread_sequences_not_counted() -> None:
    """A deleted stream is named as archived to its end."""

    @changing(egress.account_watch, "unarchived")
    def nothing(_unarchived: Any, *_: Any) -> int:
        return 0
