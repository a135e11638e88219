"""Replica policies and compression beside peers that do the same on one host: torchft, hivemind, torch's own hooks.

python benchmarks/replicas_peers/main.py [--rounds 7] [--runs 100] [--only RACE]...
"""

import argparse
import importlib.util
import json
import os
import platform
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from contenders import MEAN_ELEMENTS, PERIOD
from short_run import short_run

from shoal.core.errors import RunError
from shoal.testing.ranks import run_on_ranks

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- made by main.py: begin -->", "<!-- made by main.py: end -->"
DEADLINE_SECONDS = 120


class Pair:
    """Two ranks of one contender, alive and waiting for their turn."""

    def __init__(self, name: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory()
        shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE / "rank.py"), name, self._folder.name],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                # Some of them start helpers of their own, which must end with them.
                start_new_session=True,
            )
            for rank in range(2)
        ]

    def take(self, times: int) -> tuple[list[float], float] | None:
        """Seconds of each piece of work, and processor time of one on average, on the slower of the ranks; None when one has
        failed."""
        try:
            for rank in self.ranks:
                rank.stdin.write(f"{times}\n")
                rank.stdin.flush()
        except BrokenPipeError:
            return None
        answers = [_line(rank) for rank in self.ranks]
        if not all(answers):
            return None
        ranks = [json.loads(answer) for answer in answers]
        seconds = [max(both) for both in zip(*(rank["seconds"] for rank in ranks), strict=True)]
        return seconds, max(rank["cpu_seconds"] for rank in ranks)

    def end(self) -> None:
        """End both ranks and what they started."""
        for rank in self.ranks:
            try:
                os.killpg(rank.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()
        self._folder.cleanup()


def _line(rank: subprocess.Popen) -> str:
    ready, _, _ = select.select([rank.stdout], [], [], DEADLINE_SECONDS)
    return rank.stdout.readline() if ready else ""


def round_seconds(seconds: list[float]) -> float:
    """What the step with a synchronisation took beyond one without."""
    return max(seconds) - statistics.median(seconds)


@dataclass(frozen=True, kw_only=True)
class Race:
    """Contenders that take turns, and what of their times counts."""

    names: tuple[str, ...]
    peer: str
    times: int
    """Pieces of work in a turn."""
    value: Callable[[list[float]], float]
    needs: str | None
    """The package that the peer is, where it is one."""
    bars: dict[str, float]
    """The most that a contender may take of the peer's time."""


RACES = {
    "a round of DiLoCo": Race(
        names=("shoal diloco", "torchft"),
        peer="torchft",
        times=PERIOD,
        value=round_seconds,
        needs="torchft",
        bars={"shoal diloco": 0.5},
    ),
    "the mean of 4 MB": Race(
        names=("shoal mean", "shoal mean, gloo", "hivemind"),
        peer="hivemind",
        times=3,
        value=statistics.median,
        needs="hivemind",
        bars={"shoal mean": 0.05, "shoal mean, gloo": 0.05},
    ),
    "a compressed step": Race(
        names=("shoal int8", "shoal dense", "torch fp16"),
        peer="torch fp16",
        times=5,
        value=statistics.median,
        needs=None,
        bars={"shoal int8": 1.0},
    ),
}


def run_race(race: Race, rounds: int) -> dict[str, Any]:
    """Seconds of every contender in every round, and their ratio to the peer's in the same round."""
    with ExitStack() as ending:
        pairs = {}
        for name in race.names:
            pairs[name] = Pair(name)
            ending.callback(pairs[name].end)
            if pairs[name].take(2 * race.times) is None:
                print(f"{name} failed at its start and is left out", file=sys.stderr)
                del pairs[name]
        seconds: dict[str, list[float]] = {name: [] for name in pairs}
        cpu: dict[str, list[float]] = {name: [] for name in pairs}
        for turn in range(rounds):
            order = list(pairs)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                taken = pairs[name].take(race.times)
                assert taken is not None, f"{name} failed in round {turn}"
                seconds[name].append(race.value(taken[0]))
                cpu[name].append(taken[1])
    found: dict[str, Any] = {}
    for name, own in seconds.items():
        found[name] = {
            "ms": round(statistics.median(own) * 1e3, 2),
            "cpu_ms": round(statistics.median(cpu[name]) * 1e3, 2),
            "rounds_ms": [round(one * 1e3, 2) for one in own],
        }
        if race.peer in seconds:
            ratios = [mine / theirs for mine, theirs in zip(own, seconds[race.peer], strict=True)]
            found[name]["to_peer"] = round(statistics.median(ratios), 4)
            if name in race.bars:
                found[name] |= {"bar": race.bars[name], "is_met": found[name]["to_peer"] <= race.bars[name]}
    return found


def finished(name: str, runs: int) -> dict[str, int]:
    """Of so many short runs, each in processes of its own, how many come to their end."""
    done = 0
    for place in range(runs):
        try:
            run_on_ranks(short_run, 2, name, deadline_seconds=DEADLINE_SECONDS)
            done += 1
        except RunError as error:
            print(f"{name}: run {place + 1} failed: {str(error).splitlines()[0]}", file=sys.stderr)
        if (place + 1) % 10 == 0:
            print(f"{name}: {done} of {place + 1} runs finished", file=sys.stderr)
    return {"runs": runs, "finished": done}


def as_markdown(results: dict[str, Any]) -> str:
    """The README's tables."""
    lines = ["| | | ms | CPU ms, of a whole step | to the peer's | bar |", "|---|---|---|---|---|---|"]
    for race, rows in results.get("races", {}).items():
        for name, row in rows.items():
            bar = f"{row['bar']}: {'met' if row['is_met'] else '**missed**'}" if "bar" in row else ""
            lines.append(f"| {race} | {name} | {row['ms']} | {row['cpu_ms']} | {row.get('to_peer', '')} | {bar} |")
    for name, row in results.get("finished", {}).items():
        lines.append(f"| short runs | {name} | | | {row['finished']} of {row['runs']} finished | |")
    return "\n".join(lines)


def write_readme(table: str) -> None:
    """Put the table into the README, between its marks."""
    page = HERE / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def main() -> None:
    """Measure, print the README's table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--runs", type=int, default=0, help="also start so many short runs, and count those that finish"
    )
    parser.add_argument("--only", action="append", choices=list(RACES), help="these races; nothing is written then")
    options = parser.parse_args()
    target = HERE / "results" / f"{date.today()}.json"
    results: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    results |= {"date": str(date.today()), "torch": torch.__version__, "cpu": platform.processor()}
    results |= {"cores": os.cpu_count(), "mean_bytes": 4 * MEAN_ELEMENTS}
    if options.runs:
        # Torch's hook that starts collectives from callbacks, for a tenth of them.
        counts = {"shoal int8": options.runs, "torch fp16": options.runs // 10, "torch powersgd": options.runs // 10}
        results["finished"] = {name: finished(name, runs) for name, runs in counts.items()}
    else:
        results["races"] = {}
        for title in options.only or RACES:
            race = RACES[title]
            if race.needs and importlib.util.find_spec(race.needs) is None:
                print(f"skipped {title}: {race.needs} is not installed; pip install 'shoal[bench]'", file=sys.stderr)
                continue
            results["races"][title] = run_race(race, options.rounds)
    table = as_markdown(results)
    print(table)
    if options.only is None:
        write_readme(table)
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
