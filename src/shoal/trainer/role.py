"""A server or a worker of a crew, as a process.

``python -m shoal.trainer.role ROLE --folder ...`` is what the crew starts. Centers have a module of their own, ``centering.py``,
which needs no torch and is there in a fraction of the time.
"""

import asyncio

from shoal.trainer.entry import run_process
from shoal.trainer.member import MemberPlace
from shoal.trainer.serving import serve
from shoal.trainer.working import work


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
