"""Budget of bytes for a process: everything between the wire and the object store counts against it."""

from __future__ import annotations

from collections.abc import Callable

# Pull requests of each chain that fit into the budget at once; requested bytes are charged only when they arrive.
WINDOWS_PER_CHAIN = 8
MAX_WINDOW_BYTES = 16 * 2**20  # bytes


class MemoryBudget:
    """Budget of about `limit` bytes over `chains` accounts, `used` in all. Nothing waits here: readers check it first.

    Accounts that found no room are notified of the next release. While there are such accounts, or too much is used,
    the largest account learns of each change: only it may make room.
    """

    def __init__(self, limit: int, chains: int = 1) -> None:
        self.limit, self.chains, self.used = limit, chains, 0
        self.accounts: dict[MemoryAccount, None] = {}  # a lookup for each charge, among hundreds
        self._short: dict[MemoryAccount, None] = {}  # accounts that found no room since the last release

    @property
    def window_bytes(self) -> int:
        return min(MAX_WINDOW_BYTES, self.limit // (WINDOWS_PER_CHAIN * max(1, self.chains)))

    def has_room(self, size: int) -> bool:
        """True if `size` more bytes fit. Into an empty budget any size does: a large message must pass."""
        return self.used == 0 or self.used + size <= self.limit

    def account(self, on_release: Callable[[], None], on_short: Callable[[], None] = lambda: None) -> MemoryAccount:
        """Return a new account. `on_release` is called when it releases bytes, and when another account does after
        this one found no room; `on_short` when an account found no room while this is the largest.
        """
        account = MemoryAccount(self, on_release, on_short)
        self.accounts[account] = None
        return account

    def record_short(self, account: MemoryAccount) -> None:
        if account not in self._short:
            self._short[account] = None
            self._wake_largest()

    def change(self, size: int) -> None:
        """Count `size` more bytes, or less."""
        self.used += size
        if size > 0 and (self._short or self.used > self.limit):
            self._wake_largest()

    def _wake_largest(self) -> None:
        max(self.accounts, key=lambda each: each.used).on_short()

    def remove(self, account: MemoryAccount) -> None:
        del self.accounts[account]
        self._short.pop(account, None)
        self.used = sum(each.used for each in self.accounts)
        self.notify_release()

    def notify_release(self, *accounts: MemoryAccount) -> None:
        """Notify `accounts`, and those that found no room since the last release."""
        short, self._short = self._short, {}
        for each in {**dict.fromkeys(accounts), **short}:
            each.on_release()
        if self.accounts and self.used > self.limit:
            self._wake_largest()


class MemoryAccount:
    """Memory that one chain holds."""

    def __init__(self, budget: MemoryBudget, on_release: Callable[[], None], on_short: Callable[[], None]) -> None:
        self.on_release, self.on_short, self.used, self._budget = on_release, on_short, 0, budget

    def has_room(self, size: int) -> bool:
        """True if `size` more bytes fit into the budget. If not, `on_release` is called once more might fit."""
        if not (fits := self._budget.has_room(size)):
            self._budget.record_short(self)
        return fits

    def charge(self, size: int) -> None:
        self.used += size
        if self in self._budget.accounts:  # not once it is closed
            self._budget.change(size)

    def release(self, size: int) -> None:
        self.charge(-size)
        self._budget.notify_release(self)

    def is_largest(self) -> bool:
        return self.used == max(each.used for each in self._budget.accounts)

    def close(self) -> None:
        self._budget.remove(self)
