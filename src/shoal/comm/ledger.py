"""What crossed between ranks: a count and a number of bytes per axis and operation.

A plan's traffic can be worked out beforehand, so a redundant or a missing collective is a difference between two numbers, found
without looking at a single gradient.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Calls of one operation along one axis, and the bytes that they handled together."""

    calls: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(calls=self.calls + other.calls, num_bytes=self.num_bytes + other.num_bytes)


Account = dict[tuple[str, str], Traffic]
"""Traffic by (axis, operation), such as ``("tp", "all_reduce")``."""


def add_accounts(*accounts: Mapping[tuple[str, str], Traffic]) -> Account:
    """All of them together."""
    total: Account = {}
    for account in accounts:
        for key, traffic in account.items():
            total[key] = total.get(key, Traffic()) + traffic
    return total


def plain_account(account: Mapping[tuple[str, str], Traffic]) -> Account:
    """The account with plain words for its keys, in their order."""
    return {(str(axis), str(operation)): traffic for (axis, operation), traffic in sorted(account.items())}


def account_rows(account: Mapping[tuple[str, str], Traffic]) -> dict[str, list[int]]:
    """An account as JSON: ``"tp sum": [calls, bytes]``."""
    return {
        f"{axis} {operation}": [traffic.calls, traffic.num_bytes]
        for (axis, operation), traffic in plain_account(account).items()
    }


@dataclass
class Ledger:
    """Adds up the traffic of one rank; free of cost while it is closed."""

    is_open: bool = False
    account: Account = field(default_factory=dict)

    def note(self, axis: str, operation: str, num_bytes: int) -> None:
        """Enter one call."""
        if self.is_open:
            key = (axis, operation)
            self.account[key] = self.account.get(key, Traffic()) + Traffic(calls=1, num_bytes=num_bytes)

    @contextmanager
    def counting(self) -> Iterator[Account]:
        """Count from zero inside the context; the account is complete when it is left."""
        self.account, self.is_open = {}, True
        try:
            yield self.account
        finally:
            self.is_open = False
