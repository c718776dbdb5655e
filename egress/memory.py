"""Budget of bytes for a process: everything between the wire and the object store counts against it."""

from __future__ import annotations

from collections.abc import Callable

# Pull requests of each chain that fit into the budget at once; requested bytes are charged only when they arrive.
WINDOWS_PER_CHAIN = 8
MAX_WINDOW_BYTES = 16 * 2**20  # bytes


class MemoryBudget:
    """Budget of about `limit` bytes over `chains` accounts. Nothing waits here: readers check it first."""

    def __init__(self, limit: int, chains: int = 1) -> None:
        self.limit, self._chains = limit, max(1, chains)
        self.accounts: list[MemoryAccount] = []

    @property
    def used(self) -> int:
        return sum(account.used for account in self.accounts)

    @property
    def window_bytes(self) -> int:
        return min(MAX_WINDOW_BYTES, self.limit // (WINDOWS_PER_CHAIN * self._chains))

    def has_room(self, size: int) -> bool:
        """True if `size` more bytes fit. Into an empty budget any size does: a large message must pass."""
        used = self.used
        return used == 0 or used + size <= self.limit

    def account(self, on_release: Callable[[], None]) -> MemoryAccount:
        """Return a new account. `on_release` is called whenever any account releases bytes."""
        account = MemoryAccount(self, on_release)
        self.accounts.append(account)
        return account

    def notify_release(self) -> None:
        for account in list(self.accounts):
            account.on_release()


class MemoryAccount:
    """Memory that one chain holds."""

    def __init__(self, budget: MemoryBudget, on_release: Callable[[], None]) -> None:
        self.on_release, self.used, self._budget = on_release, 0, budget

    def charge(self, size: int) -> None:
        self.used += size

    def release(self, size: int) -> None:
        self.used -= size
        self._budget.notify_release()

    def is_largest(self) -> bool:
        return self.used == max(each.used for each in self._budget.accounts)

    def close(self) -> None:
        self._budget.accounts.remove(self)
        self._budget.notify_release()
