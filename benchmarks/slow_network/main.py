"""Steps between two hosts with a link of 100 Mbit/s, as a share of DDP's step; and whether the counted bytes crossed.

python benchmarks/slow_network/main.py [--rounds 2] [--only NAME]... [--losses STEPS] [--tiny]

Needs root: the hosts are network namespaces, which are made here and removed again.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from contenders import ALONE, EXTRA, NAMES, PLANS
from pairs import Pair

from hosts import Hosts, two_hosts, why_not

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- made by main.py: begin -->", "<!-- made by main.py: end -->"
RATE = "100mbit"
STREAMING, LONGEST = "shoal stream:80,8,9 int8", 1.5
"""With streaming no step may be longer than this many local ones."""
WARM_UP = {STREAMING: 77}
"""Steps before anything is measured, at the full speed of the machine; 3 for those that are not here. The first fragment is
sent after step 80 and applied after step 89, the fifth, with which the measured ones end, after steps 120 and 129."""
TOGETHER = 4
"""Contenders that are alive beside DDP: more do not fit the memory of a small machine."""
TAKES = {"compute alone": 10, "torch powersgd:2": 5, "shoal powersgd:2": 5, "shoal topk:0.01": 5}
"""Steps in a turn; one for the others."""
WHOLE = {"shoal diloco:50": 50, "shoal diloco:50 int8": 50, STREAMING: 52}
"""Those that do not pay at every step: so many steps, once."""
BARS = {
    "shoal int8": 0.30,
    "shoal powersgd:2": 0.055,
    "shoal topk:0.01": 0.06,
    "shoal diloco:50": 0.05,
}
"""The most that a step may take of DDP's, on average."""
LOCAL = "shoal diloco:50"
"""The median of its steps is one that exchanges nothing."""
METERED, WORDS = 0.01, 4096
"""By how much bytes that crossed, without headers, may differ from those that were counted: a share, and so many bytes a step
that are gloo's own words to its peers."""


def measure(hosts: Hosts, names: Sequence[str], rounds: int, model: str) -> dict[str, Any]:
    """Every contender beside DDP; they take turns, and who comes first turns with them."""
    found: dict[str, Any] = {}
    others = [name for name in names if name != "ddp"]
    # Those that are measured once are together, so that DDP is measured once beside them.
    others.sort(key=lambda name: name in WHOLE)
    for place in range(0, len(others), TOGETHER):
        batch = ["ddp", *others[place : place + TOGETHER]]
        turns = 1 if set(batch) <= {"ddp", *WHOLE} else rounds
        hosts.limit(None)
        pairs = {name: Pair(name, hosts, model) for name in batch}
        try:
            for name in batch:
                begin(pairs, name)
            hosts.limit(RATE)
            for turn in range(turns):
                order = list(pairs)
                for name in order[turn % len(order) :] + order[: turn % len(order)]:
                    if name in pairs and (turn == 0 or name not in WHOLE):
                        steps = WHOLE.get(name) or TAKES.get(name, 1)
                        note(found, name, f"{place}/{turn}", pairs[name].take(steps))
                        say(name, found)
        finally:
            for pair in pairs.values():
                pair.end()
    return summarise(found)


def begin(pairs: dict[str, Pair], name: str) -> None:
    """Let a contender warm up, or leave it out."""
    if pairs[name].take(WARM_UP.get(name, 3)) is None:
        if name == "ddp":
            raise SystemExit("ddp itself failed; run rank.py by hand to see why")
        print(f"{name} failed at its start and is left out", file=sys.stderr)
        pairs.pop(name).end()


def note(found: dict[str, Any], name: str, turn: str, taken: dict[str, Any] | None) -> None:
    """Keep what one turn found."""
    row = found.setdefault(name, {"turns": {}, "cpu": [], "failed": 0, "payload": [0, 0], "counted": [0, 0]})
    if taken is None:
        row["failed"] += 1
        return
    row["turns"][turn] = taken["seconds"]
    row["cpu"].append(taken["cpu_seconds"])
    for rank in range(2):
        row["payload"][rank] += taken["sent"][rank].payload
        row["counted"][rank] += counted_bytes(taken["counted"][rank])


def say(name: str, found: dict[str, Any]) -> None:
    """Show that something happens: a step of DDP takes 20 seconds."""
    seconds = list(found[name]["turns"].values())
    told = f"{statistics.mean(seconds[-1]):.2f} s a step" if seconds else "failed"
    print(f"{time.strftime('%H:%M:%S')} {name}: {told}", file=sys.stderr)


