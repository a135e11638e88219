"""Steps on two hosts beside torch's DDP and FSDP2, gathers on two to four hosts beside the ideal, and what crosses between hosts.

python benchmarks/hosts/main.py [--rounds 9] [--only steps|collectives|bytes|exposed]... [--workload NAME] [--tiny]

Needs root: the hosts are network namespaces, which are made here and removed again.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
from group import Group
from namespaces import Hosts, made_hosts, why_not

from shoal.planner.pricing.cost import hidden_behind

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- made by main.py: begin -->", "<!-- made by main.py: end -->"
STEP_RATE, GATHER_RATE = "1gbit", "100mbit"
GATHER_BYTES, BITS_PER_SECOND = 12_000_000, 100e6
BARS = {"shoal-0": ("ddp", 1.0), "shoal-1": ("ddp", 1.05), "shoal-2": ("ddp", 1.05), "shoal-3": ("fsdp-3", 0.9)}
"""Beside which contender, and the most that a step may take of its."""
TOGETHER = (("ddp", "shoal-0", "shoal-1", "shoal-2"), ("fsdp-3", "shoal-3"))
"""Contenders that are alive at the same time and take turns."""
GATHER_BAR, EXPOSED_BAR = 1.15, 1.1
EXPOSED_BITS_PER_SECOND = 1e9
WINDOWS = {"ddp": 2 / 3, "shoal-0": 2 / 3, "shoal-1": 2 / 3, "shoal-2": 2 / 3, "shoal-3": 1.0}
"""Of a step's compute, what the planner lets communication hide behind: the backward pass, and with ZeRO 3 both."""
WORKLOADS = ("compute", "communication")
PARTS = ("steps", "collectives", "bytes", "exposed")


@contextmanager
def groups(hosts: Hosts, names: tuple[str, ...], workload: str, size: str, per_host: int = 1) -> Any:
    """The ranks of contenders, warm."""
    hosts.limit(None)
    found = {
        name: Group(hosts, "steps", name, workload, size, num_hosts=len(hosts.names), per_host=per_host)
        for name in names
    }
    try:
        for name, group in found.items():
            if group.take(2) is None:
                raise SystemExit(f"{name} failed at its start; set SHOW_ERRORS=1 to see why")
        yield found
    finally:
        for group in found.values():
            group.end()


def measure_steps(rounds: int, size: str, workloads: tuple[str, ...]) -> dict[str, Any]:
    """Every contender takes a step in turn; who comes first turns too. Ratios are within a round."""
    rows: dict[str, Any] = {}
    with made_hosts(2) as hosts:
        for workload in workloads:
            for names in TOGETHER:
                seconds: dict[str, list[float]] = {name: [] for name in names}
                processor: dict[str, list[float]] = {name: [] for name in names}
                with groups(hosts, names, workload, size) as found:
                    hosts.limit(STEP_RATE)
                    for turn in range(rounds + 1):
                        place = turn % len(names)
                        for name in names[place:] + names[:place]:
                            taken = found[name].take(1)
                            if taken is None:
                                raise SystemExit(f"{name} failed")
                            if turn:  # the first turn warms the cable
                                seconds[name].append(taken["step"])
                                processor[name].append(taken["step processor"])
                for name, row in summarise_steps(seconds).items():
                    rows[f"{workload}/{name}"] = row | {"processor_s": round(statistics.median(processor[name]), 4)}
                say(f"{workload}: {', '.join(names)}")
    return rows


