"""Deadlines and restarts of the processes of a run: the part of a recipe's ``[elastic]`` section that is about this machine."""

from pydantic import Field

from shoal.core.config import Config


class ProcessConfig(Config):
    """How long to wait for a process, and how often to start again."""

    max_restarts: int = Field(default=0, ge=0)
    """How often to start all ranks again from the newest checkpoint after one has failed."""
    heartbeat_deadline: float = Field(default=30.0, gt=0)
    """Seconds without a sign of life after which a rank counts as hung and is named; ranks beat four times a second."""
    collective_deadline: float = Field(default=300.0, gt=0)
    """Seconds that a collective may take, and that all ranks together may stand still, before the run is stopped."""
    start_deadline: float = Field(default=120.0, gt=0)
    """Seconds that a rank has from its start to its first sign of life, and under a launcher to come to the others."""
    stop_grace: float = Field(default=60.0, gt=0)
    """Seconds that ranks have to finish the step and write a checkpoint after Ctrl-C or SIGTERM, before they are killed."""
    lease_seconds: float = Field(default=10.0, gt=0)
    """With several hosts: seconds of silence after which a host counts as gone, and after which a host without its coordinator
    ends its ranks."""
