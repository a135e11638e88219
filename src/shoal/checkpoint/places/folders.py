"""Which ranks share a folder: found by looking, once, before the first step.

Neither host names nor the names of file systems tell it: two hosts may mount one export, and two containers of one host may not.
So every rank makes a file with a name that nobody has used, all tell each other these names, and each looks which it sees.
"""

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.vote import Phase, Vote
from shoal.comm.world import World
from shoal.core.clock import Deadline
from shoal.core.errors import RunError


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Who shares a folder with whom, as one rank knows it; the same on all but for ``rank``."""

    rank: int
    leaders: tuple[int, ...]
    """By rank: the lowest rank that sees the same folder, which acts for it."""
    hosts: tuple[str, ...]
    """By rank: the name of its host."""

    @property
    def is_shared(self) -> bool:
        """True when all ranks see one folder."""
        return not any(self.leaders)

    @property
    def leader(self) -> int:
        """Who acts for this rank's folder."""
        return self.leaders[self.rank]

    @property
    def is_leader(self) -> bool:
        """True on the rank that acts for its folder."""
        return self.leader == self.rank

    @property
    def all_leaders(self) -> list[int]:
        """One rank for each folder, in order."""
        return sorted(set(self.leaders))

    def describe(self) -> str:
        """Every folder's ranks and host."""
        return "; ".join(
            f"{describe_ranks([rank for rank, own in enumerate(self.leaders) if own == leader])} on {self.hosts[leader]}"
            for leader in self.all_leaders
        )


def describe_ranks(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}"


def lead(seen: Sequence[Collection[int]]) -> tuple[int, ...]:
    """The leader of every rank, from the ranks whose files each of them sees. Two share a folder when each sees the other.

    Raises:
        RunError: a shares with b and b with c, and a does not with c.
    """
    mutual = [{other for other in sees if rank in seen[other]} for rank, sees in enumerate(seen)]
    for rank, sees in enumerate(mutual):
        for other in sees:
            if mutual[other] != sees:
                raise RunError(
                    f"rank {rank} shares a folder with {describe_ranks(sorted(sees))} and rank {other} with "
                    f"{describe_ranks(sorted(mutual[other]))}: the file system shows its files to some hosts only; mount it "
                    "alike everywhere"
                )
    return tuple(min(sees) for sees in mutual)


def find_folders(world: World, run_dir: Path) -> Folders:
    """Look who shares this rank's run directory. All ranks call it together; each gives its own path.

    Raises:
        RunError: a rank cannot write there, or did not come; names it.
    """
    vote = Vote(world.save_group, rank=world.rank, world_size=world.size)
    if world.size == 1:
        return Folders(rank=0, leaders=(0,), hosts=(socket.gethostname(),))
    deadline = Deadline(seconds=world.deadline_seconds)
    with _sign(run_dir) as (name, problem):
        told = json.dumps([name, socket.gethostname()[:80]]).encode()
        texts = vote.exchange(0, Phase.FOLDERS, deadline, problem=problem, text=told)
        names, hosts = zip(*(_pair(text) for text in texts), strict=True)
        sees = [rank for rank, other in enumerate(names) if os.path.lexists(run_dir / other)]
        texts = vote.exchange(0, Phase.FOLDERS, deadline, text=json.dumps(sees).encode())
        seen = [[int(rank) for rank in json.loads(text)] for text in texts]
        # Nobody takes its file away before all have looked.
        vote.exchange(0, Phase.FOLDERS, deadline)
    return Folders(rank=world.rank, leaders=lead(seen), hosts=hosts)


def _pair(text: bytes) -> tuple[str, str]:
    name, host = json.loads(text)
    return Path(str(name)).name, str(host)


@contextmanager
def _sign(run_dir: Path) -> Iterator[tuple[str, str | None]]:
    """A file of this rank alone in a folder: its name, and why there is none."""
    path, problem = run_dir / f".seen-{secrets.token_hex(8)}", None
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError as error:
        problem = f"cannot write in {run_dir} on host {socket.gethostname()}: {error.strerror}; use another --run-dir"
    try:
        yield path.name, problem
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