def summarise_steps(seconds: dict[str, list[float]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, taken in seconds.items():
        beside, bar = BARS.get(name, (name, None))
        ratio = statistics.median(ours / theirs for ours, theirs in zip(taken, seconds[beside], strict=True))
        rows[name] = {"step_s": round(statistics.median(taken), 4), "beside": beside, "ratio": round(ratio, 3)}
        if bar is not None:
            rows[name] |= {"bar": bar, "is_met": ratio <= bar}
    return rows


def measure_collectives(rounds: int, num_bytes: int) -> dict[str, Any]:
    """Times on two to four hosts, beside what the bytes of a host take on its cable."""
    rows: dict[str, Any] = {}
    for count in (2, 3, 4):
        with made_hosts(count) as hosts:
            group = Group(hosts, "collectives", str(num_bytes), num_hosts=count)
            try:
                taken = [group.take(1)]
                hosts.limit(GATHER_RATE)
                taken = [group.take(1) for _ in range(rounds)]
            finally:
                group.end()
        ideal = num_bytes * (count - 1) / count * 8 / BITS_PER_SECOND
        for operation in ("all_gather", "reduce_scatter"):
            ratios = [one[operation] / ideal for one in taken if one is not None]
            if not ratios:
                raise SystemExit(f"{operation} on {count} hosts failed; set SHOW_ERRORS=1 to see why")
            ratio = statistics.median(ratios)
            row = {"hosts": count, "ideal_s": round(ideal, 3), "ratio": round(ratio, 3), "worst": round(max(ratios), 3)}
            rows[f"{operation}/{count}"] = row | {"bar": GATHER_BAR, "is_met": ratio <= GATHER_BAR}
        say(f"{count} hosts")
    return rows


def count_bytes(size: str) -> dict[str, Any]:
    """What two hosts of two ranks send in a step, by contender: bytes of the interfaces, without headers."""
    rows: dict[str, Any] = {}
    with made_hosts(2) as hosts:
        for name in ("ddp", "fsdp-3", "shoal-0", "shoal-1", "shoal-2", "shoal-3"):
            with groups(hosts, (name,), "communication", size, per_host=2) as found:
                before = hosts.sent()
                if found[name].take(2) is None:
                    raise SystemExit(f"{name} failed")
                sent = [(late - early) / 2 for early, late in zip(before, hosts.sent(), strict=True)]
            rows[name] = {"first_host": round(sent[0]), "second_host": round(sent[1])}
            say(f"bytes of {name}: {sent}")
        for name, row in rows.items():
            beside = rows["fsdp-3" if name in ("fsdp-3", "shoal-3") else "ddp"]
            row["ratio"] = round(sum(list(row.values())[:2]) / sum(list(beside.values())[:2]), 3)
    return rows


def measure_exposed(rounds: int, size: str, workloads: tuple[str, ...]) -> dict[str, Any]:
    """What the cable adds to a step, beside what the planner says cannot be hidden of the bytes that crossed it.

    A round is a step at full speed and one with the cable; the rest of a step is the same in both.
    """
    rows: dict[str, Any] = {}
    with made_hosts(2) as hosts:
        for workload in workloads:
            for name, share in WINDOWS.items():
                free, bound, crossed = list[float](), list[float](), list[int]()
                with groups(hosts, (name,), workload, size) as found:
                    for _ in range(rounds):
                        hosts.limit(None)
                        free.append(_step(found[name], name))
                        hosts.limit(STEP_RATE)
                        _step(found[name], name)  # warms the cable
                        before = hosts.on_the_cable()
                        bound.append(_step(found[name], name))
                        crossed.append(
                            max(late - early for early, late in zip(before, hosts.on_the_cable(), strict=True))
                        )
                rows[f"{workload}/{name}"] = summarise_exposed(free, bound, statistics.median(crossed), share)
                say(f"exposed, {workload}: {name}")
    return rows


def _step(group: Group, name: str) -> float:
    taken = group.take(1)
    if taken is None:
        raise SystemExit(f"{name} failed; set SHOW_ERRORS=1 to see why")
    return taken["step"]


def summarise_exposed(free: list[float], bound: list[float], crossed: float, share: float) -> dict[str, Any]:
    compute, wire = statistics.median(free), crossed * 8 / EXPOSED_BITS_PER_SECOND
    exposed = statistics.median(late - early for early, late in zip(free, bound, strict=True))
    lasting = wire - hidden_behind(share * compute, wire)
    ratio = exposed / lasting
    row = {"compute_s": round(compute, 4), "wire_s": round(wire, 4), "exposed_s": round(exposed, 4)}
    row |= {"cannot_be_hidden_s": round(lasting, 4), "ratio": round(ratio, 3)}
    return row | {"bar": EXPOSED_BAR, "is_met": ratio <= EXPOSED_BAR}


def say(what: str) -> None:
    """Show that something happens."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr)


def as_markdown(results: dict[str, Any]) -> str:
    """The README's tables."""
    lines: list[str] = []
    if "steps" in results:
        lines += ["| workload | contender | step, s | processor, s | beside | ratio | bar |"]
        lines.append("|---|---|---|---|---|---|---|")
        for key, row in results["steps"].items():
            workload, name = key.split("/")
            lines.append(
                f"| {workload} | {name} | {row['step_s']} | {row['processor_s']} | {row['beside']} | {row['ratio']} "
                f"| {bar_of(row)} |"
            )
        lines.append("")
    if "collectives" in results:
        lines += ["| operation | hosts | ideal, s | to the ideal | worst | bar |", "|---|---|---|---|---|---|"]
        for key, row in results["collectives"].items():
            name = key.split("/")[0]
            lines.append(
                f"| {name} | {row['hosts']} | {row['ideal_s']} | {row['ratio']} | {row['worst']} | {bar_of(row)} |"
            )
        lines.append("")
    if "bytes" in results:
        lines += ["| two hosts of two ranks | first host, MB a step | second host | to torch's |", "|---|---|---|---|"]
        for name, row in results["bytes"].items():
            first, second = row["first_host"] / 1e6, row["second_host"] / 1e6
            lines.append(f"| {name} | {first:.2f} | {second:.2f} | {row['ratio']} |")
    if "exposed" in results:
        lines += [
            "",
            "| workload | contender | compute, s | wire, s | exposed, s | cannot be hidden, s | ratio | bar |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for key, row in results["exposed"].items():
            numbers = [row[name] for name in ("compute_s", "wire_s", "exposed_s", "cannot_be_hidden_s", "ratio")]
            lines.append(f"| {' | '.join([*key.split('/'), *map(str, numbers)])} | {bar_of(row)} |")
    return "\n".join(lines).rstrip()


def bar_of(row: dict[str, Any]) -> str:
    return f"{row['bar']}: {'met' if row['is_met'] else '**missed**'}" if "bar" in row else ""


def write_readme(table: str) -> None:
    """Put the tables into the README, between its marks."""
    page = HERE / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def main() -> None:
    """Measure, print the README's tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--workload", choices=WORKLOADS, help="of the steps; both when left out")
    parser.add_argument("--tiny", action="store_true", help="small models, to try it out; nothing is written then")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}", file=sys.stderr)
        return
    # Hosts are removed then too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    wanted = options.only or PARTS
    size = "tiny" if options.tiny else "full"
    results: dict[str, Any] = {"date": str(date.today()), "torch": torch.__version__, "cpu": platform.processor()}
    results |= {"cores": os.cpu_count(), "step_rate": STEP_RATE, "gather_rate": GATHER_RATE, "rounds": options.rounds}
    if "steps" in wanted:
        results["steps"] = measure_steps(options.rounds, size, (options.workload,) if options.workload else WORKLOADS)
    if "collectives" in wanted:
        results["collectives"] = measure_collectives(min(options.rounds, 5), GATHER_BYTES)
    if "bytes" in wanted:
        results["bytes"] = count_bytes(size)
    if "exposed" in wanted:
        workloads = (options.workload,) if options.workload else WORKLOADS
        results["exposed"] = measure_exposed(options.rounds, size, workloads)
    table = as_markdown(results)
    print(table)
    if options.only is None and options.workload is None and not options.tiny:
        write_readme(table)
        target = HERE / "results" / f"{date.today()}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
