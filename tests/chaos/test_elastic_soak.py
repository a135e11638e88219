"""A run that goes on without its dead, struck again and again: it works most of the time, is one lineage, and leaves nothing.

For ``SHOAL_ELASTIC_MINUTES`` (30) a rank is killed or stopped every ``SHOAL_ELASTIC_EVERY`` (20) seconds. A share of useful time
below 0.8 is a failure: quiet machine wanted.
"""

import json
import os
import random
import signal
import time

import psutil
import pytest

from shoal.telemetry.summaryfile import read_summary
from support.processes.command import ROOT, TINY, wait_for_step, wait_until

MINUTES = float(os.environ.get("SHOAL_ELASTIC_MINUTES", "30"))
EVERY = float(os.environ.get("SHOAL_ELASTIC_EVERY", "20"))
LEAST = float(os.environ.get("SHOAL_ELASTIC_GOODPUT", "0.8"))
PACE = ";".join(f"rank {rank}@0:microbatch:pace" for rank in range(4))
DEATHS = 'callbacks = ["support.elastic.deaths:Deaths"]\n'


def read(folder, name):
    path = folder / "events" / f"{name}.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]


def steps_of(folder):
    """By step, when it was first committed by anybody."""
    found = {}
    for rank in range(4):
        for event in read(folder, f"rank-{rank:03d}"):
            if event["kind"] == "step":
                found[event["step"]] = min(event["t"], found.get(event["step"], event["t"]))
    return found


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("plan", ["dp=4 zero=2"])
def test_a_fault_every_few_seconds_costs_less_than_a_fifth(shoal, plan, capsys):
    (shoal.folder / "recipe.toml").write_text(DEATHS + TINY.replace("every = 3", "every = 0"))
    changes = {
        "train.steps": 10**8, "elastic.mode": "shrink", "elastic.rejoin": "true", "elastic.max_failures": 10**6,
        "elastic.heartbeat_deadline": 3,
    }  # fmt: skip
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    process = shoal.start(
        "train", "recipe.toml", "--plan", plan, "--run-dir", "run", *words,
        environment={"PYTHONPATH": path, "DEATHS": PACE},
    )  # fmt: skip
    run, dice, faults = shoal.folder / "run", random.Random(1), 0
    wait_for_step(run, 5)
    quiet = time.time()
    time.sleep(EVERY)
    begun = time.time()
    while time.time() < begun + 60 * MINUTES:
        ranks = [child for child in psutil.Process(process.pid).children(recursive=True) if child.num_threads() > 1]
        view = [event for event in read(run, "supervisor") if event["kind"] == "view"][-1]
        slots = [int(member.split(",")[0].split()[1]) for member in view["members"]]
        victims = {event["pid"] for slot in range(4) for event in read(run, f"rank-{slot:03d}")[-4000:]
                   if event["kind"] == "run_started"} & {child.pid for child in ranks}  # fmt: skip
        assert victims and slots, "somebody is there"
        os.kill(dice.choice(sorted(victims)), dice.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)))
        faults += 1
        time.sleep(EVERY)
    ended = time.time()
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=120)
    summary, committed = read_summary(run), steps_of(run)
    assert summary["status"] == "interrupted", stderr
    calm = sum(quiet <= at < begun for at in committed.values()) / (begun - quiet)
    goodput = sum(begun <= at < ended for at in committed.values()) / (ended - begun) / calm
    with capsys.disabled():
        print(f"\n{plan}: {faults} faults, goodput {goodput:.2f}, {summary['steps']} steps, {summary['elastic']}")
    assert sorted(committed) == list(range(1, summary["steps"] + 1)), "every step was committed, none past the end"
    more = ("--set", f"train.steps={summary['steps']}")
    shoal.run("train", "recipe.toml", "--plan", plan, "--run-dir", "calm", *more,
              environment={"PYTHONPATH": path}, timeout=3600)  # fmt: skip
    assert summary["weights_sha256"] == read_summary(shoal.folder / "calm")["weights_sha256"], "one lineage"
    wait_until(lambda: not [p for p in psutil.process_iter(["environ"]) if is_of(p, run)], "all ranks to be gone")
    assert goodput > LEAST


def is_of(process, run):
    return (process.info["environ"] or {}).get("SHOAL_RUN_DIR", "") == str(run)
