"""The doctor: looks at everything a run needs from this machine, and at what dead runs left on it.

Looking changes nothing; only ``examine_leftovers`` with ``fix`` does. No torch is imported, so that it also works where torch
does not.
"""

from dataclasses import replace
from pathlib import Path

from shoal.doctor import checks, network
from shoal.doctor.checks import Check, State
from shoal.doctor.leftovers import SHARED_MEMORY, Kind, Leftover, Saves, find_leftovers, mend
from shoal.doctor.processes import our_processes
from shoal.launch.jobdirectory import job_directories_parent


def examine(runs: Path, *, quick: bool = False) -> list[Check]:
    """Look at versions, machine and network; ``quick`` leaves out the backends, which takes two seconds."""
    return [
        checks.check_python(),
        *checks.check_packages(),
        checks.check_cores(),
        checks.check_tiles(),
        checks.check_memory(),
        checks.check_disk(runs),
        checks.check_shared_memory(),
        checks.check_open_files(),
        network.skipped_backends() if quick else network.check_backends(),
        network.check_interface(),
        network.check_ports(our_processes()),
    ]


def examine_leftovers(runs: Path, saves: Saves, *, fix: bool = False, whole_machine: bool = False) -> list[Check]:
    """One check for each thing that a dead run left behind, mended where ``fix`` is set; one that is fine when there is none.

    Processes and shared memory of runs elsewhere are looked at, and ended, with ``whole_machine`` only: a user who names a folder
    means that folder, and others who share the account may be in the middle of something.
    """
    found = _find(runs, saves, whole_machine=whole_machine)
    if not found:
        place = f"on this machine nor in {runs}" if whole_machine else f"in {runs}"
        return [Check(name="leftovers", state=State.OK, found=f"none {place}")]
    if not fix:
        return [_report(leftover) for leftover in found]
    ended = [_mend(leftover, saves) for leftover in found if leftover.kind is Kind.PROCESS]
    # Looked for anew: with the orphans gone, runs that they kept alive are dead, and more is ours to remove.
    again = _find(runs, saves, whole_machine=whole_machine) if ended else found
    return ended + [_mend(leftover, saves) for leftover in again if leftover.kind is not Kind.PROCESS]


def _find(runs: Path, saves: Saves, *, whole_machine: bool) -> tuple[Leftover, ...]:
    processes = our_processes()
    if whole_machine:
        return find_leftovers(runs, processes, saves, shared_memory=SHARED_MEMORY, jobs=job_directories_parent())
    return find_leftovers(runs, [process for process in processes if process.is_below(runs)], saves, shared_memory=None)


def _mend(leftover: Leftover, saves: Saves) -> Check:
    mended = mend(leftover, saves)
    state = State.FIXED if mended.done else State.WRONG
    return replace(_report(leftover), state=state, advice=f"{leftover.why}; {mended.said}")


def _report(leftover: Leftover) -> Check:
    return Check(
        name=f"leftover {leftover.kind}",
        state=State.WRONG,
        found=leftover.what,
        advice=f"{leftover.why}; `shoal doctor --fix` removes it",
        values={"kind": leftover.kind, "path": str(leftover.path) if leftover.path else None, "pid": leftover.pid},
    )
