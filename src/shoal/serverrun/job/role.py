"""A server or a worker of a job, as a process.

``python -m shoal.serverrun.job.role ROLE --folder ...`` is what the job starts. Centers have a module of their own,
``serverrun/center.py``, which needs no torch and is there in a fraction of the time.
"""

import asyncio

from shoal.serverrun import center
from shoal.serverrun.process import ProcessSpec, run_process
from shoal.serverrun.server import finalize
from shoal.serverrun.server.process import serve
from shoal.serverrun.worker.process import work

PRELOADED = (center, finalize)
"""What the other processes of a job run, imported here for the fork server to import once (``processes.py``)."""


def run_role(role: str, spec: ProcessSpec) -> None:
    """Do a role's work to its end."""
    assert role in ("server", "worker"), role
    if role == "server":
        asyncio.run(serve(spec))
    else:
        work(spec)


def main() -> None:
    """Entry point of a role."""
    run_process(run_role)


if __name__ == "__main__":
    main()