def counted_bytes(traffic: dict[str, list[int]]) -> int:
    """What a rank of two sends for what the product has counted: of a sum as much as its tensor has, of the rest half."""
    total = 0
    for key, (_, num_bytes) in traffic.items():
        operation = key.split()[1]
        total += num_bytes if operation in ("all_reduce", "all_reduce_max") else num_bytes // 2
    return total


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Times beside DDP's of the same turn, and bytes beside those that were counted."""
    ddp = {turn: statistics.mean(seconds) for turn, seconds in found["ddp"]["turns"].items()}
    rows: dict[str, Any] = {}
    for name, taken in found.items():
        steps = {turn: statistics.mean(seconds) for turn, seconds in taken["turns"].items()}
        if not steps:
            rows[name] = {"failed": taken["failed"]}
            continue
        every = [second for seconds in taken["turns"].values() for second in seconds]
        payload, counted = max(taken["payload"]), max(taken["counted"])
        row: dict[str, Any] = {
            "step_s": round(statistics.median(steps.values()), 3),
            "to_ddp": round(statistics.median(second / ddp[turn] for turn, second in steps.items()), 4),
            "cpu_s": round(statistics.median(taken["cpu"]), 3),
            "median_s": round(statistics.median(every), 4),
            "longest_s": round(max(every), 4),
            "steps": len(every),
            "failed": taken["failed"],
            "sent_per_step": round(payload / len(every)),
        }
        if name in PLANS:
            row["counted_per_step"] = round(counted / len(every))
            row["crossed_to_counted"] = round(payload / counted, 4) if counted else None
            row["is_metered"] = abs(payload - counted) <= METERED * counted + WORDS * len(every)
        if name in BARS:
            row["bar"], row["is_met"] = BARS[name], row["to_ddp"] <= BARS[name]
        rows[name] = row
    if STREAMING in rows and LOCAL in rows and "median_s" in rows[STREAMING]:
        row = rows[STREAMING]
        row["longest_to_local"] = round(row["longest_s"] / rows[LOCAL]["median_s"], 3)
        row["bar"], row["is_met"] = f"longest {LONGEST}", row["longest_to_local"] <= LONGEST
    return rows


def learn(hosts: Hosts, names: Sequence[str], steps: int, model: str) -> dict[str, Any]:
    """The losses of contenders after equally many steps, at the full speed of the machine: they do not depend on the link."""
    found: dict[str, Any] = {}
    for name in names:
        pair = Pair(name, hosts, model)
        # A few at a time, because an answer has a deadline and the machine may be busy.
        losses: list[float] = []
        while len(losses) < steps and (taken := pair.take(min(5, steps - len(losses)))) is not None:
            losses += taken["losses"]
        pair.end()
        if len(losses) < steps:
            print(f"{name} failed and is left out", file=sys.stderr)
            continue
        last = losses[-max(steps // 5, 1) :]
        found[name] = {"loss": round(statistics.mean(last), 4), "losses": [round(loss, 5) for loss in losses]}
        print(f"{time.strftime('%H:%M:%S')} {name}: {found[name]['loss']}", file=sys.stderr)
    return found


def as_markdown(results: dict[str, Any]) -> str:
    """The README's table."""
    losses = results.get("losses", {})
    lines = [
        "| | step, s | to DDP's | bar | CPU, s | longest step, s | MB sent a step | crossed / counted | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.get("rows", {}).items():
        loss = f"{losses[name]['loss']:.3f}" if name in losses else ""
        if "step_s" not in row:
            lines.append(f"| {name} | did not finish | | | | | | | {loss} |")
            continue
        bar = ""
        if "bar" in row:
            beside = f" ({row['longest_to_local']} of a local one)" if "longest_to_local" in row else ""
            bar = f"{row['bar']}{beside}: {'met' if row['is_met'] else '**missed**'}"
        crossed = row.get("crossed_to_counted")
        lines.append(
            f"| {name} | {row['step_s']:.2f} | {row['to_ddp']:.3f} | {bar} | {row['cpu_s']:.2f} | "
            f"{row['longest_s']:.2f} | "
            f"{row['sent_per_step'] / 1e6:.2f} | {'' if crossed is None else crossed} | {loss} |"
        )
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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", action="append", choices=NAMES, help="these beside ddp; times are not written then")
    parser.add_argument("--losses", type=int, help="only the losses after so many steps, added to the newest results")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try it out; nothing is written then")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}", file=sys.stderr)
        return
    wanted = options.only or [name for name in NAMES if name not in EXTRA]
    names = [name for name in NAMES if name in ("ddp", *wanted)]
    model = "tiny" if options.tiny else "full"
    target = HERE / "results" / f"{date.today()}.json"
    # Losses go beside the times that are there; those of some contenders beside those of the others.
    known = sorted(target.parent.glob("*.json"))[-1:] if options.losses else [target]
    kept = [path for path in known if path.exists() and not options.tiny]
    results: dict[str, Any] = json.loads(kept[0].read_text()) if kept else {}
    target = kept[0] if kept else target
    results |= {"torch": torch.__version__, "cpu": platform.processor()}
    results["losses_date" if options.losses else "date"] = str(date.today())
    results |= {"cores": os.cpu_count(), "rate": RATE}
    with two_hosts() as hosts:
        if options.losses:
            results["loss_steps"] = options.losses
            learnt = [name for name in names if name != ALONE and (name != "ddp" or name in wanted)]
            results["losses"] = {**results.get("losses", {}), **learn(hosts, learnt, options.losses, model)}
        else:
            results["rows"] = measure(hosts, names, options.rounds, model)
    table = as_markdown(results)
    print(table)
    if (options.only is None or options.losses) and not options.tiny:
        write_readme(table)
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
