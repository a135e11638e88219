"""A run that is struck by one fault after another, drawn by a seed or read from the history of an earlier run.

An episode is a plan and a list of faults, each with the number of steps after which it strikes. Whatever happens, the run is
started again until it is done; then its weights must be those of the run that nothing happened to. What was done when is written
to a history, a line of JSON for each, from which the same episodes can be played again.
"""

import json
import os
import random
import resource
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from support.paramserver.server_job import RECIPE, ServerJob
from support.processes.command import ranks_of, read_summary, wait_until

RANKED = ("dp=2", "dp=2 zero=3", "pp=2 microbatches=2")
SERVED = ("ps=2 workers=2 update=bsp backup=1",)
ON_RANKS = ("kill rank", "stop rank", "kill loader", "kill supervisor", "terminate", "full disk")
ON_SERVERS = ("kill server", "kill worker", "kill center", "stop member", "kill supervisor", "terminate")
EVERY = 4
"""Steps between checkpoints."""
_SMALL_FILE = 48 << 10
"""More than a run of these writes to its logs, less than a shard of its checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: str
    after: int
    """Steps since the one before."""
    victim: int
    """Which of those that it can strike; taken modulo their number."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    plan: str
    faults: tuple[Fault, ...]


def draw_episodes(seed: int, *, plans: Sequence[str], num_faults: int, apart: tuple[int, int]) -> Iterator[Episode]:
    """Episodes without end, each plan in turn; every kind of fault comes about as often."""
    dice = random.Random(seed)
    while True:
        for plan in plans:
            kinds = ON_SERVERS if plan in SERVED else ON_RANKS
            drawn = dice.sample(kinds, min(num_faults, len(kinds)))
            faults = [Fault(kind=kind, after=dice.randint(*apart), victim=dice.randrange(60)) for kind in drawn]
            yield Episode(plan=plan, faults=tuple(faults))


def read_episodes(history: Path) -> Iterator[Episode]:
    """The episodes of an earlier run."""
    for line in history.read_text().splitlines():
        told = json.loads(line)
        if told["what"] == "episode":
            yield Episode(plan=told["plan"], faults=tuple(Fault(**fault) for fault in told["faults"]))


class Stage:
    """Where episodes are played: one folder, one history.

    Args:
        folder: for runs and recipes.
        history: the file to write.
        steps: of a run.
        seconds: that a training pass takes at least.
    """

    def __init__(self, folder: Path, history: Path, *, steps: int, seconds: float) -> None:
        self.folder, self.history, self.steps, self.seconds = folder, history, steps, seconds
        self.undisturbed: dict[str, tuple[str, float]] = {}
        """By plan: the hash of the weights, and how long the run took."""
        self.numbers = iter(range(10**6))

    def tell(self, what: str, **more: object) -> None:
        with self.history.open("a") as file:
            file.write(json.dumps({"what": what, "time": round(time.time(), 2), **more}) + "\n")

    def play(self, episodes: Iterable[Episode], *, until: float = float("inf")) -> float:
        """Play episodes until they are over, or this time is; the share of the time that the same runs take undisturbed."""
        useful, spent, count = 0.0, 0.0, 0
        for episode in episodes:
            if time.monotonic() > until:
                break
            if episode.plan not in self.undisturbed:
                self.undisturbed[episode.plan] = self.run(Episode(plan=episode.plan, faults=()))
            wanted, alone_seconds = self.undisturbed[episode.plan]
            found, seconds = self.run(episode)
            assert found == wanted, f"other weights after {episode}; the history is {self.history}"
            useful, spent, count = useful + alone_seconds, spent + seconds, count + 1
        goodput = useful / spent if spent else 1.0
        self.tell("end", episodes=count, goodput=round(goodput, 3), seconds=round(spent, 1))
        return goodput

    def run(self, episode: Episode) -> tuple[str, float]:
        """The hash of the weights at the end of an episode, and its seconds."""
        self.tell("episode", plan=episode.plan, faults=[asdict(fault) for fault in episode.faults])
        place = Struck(self.folder / f"run-{next(self.numbers)}", episode.plan, self.steps, self.seconds)
        started = time.monotonic()
        try:
            for fault in episode.faults:
                if not place.wait_for_steps(fault.after):
                    self.tell("over before", fault=fault.kind)
                    break
                where = place.num_told()
                self.tell("fault", kind=fault.kind, victim=place.strike(fault), steps_told=where)
            summary = place.finish()
        finally:
            place.close()
        seconds = time.monotonic() - started
        place.check_nothing_is_left()
        assert summary["status"] == "completed" and summary["steps"] == self.steps
        self.tell("done", seconds=round(seconds, 2), weights=summary["weights_sha256"])
        return summary["weights_sha256"], seconds


