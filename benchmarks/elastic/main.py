"""Kill ranks of a run that goes on without them, let others join, and time how long training stands still.

python benchmarks/elastic/main.py [--kills 100] [--peer-kills 20] [--only CASE]...

The cases with hosts need root: hosts are network namespaces. That of torchft needs ``pip install torchft==0.2.0``.
"""

import argparse
import itertools
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import hostfaults
import psutil
from namespaces import made_hosts

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parents[1] / "recipes" / "tiny.toml"
DEADLINE_SECONDS = 120.0
NUM_RANKS = 4
CASES = {
    "shrunk, joined again": ("dp=4", ["elastic.rejoin=true"]),
    "shrunk, joined again, zero=2": ("dp=4 zero=2", ["elastic.rejoin=true"]),
    "with a spare": ("dp=4", ["elastic.spares=1"]),
    "8 logical replicas by 4": ("dp=8", ["elastic.rejoin=true", "elastic.max_dp=4"]),
}
LEASE_SECONDS = 5
HOST_CASES = {"a host loses its power": "power", "a host loses its cable": "cable"}
TORCHFT = "torchft 0.2.0, heartbeat of 5 s"
TORCHRUN = "torchrun, checkpoint every 20 steps"
ALL = [*CASES, *HOST_CASES, TORCHRUN, TORCHFT]
Event = dict[str, Any]


class Follower:
    """The events of a run, read as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._offsets = folder, {}
        self.events: dict[str, list[Event]] = {}

    def read(self) -> None:
        """Take in what was written since the last call."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            found = self.events.setdefault(path.stem, [])
            for line in whole.splitlines():
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # A killed rank may have torn its last line.
                if event["kind"] in ("view", "resumed", "run_started", "step"):
                    found.append(event)

    @property
    def view(self) -> Event:
        """The newest."""
        return [event for event in self.events["supervisor"] if event["kind"] == "view"][-1]

    def pids(self) -> list[int]:
        """The processes of the newest view, by rank, as they have said themselves."""
        started = [self._last("run_started", rank) for rank in range(self.view["replicas"])]
        return [event["pid"] for event in started if event is not None]

    def steps(self, *, after: float = 0.0) -> list[Event]:
        """Steps that anybody committed after a time, in the order of time."""
        return sorted(self._since("step", after), key=lambda event: event["t"])

    def resumed(self, epoch: int) -> list[Event]:
        """Of epochs after this one, in the order of time."""
        views = [event for event in self.events["supervisor"] if event["epoch"] > epoch]
        found = self._since("resumed", views[0]["t"]) if views else []
        return sorted((event for event in found if event["epoch"] > epoch), key=lambda event: event["t"])

    def _since(self, kind: str, after: float) -> list[Event]:
        """From the end of each file: there are many steps, and the machine is busy with the run."""
        found = []
        for name, events in self.events.items():
            if name != "supervisor":
                late = itertools.takewhile(lambda event: event["t"] > after, reversed(events))
                found += [event for event in late if event["kind"] == kind]
        return found

    def _last(self, kind: str, rank: int) -> Event | None:
        events = self.events.get(f"rank-{rank:03d}", [])
        return next((event for event in reversed(events) if event["kind"] == kind), None)


def wait_for(follower: Follower, condition: Callable[[], Any], what: str) -> Any:
    """The first true value of a condition on the events.

    Raises:
        SystemExit: there was none in time.
    """
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until:
        follower.read()
        if found := follower.events.get("supervisor") and condition():
            return found
        time.sleep(0.02)
    raise SystemExit(f"waited {DEADLINE_SECONDS:g} s for {what}")


