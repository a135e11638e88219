"""A program that gets SIGTERM when the process that started it dies: ``python -m shoal.launch.clusters.tied PROGRAM ...``.

``kill -9`` of ``shoal train --on slurm`` cannot clean up. The kernel tells the launcher's command, which is a program of others,
and that one ends its processes. SIGKILL would leave them to run.
"""

import ctypes
import os
import signal
import sys

from shoal.core.errors import EXIT_WRONG_REQUEST

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Arrange it, and become the program."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        print(f"error: cannot start {sys.argv[1]}: {error}", file=sys.stderr)
        sys.exit(EXIT_WRONG_REQUEST)


if __name__ == "__main__":
    main()
