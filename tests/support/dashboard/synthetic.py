"""Run directories that were made up: as large as wanted, in the form in which runs write them."""

import json
import math
import random
from pathlib import Path

PLAN = {"plan": "dp=2", "islands": 1, "dp": 2, "tp": 1, "cp": 1, "pp": 1, "ps": 0, "zero": 0, "microbatches": 1}


def step_line(step, rank, *, t, seconds=0.1, loss=None, wait=None, phases=None, **changed):
    """One line of a step."""
    event = {
        "t": round(t, 6),
        "rank": rank,
        "kind": "step",
        "step": step,
        "loss": 6.0 / math.sqrt(step) if loss is None else loss,
        "lr": 0.003,
        "grad_norm": 1.0 + 0.1 * math.sin(step),
        "samples": 16,
        "tokens": 512,
        "seconds": seconds,
        "data_seconds": 0.004,
        "skipped": False,
        "loss_scale": 1.0,
    }
    if wait is not None:
        event["wait_seconds"] = wait
    if phases is not None:
        event["phases"] = phases
    return json.dumps({**event, **changed}) + "\n"


def started_line(rank, *, t, plan="dp=2", world_size=2, step=0, generation=0):
    """One line of a start."""
    event = {"t": t, "rank": rank, "kind": "run_started", "plan": plan, "world_size": world_size, "step": step}
    return json.dumps({**event, "generation": generation, "pid": 1}) + "\n"


def make_run(
    folder,
    *,
    ranks=1,
    steps=100,
    begin=1_790_000_000.0,
    spike_at=None,
    status="completed",
    slow=None,
    seed=0,
    more=None,
):
    """A training run.

    Args:
        folder: to make.
        ranks: event files.
        steps: of each.
        begin: its first moment.
        spike_at: the step whose loss is 1000.
        status: in the summary; None for a run without one.
        slow: a rank, and how many times as long as the others it is busy.
        seed: of the small differences between steps.
        more: fields of plan.json.
    """
    folder = Path(folder)
    (folder / "events").mkdir(parents=True)
    (folder / "recipe.toml").write_text('plan = "dp=2"\n[train]\nseed = 1\n')
    plan = {**PLAN, "dp": ranks, "plan": f"dp={ranks}", "total_steps": steps, **(more or {})}
    (folder / "plan.json").write_text(json.dumps(plan))
    draw = random.Random(seed)
    for rank in range(ranks):
        lines = [started_line(rank, t=begin, plan=plan["plan"], world_size=ranks)]
        for step in range(1, steps + 1):
            busy = 0.06 * (1 + 0.05 * draw.random())
            if slow is not None and slow[0] == rank:
                busy *= slow[1]
            loss = 1000.0 if step == spike_at else None
            wait = {"dp": round(0.1 - 0.004 - busy, 6)}
            phases = {
                "data": 0.004,
                "forward": round(busy / 3, 6),
                "backward": round(busy * 2 / 3, 6),
                "gradients": wait["dp"],
            }
            lines.append(step_line(step, rank, t=begin + 0.1 * step, loss=loss, wait=wait, phases=phases))
        (folder / "events" / f"rank-{rank:03d}.jsonl").write_text("".join(lines))
    if status is not None:
        summary = {"status": status, "steps": steps, "final_loss": 0.5, "validation_loss": 0.6, "tokens_per_s": 5120.0}
        (folder / "summary.json").write_text(
            json.dumps(
                {**summary, "world_size": ranks, "plan": plan["plan"], "wall_s": 0.1 * steps, "weights_sha256": "ab"}
            )
        )
    return folder
