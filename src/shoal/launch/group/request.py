"""What a supervisor of ranks is asked for: what runs, how many of it, and where its output goes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from shoal.comm.store.file import StoreFile
from shoal.launch.blame import RankEnd
from shoal.launch.config import ProcessConfig
from shoal.launch.environments import inherited, process_environment, rank_environment
from shoal.launch.group.elastic import Group, GroupPolicy
from shoal.launch.group.livefile import LiveFile
from shoal.launch.supervisor import Command
from shoal.telemetry.display import Display
from shoal.telemetry.statusboard import StatusBoard

THREADS_THERE = "{threads}"
"""A word of ``shared`` that stands for the number of threads, where only hosts can tell."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A group of local ranks to run to their end."""

    argv: Sequence[str] = ()
    """The worker's command, the same for every rank; what differs is in its environment. Left out where a module is given."""
    module: str = ""
    """Whose ``main`` is the worker. Ranks are then forked from one process that has imported it."""
    arguments: Sequence[str] = ()
    """Of the module."""
    shared: Sequence[str] = ()
    """``module:function`` and its arguments: called once, before ranks are forked, for what they share in memory."""
    num_ranks: int
    """Of the run, on all hosts."""
    ranks: Sequence[int] = ()
    """Those to start on this host, by their numbers in the run; left out, all of them."""
    run_dir: Path
    run_id: str
    display: Display
    """Closed by the supervisor, so that what is printed afterwards stays last."""
    output: TextIO | None = None
    """Where the ranks' standard output goes; left out, to the display with everything else."""
    live: LiveFile | None = None
    """Says to others where ranks are; None where somebody else does, or nobody asks."""
    config: ProcessConfig = field(default_factory=ProcessConfig)
    last_step: int = 0
    """That the ranks are to reach, for messages; 0 when unknown."""
    threads: int = 1
    """Compute threads per rank; 0, with several hosts, for as many as the host with the fewest cores has for each."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to, or to put over, those that the supervisor sets."""
    descriptors: Sequence[int] = ()
    """Open files that every rank inherits under the same numbers."""
    on_end: Callable[[RankEnd], None] | None = None
    """Told of every rank's end as soon as it is seen."""
    build_policy: Callable[[Sequence[str]], GroupPolicy] | None = None
    """Makes what decides who takes part when ranks die, for each generation, given the hosts where there are several; None
    where one death ends them all."""
    takes_hosts: bool = False
    """Hosts that were lost, or were not there at the start, are taken in when they come."""
    build_group: Callable[[], Group] | None = None
    """Makes the group, where that is decided elsewhere than on this host."""

    why_shared: str = ""
    """Why hosts have to share the run directory, and what to do about it; empty where each may have its own."""
    survives_hosts: bool = False
    """A host but the first may be lost, and the ranks of the others go on: they see to it themselves."""

    @property
    def local_ranks(self) -> Sequence[int]:
        """The ranks of this host."""
        return self.ranks or range(self.num_ranks)

    @property
    def environment(self) -> dict[str, str]:
        """What all ranks have in common."""
        values = process_environment(threads=self.threads, run_dir=self.run_dir, run_id=self.run_id)
        restarts = {"TORCHELASTIC_MAX_RESTARTS": str(self.config.max_restarts)}
        return {**inherited(), **values, **restarts, **self.env}

    def command(
        self,
        rank: int,
        *,
        generation: int,
        board: StatusBoard,
        store: StoreFile,
        member: Mapping[str, str] | None = None,
    ) -> Command:
        """What one rank runs; ``member`` is what a member of an elastic group is told besides."""
        values = {
            **rank_environment(rank=rank, num_ranks=board.num_ranks, local_ranks=self.ranks or range(board.num_ranks)),
            **(member or {}),
            "TORCHELASTIC_RESTART_COUNT": str(generation),
            "SHOAL_GENERATION": str(generation),
            "SHOAL_BOARD_FD": str(board.fd),
            "SHOAL_STORE": store.path,
        }
        return Command(
            name=f"rank {rank}",
            argv=self.argv,
            module=self.module,
            arguments=self.arguments,
            environment={**values, **self.env},
        )
