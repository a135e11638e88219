"""One rank of ``shoal run``: the user's script, run as ``__main__`` under the supervisor.

This is the process boundary of a script's rank: what failed, where and why is written down for the supervisor, which names the
culprit, and the process ends at once, so that its peers notice. A script need not use ``shoal.Run``; one that does tells more.
"""

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from shoal.comm.parentdeath import end_if_forked
from shoal.core.errors import EXIT_DONE, EXIT_NO, EXIT_SIGINT, EXIT_SIGTERM, EXIT_WRONG_REQUEST, RequestError, RunError
from shoal.launch.blame import EXIT_INTERRUPTED
from shoal.launch.environments import attach_status
from shoal.launch.failures import report_failure

# Imported before ranks are forked, so that a script finds it at once.
from shoal.library import run  # noqa: F401
from shoal.library.process import IS_RUNNING, OPEN, OWN_WORK
from shoal.library.script import check_script
from shoal.telemetry.statusboard import Heartbeat, RankStatus

_TELL_SECONDS = 5.0
"""How often a script that is in its own code is said to get on: nobody knows how long that takes."""


def main() -> None:
    """Run the script that the command line names, with its arguments."""
    # The supervisor asks a rank that hangs for its stacks before it ends it.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    owner, run_dir = os.getpid(), Path(os.environ["SHOAL_RUN_DIR"])
    script, arguments = sys.argv[1], sys.argv[2:]
    status = attach_status(os.environ)
    try:
        check_script(Path(script), os.environ)
        with _watched(status):
            code = _run_script(script, arguments)
        if code not in (EXIT_DONE, EXIT_SIGINT, EXIT_SIGTERM):
            kind = RequestError if code == EXIT_WRONG_REQUEST else RunError
            raise kind(f"{script} left with exit code {code}")
    except BaseException as error:
        end_if_forked(owner)
        report_failure(run_dir, error, os.environ)
        _end(EXIT_WRONG_REQUEST if isinstance(error, RequestError) else EXIT_NO)
    end_if_forked(owner)
    if code != EXIT_DONE:
        _end(EXIT_INTERRUPTED)
    if status is not None:
        status.finish("completed")
    _end(EXIT_DONE)


def _run_script(script: str, arguments: list[str]) -> int:
    """Run a script to its end as python would; the exit code that it asks for."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as asked:
        if isinstance(asked.code, str):
            print(asked.code, file=sys.stderr)
        return asked.code if isinstance(asked.code, int) else EXIT_NO if asked.code else EXIT_DONE
    for left_open in list(OPEN):
        left_open.close()
        if left_open.status == "interrupted":
            return EXIT_SIGTERM
    return EXIT_DONE


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads and groups in an unknown state could keep a dying rank alive, and its peers waiting.
    os._exit(code)


@contextlib.contextmanager
def _watched(status: RankStatus | None) -> Iterator[None]:
    """Let the supervisor see that this process runs; in a script's own code also that it gets on."""
    if status is None:
        yield
        return
    status.enter(OWN_WORK, 0)
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(_TELL_SECONDS):
            now = status.read()
            if not IS_RUNNING.is_set() or now.phase == OWN_WORK:
                status.enter(OWN_WORK, now.step)

    teller = threading.Thread(target=tell, name="script progress", daemon=True)
    teller.start()
    try:
        with Heartbeat(status):
            yield
    finally:
        is_over.set()


if __name__ == "__main__":
    main()
