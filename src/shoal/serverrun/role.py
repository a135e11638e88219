"""A server or a worker of a crew, as a process.

``python -m shoal.serverrun.role ROLE --folder ...`` is what the crew starts. Centers have a module of their own,
``centering.py``, which needs no torch and is there in a fraction of the time.
"""

import asyncio

from shoal.serverrun.entry import run_process
from shoal.serverrun.member import MemberPlace
from shoal.serverrun.serving import serve
from shoal.serverrun.working import work


def run_role(role: str, place: MemberPlace) -> None:
    """Do a role's work to its end."""
    assert role in ("server", "worker"), role
    if role == "server":
        asyncio.run(serve(place))
    else:
        work(place)


def main() -> None:
    """Entry point of a role."""
    run_process(run_role)


if __name__ == "__main__":
    main()
