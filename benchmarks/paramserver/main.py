"""Push and pull of 64 MB between two processes, the update applied on the server: Shoal's wire, gloo, and Ray's actors, in turns.

python benchmarks/paramserver/main.py [--rounds 9] [--only tcp,gloo] [--ray-python PATH]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import psutil

HERE = Path(__file__).parent
NUM_BYTES = 64 << 20
"""Of the gradient that is pushed, and of the weights that are pulled."""
CONTENDERS = {
    "shared": "Shoal, ipc, payloads in shared memory, pulled into a buffer",
    "view": "Shoal, ipc, payloads in shared memory, pulled as a view",
    "tcp-shared": "Shoal, tcp on loopback, payloads in shared memory",
    "tcp": "Shoal, tcp on loopback, payloads in the stream",
    "curve": "Shoal, tcp on loopback, encrypted",
    "gloo": "gloo send and recv",
    "ray": "Ray actor, gradient and weights through its object store",
}


class Contender:
    """A driver process with its server; told to measure one round at a time, so that all take turns."""

    def __init__(self, name: str, python: str, script: str, folder: Path) -> None:
        folder.mkdir()
        self.process = subprocess.Popen(
            [python, str(HERE / script), name, str(folder), str(NUM_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def measure(self, repeats: int) -> list[float]:
        """Seconds of each push and pull of one round."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{repeats}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("["):
                return [float(seconds) for seconds in json.loads(line)]
        raise SystemExit("a contender ended early; what it said is above")

    def cpu_seconds(self) -> float:
        """Of the processor, that the driver and its server have used so far; on a busy machine steadier than any time."""
        driver = psutil.Process(self.process.pid)
        used = [process.cpu_times() for process in (driver, *driver.children(recursive=True))]
        return float(sum(times.user + times.system for times in used))

    def end(self) -> None:
        """Let it finish; its server ends with it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(ray_python: str | None, only: list[str], folder: Path) -> dict[str, Contender]:
    scripts = dict.fromkeys(("shared", "view", "tcp-shared", "tcp", "curve"), (sys.executable, "shoal_pair.py"))
    scripts["gloo"] = (sys.executable, "gloo_pair.py")
    if ray_python is not None:
        scripts["ray"] = (ray_python, "ray_pair.py")
    return {
        name: Contender(name, *script, folder / name) for name, script in scripts.items() if not only or name in only
    }


def measure(
    contenders: dict[str, Contender], rounds: int, repeats: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """GB/s of each contender in each round: the bytes of push and pull over the median time of the round.

    And the milliseconds of the processor that one push and pull took in both processes, over all rounds.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    used = dict.fromkeys(contenders, 0.0)
    for turn in range(rounds + 1):
        names = list(contenders) if turn % 2 else list(reversed(contenders))
        for name in names:
            before = contenders[name].cpu_seconds()
            seconds = contenders[name].measure(repeats)
            if turn:  # the first round warms up
                found[name].append(2 * NUM_BYTES / statistics.median(seconds) / 1e9)
                used[name] += contenders[name].cpu_seconds() - before
    return found, {name: 1e3 * seconds / (rounds * repeats) for name, seconds in used.items()}


def summarise(found: dict[str, list[float]], used: dict[str, float]) -> list[dict[str, object]]:
    """The median over rounds, and of the ratio to each peer in the same round."""
    rows: list[dict[str, object]] = []
    for name, speeds in found.items():
        row: dict[str, object] = {"name": name, "what": CONTENDERS[name], "gb_per_s": statistics.median(speeds)}
        row["best_gb_per_s"], row["cpu_ms"] = max(speeds), used[name]
        for peer in ("gloo", "ray", "tcp"):
            if peer in found and peer != name:
                ratios = [ours / theirs for ours, theirs in zip(speeds, found[peer], strict=True)]
                row[f"times_{peer}"] = statistics.median(ratios)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=7, help="pushes and pulls in a round")
    parser.add_argument("--ray-python", help="a python that has ray and numpy; without it Ray is left out")
    parser.add_argument(
        "--only", default="", help="these contenders, with commas; a quick look, of which nothing is written"
    )
    options = parser.parse_args()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="shoal-bench-", dir=memory))
    contenders = start(options.ray_python, options.only.split(",") if options.only else [], folder)
    try:
        rows = summarise(*measure(contenders, options.rounds, options.repeats))
    finally:
        for contender in contenders.values():
            contender.end()
        shutil.rmtree(folder)
    for row in rows:
        ratios = "  ".join(f"{value:.2f} x {key[6:]}" for key, value in row.items() if key.startswith("times_"))
        print(f"{row['what']:60} {row['gb_per_s']:5.2f} GB/s   {row['cpu_ms']:4.0f} ms of processor   {ratios}")
    if options.only:
        return
    results = {"date": str(date.today()), "bytes": NUM_BYTES, "rounds": options.rounds, "rows": rows}
    target = HERE / "results" / f"{date.today()}.json"
    target.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
