"""The first and the last lines of a process of a crew: what its command line says, and what its exit code means.

This is a process boundary: every exception ends here, in the log and in the exit code. No torch: a center starts with this alone.
"""

import argparse
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from shoal.comm.parentdeath import end_if_forked
from shoal.core.config import read_toml, validate
from shoal.core.errors import EXIT_DONE, EXIT_NO, EXIT_WRONG_REQUEST, RequestError
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.serverrun.member import MemberPlace, attach_status
from shoal.trainer.claim import read_plan
from shoal.trainer.config import Recipe


def read_place(arguments: list[str]) -> tuple[str, MemberPlace]:
    """What the command line says: which role, and its place in the run."""
    parser = argparse.ArgumentParser(prog="shoal.serverrun.role")
    parser.add_argument("role", choices=("server", "worker", "center"))
    parser.add_argument("--name", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--incarnation", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--group-rank", type=int, default=0)
    given = parser.parse_args(arguments)
    run_dir: Path = given.run_dir
    recipe = validate(Recipe, read_toml(RunDir(run_dir).recipe), origin=str(RunDir(run_dir).recipe))
    place = MemberPlace(
        name=given.name,
        rank=given.rank,
        num_ranks=given.ranks,
        incarnation=given.incarnation,
        folder=given.folder,
        run_dir=run_dir,
        resume=given.resume,
        recipe=recipe,
        plan=Plan.parse(read_plan(run_dir)),
        group_rank=given.group_rank,
        board_fd=int(os.environ["SHOAL_BOARD_FD"]) if "SHOAL_BOARD_FD" in os.environ else None,
    )
    return given.role, place


def _say_done(place: MemberPlace) -> None:
    """Tell the crew that this process did what it was for: an exit code of 0 says only that something called exit."""
    rank_status = attach_status(place)
    if rank_status is not None:
        rank_status.claim()  # A center had no use for it until now.
        rank_status.finish("completed")


def run_process(run: Callable[[str, MemberPlace], None]) -> None:
    """Be a member of a crew, and never return.

    Args:
        run: does the role's work.
    """
    owner = os.getpid()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # The crew decides when to stop; Ctrl-C in the terminal goes to it alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = EXIT_DONE
    try:
        role, place = read_place(sys.argv[1:])
        run(role, place)
        end_if_forked(owner)
        _say_done(place)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        code = EXIT_WRONG_REQUEST
    except BaseException:
        end_if_forked(owner)
        traceback.print_exc()
        code = EXIT_NO
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread in an unknown state could keep a dying process alive, and its peers waiting.
    os._exit(code)
