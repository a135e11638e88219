"""A store whose waits end when there is a reason to wait no longer (``comm/interruption.py``).

The ranks of a view meet in a store. If one of them dies on its way there, torch's own store waits for its address until the
deadline of a collective, minutes later, and cannot be called off; this one looks again and again.
"""

import time
from datetime import timedelta

from torch._C._distributed_c10d import Store  # torch types this name only there

from shoal.comm.channel import PeerLost
from shoal.comm.interruption import reason_to_stop
from shoal.core.clock import Deadline

_LOOK_SECONDS = 0.002


class InterruptibleStore(Store):
    """Another store, whose keys are waited for here.

    Args:
        inner: has the keys.
    """

    timeout: timedelta
    """How long keys are waited for; torch's own, which ``set_timeout`` sets."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        # torch types a str, and takes bytes, which gloo's addresses are.
        self._inner.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value of a key, waited for as long as the store's timeout says."""
        self.wait([key])
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        """Add to a key that is a number, 0 where it is not there; the sum."""
        return self._inner.add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set a key if it is what is expected; what it is then."""
        return self._inner.compare_set(key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            PeerLost: there is a reason to wait no longer, or they did not come in time.
        """
        limit = Deadline(seconds=(timeout or self.timeout).total_seconds())
        while not self._inner.check(keys):
            if (reason := reason_to_stop()) is not None:
                raise PeerLost(f"{reason}, so nobody sets {keys[0]!r} any more", ranks=[])
            if limit.is_over:
                raise PeerLost(f"{' and '.join(map(repr, keys))} were not set within {limit.seconds:g} s", ranks=[])
            time.sleep(_LOOK_SECONDS)

    def delete_key(self, key: str) -> bool:
        """Delete a key; False where it was not there."""
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._inner.num_keys()

    def clone(self) -> "InterruptibleStore":
        """Another way to the same keys."""
        made = InterruptibleStore(self._inner)
        made.set_timeout(self.timeout)
        return made

    # By these names torch's own C++ code calls a store that is written in Python.
    deleteKey = delete_key
    getNumKeys = num_keys
