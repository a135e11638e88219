"""The policies by name."""

from collections.abc import Callable
from typing import Literal, get_args

from shoal.core.errors import RequestError, did_you_mean
from shoal.data.cache.arc import Arc
from shoal.data.cache.blend import Blend
from shoal.data.cache.lfu import Lfu
from shoal.data.cache.planned import Planned
from shoal.data.cache.policy import Policy
from shoal.data.cache.recency import Lru, Mru
from shoal.data.cache.s3fifo import S3Fifo
from shoal.data.cache.tinylfu import TinyLfu
from shoal.data.cache.twoq import TwoQ

PolicyName = Literal["lru", "mru", "lfu", "blend", "2q", "arc", "tinylfu", "s3fifo", "planned"]
NAMES: tuple[str, ...] = get_args(PolicyName)

_PLAIN: dict[str, Callable[[int], Policy]] = {
    "lru": Lru,
    "mru": Mru,
    "lfu": Lfu,
    "2q": TwoQ,
    "arc": Arc,
    "s3fifo": S3Fifo,
    "planned": Planned,
}


def build_policy(name: str, capacity: int, *, num_keys: int | None = None) -> Policy:
    """A policy for ``capacity`` units; ``num_keys`` is about how many keys fit, where sizes are not 1.

    Raises:
        RequestError: there is no such policy.
    """
    if name == "blend":
        return Blend(capacity, num_keys=num_keys)
    if name == "tinylfu":
        return TinyLfu(capacity, num_keys=num_keys)
    if name not in _PLAIN:
        raise RequestError(f"there is no cache policy {name!r}; {did_you_mean(name, NAMES)}")
    return _PLAIN[name](capacity)
