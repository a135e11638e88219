"""The first lines of a process that is started by itself: tie its life to its starter's, then become what it is for.

A module of its own because the worker imports torch, which takes seconds, and a supervisor that dies in those seconds must
not leave the rank behind. ``python -m shoal.elastic.child MODULE ARGUMENTS`` runs MODULE as ``__main__``.
"""

import os
import runpy
import sys

from shoal.comm.lifeline import die_with_parent


def main() -> None:
    """Tie the lifeline and run the module that the command line names."""
    die_with_parent(int(os.environ["SHOAL_SUPERVISOR_PID"]))
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
