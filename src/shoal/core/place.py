"""A process's place among the processes of a run, as its launcher gave it. ``launch/environments.py`` reads it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank this process is; a process that nobody launched is alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    generation: int = 0
    """How often the launcher has restarted the group."""
    is_launched: bool = False
    """True where a launcher started this process, even as the only one: it has a group then."""
    store: str = ""
    """The file in which the ranks meet; empty where the launcher has a store of its own."""