class Struck:
    """One run, which may be several commands one after the other."""

    def __init__(self, folder: Path, plan: str, steps: int, seconds: float) -> None:
        self.folder, self.plan, self.is_served = folder, plan, plan in SERVED
        recipe = RECIPE.replace("steps = 30", f"steps = {steps}").replace("every = 5", f"every = {EVERY}")
        recipe = recipe.replace("seconds = 0.08", f"seconds = {seconds}")
        if "pp=" in plan:
            recipe = recipe.replace("support.models.paced:build", "support.models.paced:build_row")
        if not self.is_served:
            recipe = recipe.replace('source = "stdlib"', 'source = "stdlib"\nworkers = 1')
        self.recipe = recipe + "[elastic]\nmax_restarts = 50\nheartbeat_deadline = 60.0\n"
        self.jobs: set[Path] = set()
        self.begin()

    def begin(self, *arguments: str) -> None:
        self.command = ServerJob(self.folder, *arguments, plan=self.plan, recipe=self.recipe)
        self.told_before = self.num_told()

    def num_told(self) -> int:
        """Steps that were told of so far, those that were done again counted again."""
        paths = (self.folder / "run" / "events").glob("rank-*.jsonl")
        counts = [
            path.read_bytes().count(b'"kind":"step"') + path.read_bytes().count(b'"kind": "step"') for path in paths
        ]
        return sum(counts) if self.is_served else max(counts, default=0)

    def wait_for_steps(self, number: int) -> bool:
        """Until so many steps were made since the last fault; False when the run ended before."""
        wanted = self.told_before + number
        wait_until(lambda: self.command.process.poll() is not None or self.num_told() >= wanted, f"{wanted} steps", 240)
        return self.command.process.poll() is None

    def strike(self, fault: Fault) -> str:
        """Do it; who was struck."""
        self.remember_job()
        struck = getattr(self, fault.kind.replace(" ", "_"))(fault.victim)
        self.told_before = self.num_told()
        return struck or "nobody"

    # -- the command

    def kill_supervisor(self, victim: int) -> str:
        self.command.process.kill()
        self.command.process.wait()
        return self.go_on("the command")

    def terminate(self, victim: int) -> str:
        """In order: what was done is saved. Where the run was just over, there is nothing to go on with."""
        self.command.process.send_signal(signal.SIGTERM)
        code = self.command.process.wait(120)
        assert code in (0, 143), f"SIGTERM gave exit code {code}:\n{self.command.output}"
        return self.go_on("the command") if code else "the command, at its end"

    def go_on(self, struck: str) -> str:
        self.command.stop()
        wait_until(lambda: not self.processes(), "all processes to end with their command", 30)
        self.begin("--resume")
        return struck

    # -- ranks

    def a_rank(self, victim: int) -> psutil.Process | None:
        ranks = ranks_of(self.command.process) if self.command.process.poll() is None else {}
        return ranks[sorted(ranks)[victim % len(ranks)]] if ranks else None

    def kill_rank(self, victim: int) -> str:
        return self.signal(self.a_rank(victim), signal.SIGKILL)

    def stop_rank(self, victim: int) -> str:
        return self.pause(self.a_rank(victim))

    def kill_loader(self, victim: int) -> str:
        rank = self.a_rank(victim)
        children = rank.children() if rank is not None else []
        return self.signal(children[0], signal.SIGKILL) if children else "nobody"

    def full_disk(self, victim: int) -> str:
        """Files of one rank cannot grow beyond a size, for the length of a save at least."""
        rank = self.a_rank(victim)
        if rank is None:
            return "nobody"
        _, hard = rank.rlimit(psutil.RLIMIT_FSIZE)
        try:
            rank.rlimit(psutil.RLIMIT_FSIZE, (_SMALL_FILE, hard))
            self.told_before = self.num_told()
            self.wait_for_steps(EVERY + 1)
            rank.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
        except (psutil.NoSuchProcess, ProcessLookupError):
            return "one that ended"
        return f"process {rank.pid}"

    # -- members

    def a_member(self, victim: int, role: str = "") -> psutil.Process | None:
        members = {name: pid for name, pid in self.command.members().items() if name.startswith(role)}
        names = sorted(members)
        return psutil.Process(members[names[victim % len(names)]]) if names else None

    def kill_server(self, victim: int) -> str:
        return self.signal(self.a_member(victim, "server"), signal.SIGKILL)

    def kill_worker(self, victim: int) -> str:
        return self.signal(self.a_member(victim, "worker"), signal.SIGKILL)

    def kill_center(self, victim: int) -> str:
        return self.signal(self.a_member(victim, "center"), signal.SIGKILL)

    def stop_member(self, victim: int) -> str:
        return self.pause(self.a_member(victim))

    # -- what all have in common

    def signal(self, process: psutil.Process | None, number: int) -> str:
        try:
            if process is not None:
                process.send_signal(number)
                return f"process {process.pid}"
        except psutil.NoSuchProcess:
            pass
        return "nobody"

    def pause(self, process: psutil.Process | None) -> str:
        struck = self.signal(process, signal.SIGSTOP)
        # Not a wait for something to happen: this is how long the fault lasts.
        time.sleep(0.5)
        self.signal(process, signal.SIGCONT)
        return struck

    def remember_job(self) -> None:
        """Where the sockets of the members are; a command that is killed leaves them to the next one."""
        for pid in self.command.members().values() if self.is_served else ():
            try:
                links = psutil.Process(pid).net_connections("unix")
            except psutil.NoSuchProcess:
                continue
            self.jobs |= {Path(link.laddr).parent for link in links if link.laddr.startswith("/dev/shm/shoal-job-")}

    def finish(self) -> dict:
        self.remember_job()
        code = self.command.process.wait(300)
        assert code == 0, f"exit code {code}:\n{self.command.output}\n{self.command.logs()}"
        return read_summary(self.folder / "run")

    def close(self) -> None:
        self.command.stop()

    def processes(self) -> list[int]:
        """Of this run: whoever has its folder among its words."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = " ".join(process.info["cmdline"] or [])
            if (
                str(self.folder) in words
                and process.info["status"] != psutil.STATUS_ZOMBIE
                and process.pid != os.getpid()
            ):
                found.append(process.pid)
        return found

    def check_nothing_is_left(self) -> None:
        wait_until(lambda: not self.processes(), "every process of the run to be gone", 30)
        assert not [path for path in self.jobs if path.exists()], "the folder of a job is left"
        drafts = [path.name for path in (self.folder / "run" / "checkpoints").iterdir() if path.name.startswith(".")]
        assert not drafts, f"half a checkpoint is left: {drafts}"
