"""Who is let into a cache at all: by size, so that one giant does not turn everything out, and by how often it was asked for."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from shoal.core.config import Config
from shoal.data.cache.frequency import Frequencies
from shoal.data.cache.policy import Access, Key, Plannable, Policy


class AdmissionConfig(Config):
    """What a tier lets in."""

    largest: Annotated[float, Field(gt=0, le=1)] = 1.0
    """A block larger than this share of the tier is not kept."""
    uses: Annotated[int, Field(ge=1)] = 1
    """A block is kept from this request on; 2 keeps out what is asked for once."""


class Admitted:
    """A policy behind an admission."""

    def __init__(self, policy: Policy, config: AdmissionConfig, *, num_keys: int) -> None:
        self._policy, self._config = policy, config
        self._counts = Frequencies(10 * num_keys)

    @property
    def capacity(self) -> int:
        """Of the policy."""
        return self._policy.capacity

    @property
    def used(self) -> int:
        """Of the policy."""
        return self._policy.used

    def __contains__(self, key: Key) -> bool:
        return key in self._policy

    def access(self, key: Key, size: int = 1) -> Access:
        """A key that is not let in is evicted at once."""
        self._counts.touch(key)
        is_known = key in self._policy
        if not is_known and (size > self._config.largest * self.capacity or self._counts[key] < self._config.uses):
            return Access(False, (key,))
        return self._policy.access(key, size)

    def discard(self, key: Key) -> None:
        """The key's content was lost."""
        self._policy.discard(key)

    def plan(self, keys: Sequence[Key]) -> None:
        """Tell the policy, where it plans."""
        if isinstance(self._policy, Plannable):
            self._policy.plan(keys)

    def forget_plan(self) -> None:
        """Tell the policy, where it plans."""
        if isinstance(self._policy, Plannable):
            self._policy.forget_plan()
