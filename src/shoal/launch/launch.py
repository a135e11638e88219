"""What is asked of the supervisor, as a value."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.launch.config import ProcessConfig
from shoal.telemetry.progress import Display


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A group of local ranks to run to their end."""

    argv: Sequence[str] = ()
    """The worker's command, the same for every rank; what differs is in its environment. Left out where a module is given."""
    module: str = ""
    """Whose ``main`` is the worker. Ranks are then forked from one process that has imported it."""
    arguments: Sequence[str] = ()
    """Of the module."""
    num_ranks: int
    run_dir: Path
    run_id: str
    display: Display
    """Closed by the supervisor, so that what is printed afterwards stays last."""
    config: ProcessConfig = field(default_factory=ProcessConfig)
    last_step: int = 0
    """That the ranks are to reach, for messages; 0 when unknown."""
    threads: int = 1
    """Compute threads per rank."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to, or to put over, those that the supervisor sets."""

    def __post_init__(self) -> None:
        """Refuse what would be started in two ways, or in none."""
        assert bool(self.argv) != bool(self.module), "give a command or a module"

    @property
    def command(self) -> list[str]:
        """What starts one rank as an interpreter of its own."""
        return list(self.argv) or [sys.executable, "-m", "shoal.launch.child", self.module, *self.arguments]
