"""A process's place among the processes of a run, as its launcher gave it. ``launch/environments.py`` reads it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank this process is; a process that nobody launched is alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Its number among the processes on its host."""
    local_size: int | None = None
    """Processes of the run on its host; None where the launcher does not say."""
    generation: int = 0
    """How often the launcher has restarted the group."""
    is_launched: bool = False
    """True where a launcher started this process, even as the only one: it has a group then."""
    store: str = ""
    """The file in which the ranks meet; empty where they meet at ``address``."""
    launcher: str = ""
    """Who started this process: torchrun, slurm, openmpi, ...; empty where nobody did."""
    hosts: tuple[str, ...] = ()
    """The hosts of the run in the order of their first ranks; empty where the launcher does not say."""
    address: str = ""
    """Where rank 0 can be reached; empty where the ranks meet in a file."""
    port: int = 0
    """At ``address``."""
    num_servers: int = 0
    """Parameter servers among its processes, the first ranks; 0 where the launcher knows of none."""
    evidence: tuple[str, ...] = ()
    """The variables that say so, as ``NAME=value``."""