def kill_ranks(kills: int, plan: str, settings: Sequence[str]) -> dict[str, Any]:
    """One run; a random rank of it is killed again and again, each time when all places are taken."""
    dice = random.Random(1)
    pauses, lost, epochs = [], [], []
    changes = ["train.steps=100000000", "checkpoint.every=0", "elastic.mode=shrink", "elastic.max_failures=100000"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "shoal", "train", str(RECIPE), "--plan", plan, "--run-dir", str(run)]
        command += [word for change in [*changes, *settings] for word in ("--set", change)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        follower = Follower(run / "events")
        try:
            for kill in range(kills):
                wait_for(follower, lambda: is_whole(follower, process, settings), f"{NUM_RANKS} replicas, kill {kill}")
                time.sleep(dice.uniform(0.0, 0.5))  # any moment: in compute, in a collective
                follower.read()
                victim, epoch = dice.choice(follower.pids()), follower.view["epoch"]
                killed = time.time()
                os.kill(victim, signal.SIGKILL)
                first = wait_for(follower, lambda e=epoch: follower.resumed(e), "the next view")[0]
                step = wait_for(follower, lambda t=first["t"]: follower.steps(after=t), "the next step")[0]
                before = [event["step"] for event in follower.steps(after=killed - 60) if event["t"] <= killed]
                pauses.append(step["t"] - killed)
                lost.append(max(0, max(before) - first["step"]))
                epochs.append(epoch)
            follower.read()
            joins = measure_joins(follower)
        finally:
            process.terminate()
            process.wait(timeout=60)
    return summarise(pauses, lost, joins)


def strike_hosts(kills: int, fault: str) -> dict[str, Any]:
    """One run on two hosts of two ranks; one of them is lost again and again, and comes back."""
    dice, pauses, lost = random.Random(1), [], []
    changes = ["train.steps=100000000", "checkpoint.every=0", "elastic.mode=shrink", "elastic.max_failures=100000"]
    changes += ["elastic.rejoin=true", f"elastic.lease_seconds={LEASE_SECONDS}"]
    with made_hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        named = ",".join(f"{hosts.address(number)}:2" for number in range(2))
        command = [sys.executable, "-m", "shoal", "train", str(RECIPE), "--plan", "dp=4 zero=2", "--run-dir", str(run)]
        command += ["--hosts", named, "--ssh", str(hostfaults.write_shell(hosts, Path(folder)))]
        command += [word for change in changes for word in ("--set", change)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        follower = Follower(run / "events")
        try:
            for kill in range(kills):
                wait_for(follower, lambda: is_whole(follower, process, ()), f"{NUM_RANKS} replicas, fault {kill}")
                time.sleep(dice.uniform(0.0, 0.5))
                follower.read()
                epoch, victim, struck = follower.view["epoch"], dice.randrange(2), time.time()
                (hostfaults.power_off if fault == "power" else hostfaults.cut)(hosts, victim)
                first = wait_for(follower, lambda e=epoch: follower.resumed(e), "the next view")[0]
                step = wait_for(follower, lambda t=first["t"]: follower.steps(after=t), "the next step")[0]
                (hostfaults.power_on if fault == "power" else hostfaults.mend)(hosts, victim)
                before = [event["step"] for event in follower.steps(after=struck - 60) if event["t"] <= struck]
                pauses.append(step["t"] - struck)
                lost.append(max(0, max(before) - first["step"]))
            follower.read()
            joins = measure_joins(follower)
        finally:
            process.terminate()
            process.wait(timeout=120)
    return summarise(pauses, lost, joins)


def summarise(pauses: Sequence[float], lost: Sequence[int], joins: Sequence[float]) -> dict[str, Any]:
    """What is written of a case."""
    return {
        "kills": len(pauses),
        "next_step_seconds": spread(pauses),
        "steps_lost": sum(lost),
        "joins": len(joins),
        "join_pause_seconds": spread(joins),
        "seconds": [round(one, 3) for one in pauses],
    }


def is_whole(follower: Follower, process: subprocess.Popen[bytes], settings: Sequence[str]) -> bool:
    """All places are taken, a step was taken since, and a spare, where there is to be one, is there."""
    view = follower.view
    if view["replicas"] < NUM_RANKS or len(follower.steps(after=view["t"])) < 2 * NUM_RANKS:
        return False
    if view["epoch"] > 1 and not follower.resumed(view["epoch"] - 1):
        return False
    is_spared = any(setting.startswith("elastic.spares") for setting in settings)
    return not is_spared or num_warm(process) > NUM_RANKS


def num_warm(process: subprocess.Popen[bytes]) -> int:
    """Ranks and spares that have been there for longer than it takes to build model and data."""
    names = [(child, child.cmdline()) for child in psutil.Process(process.pid).children()]
    ranks = [child for child, words in names if "shoal.launch.child" in words]
    return sum(time.time() - child.create_time() > 2.0 for child in ranks)


def measure_joins(follower: Follower) -> list[float]:
    """How long no step was committed around each view that has more replicas than the one before."""
    views = [event for event in follower.events["supervisor"] if event["kind"] == "view"]
    steps, pauses = follower.steps(), []
    for before, view, after in zip(views[:-1], views[1:], [*views[2:], None], strict=True):
        entered = [event for event in follower.resumed(view["epoch"] - 1) if event["epoch"] == view["epoch"]]
        if view["replicas"] <= before["replicas"] or not entered:
            continue  # Somebody died before all had come.
        first = next((event["t"] for event in steps if event["t"] > entered[0]["t"]), None)
        last = max((event["t"] for event in steps if event["t"] < entered[0]["t"]), default=None)
        if first is not None and last is not None and (after is None or first < after["t"]):
            pauses.append(first - last)
    return pauses


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median and the rest of it."""
    ordered = sorted(values)
    if not ordered:
        return {}
    place = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return {"p50": round(place(0.5), 3), "p99": round(place(0.99), 3), "max": round(ordered[-1], 3)}


def kill_torchrun(kills: int) -> dict[str, Any]:
    """The same with torchrun, which starts all ranks again; the script goes on from a checkpoint."""
    dice, pauses, lost = random.Random(1), [], []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
        command += [f"--max-restarts={kills + 1}", "--monitor-interval=0.1", str(HERE / "torchrun_rank.py"), folder]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def steps(after: float = 0.0) -> list[Event]:
            lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
            return [event for event in map(json.loads, lines) if event["t"] > after]

        def wait(after: float, number: int) -> list[Event]:
            until = time.monotonic() + 2 * DEADLINE_SECONDS
            while len(found := steps(after)) < number:
                if time.monotonic() > until:
                    raise SystemExit(f"torchrun took no step for {2 * DEADLINE_SECONDS:g} s")
                time.sleep(0.02)
            return found

        try:
            back = 0.0
            for _ in range(kills):
                wait(back, 30)
                time.sleep(dice.uniform(0.0, 0.5))
                children = psutil.Process(process.pid).children()
                before, killed = steps()[-1]["step"], time.time()
                dice.choice(children).kill()
                # A step that another rank had begun may still be written.
                generation = steps()[-1]["start"]
                while (first := wait(killed, 1)[-1])["start"] <= generation:
                    time.sleep(0.02)
                first = next(event for event in steps(killed) if event["start"] > generation)
                back = first["t"]
                pauses.append(back - killed)
                lost.append(before - first["step"] + 1)
        finally:
            process.terminate()
            process.wait(timeout=60)
    return {
        "kills": len(pauses),
        "next_step_seconds": spread(pauses),
        "steps_lost": sum(lost),
        "seconds": [round(one, 3) for one in pauses],
    }


def kill_torchft(kills: int) -> dict[str, Any]:
    """The same with torchft: one process for each replica, started again by us at once."""
    from torchft.coordination import LighthouseServer

    dice, pauses = random.Random(1), []
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    with tempfile.TemporaryDirectory() as folder:
        quiet = {**os.environ, "OMP_NUM_THREADS": "1"}

        def start(number: int) -> subprocess.Popen[bytes]:
            words = [sys.executable, str(HERE / "torchft_rank.py"), folder, str(number), lighthouse.address()]
            return subprocess.Popen(words, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def steps(after: float) -> list[Event]:
            found = []
            for path in Path(folder).glob("steps-*.jsonl"):
                found += [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1][-500:]]
            return sorted((event for event in found if event["t"] > after), key=lambda event: event["t"])

        ranks = [start(number) for number in range(NUM_RANKS)]
        try:
            since = time.time()
            for _ in range(kills):
                until = time.monotonic() + DEADLINE_SECONDS
                while sum(event["replicas"] == NUM_RANKS for event in steps(since)) < 20 * NUM_RANKS:
                    if time.monotonic() > until:
                        raise SystemExit(f"torchft had not all replicas for {DEADLINE_SECONDS:g} s")
                    time.sleep(0.05)
                victim, killed = dice.randrange(NUM_RANKS), time.time()
                ranks[victim].kill()
                ranks[victim].wait()
                # Others may still commit the step that was under way.
                while not (later := [one for one in steps(killed) if one["replicas"] < NUM_RANKS]):
                    if time.monotonic() > until + DEADLINE_SECONDS:
                        raise SystemExit(f"torchft took no step for {DEADLINE_SECONDS:g} s")
                    time.sleep(0.02)
                pauses.append(later[0]["t"] - killed)
                ranks[victim], since = start(victim), time.time()
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return summarise(pauses, [], [])


def newest_results(folder: Path) -> dict[str, Any]:
    """What the newest file says of all cases, each with the date on which it was measured; nothing where there is no file."""
    path = max(folder.glob("[0-9]*.json"), default=None)
    found: dict[str, Any] = json.loads(path.read_text()) if path is not None else {}
    return {
        name: {"date": found["date"], **value} if isinstance(value, dict) else value for name, value in found.items()
    }


def main() -> None:
    """Run the cases and write their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--peer-kills", type=int, default=20)
    parser.add_argument("--only", action="append", choices=ALL)
    options = parser.parse_args()
    path = HERE / "results" / f"{date.today()}.json"
    results = newest_results(path.parent) if options.only else {}
    results |= {"date": str(date.today()), "machine": f"{os.cpu_count()} cores, {platform.machine()}"}
    for name in options.only or ALL:
        if name == TORCHRUN:
            results[name] = kill_torchrun(options.peer_kills)
        elif name == TORCHFT:
            results[name] = kill_torchft(options.peer_kills)
        elif name in HOST_CASES:
            results[name] = strike_hosts(options.kills, HOST_CASES[name])
        else:
            plan, settings = CASES[name]
            results[name] = kill_ranks(options.kills, plan, settings)
        results[name]["date"] = str(date.today())
        said = {key: value for key, value in results[name].items() if key != "seconds"}
        print(f"{name}: {json.dumps(said)}", flush=True)
        path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
