"""The end of a run with parameter servers: loads what was written last, evaluates it, and says how the run went.

A process of its own, started by the job's command when the roles are gone: none of them has the whole model, and this one can be
run again on what is on disk. In a cluster, where nobody started the roles, the server that leads the log does it at its end.
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from shoal.comm.mesh import build_mesh
from shoal.comm.world import World
from shoal.core.events import EpochReceipt, StepDone
from shoal.core.place import Place
from shoal.core.plan import Plan
from shoal.core.rundir import replace_text
from shoal.engine.evaluate import evaluate
from shoal.engine.resolve import default_threads
from shoal.engine.state import hash_weights
from shoal.launch.procfs import peak_resident_bytes
from shoal.serverrun.notices import count_dropped, count_notices, read_events
from shoal.serverrun.process import ProcessSpec
from shoal.serverrun.publishing import publish_last
from shoal.telemetry.summaryfile import write_summary
from shoal.trainer.build import load_run
from shoal.trainer.summary import summarise_servers


def evaluate_last_checkpoint(run_dir: Path, *, with_evaluation: bool) -> dict[str, Any]:
    """What the newest checkpoint and the events of a run say of it."""
    run = load_run(run_dir)
    torch.set_num_threads(run.recipe.train.threads or default_threads(1))
    steps = read_steps(run_dir)
    losses = [one["loss"] for one in steps if one.get("loss") is not None]
    seconds = sum(one["seconds"] for one in steps)
    found = None
    if with_evaluation and run.data.validation is not None and len(run.data.validation):
        world = World(Place(), device=torch.device("cpu"), deadline_seconds=60.0)
        found = evaluate(
            run.objective,
            run.data.validation,
            split="validation",
            mesh=build_mesh(world, Plan(dp=1)),
            batch=run.recipe.eval.batch or run.recipe.train.micro_batch or run.recipe.train.global_batch,
            limit=run.recipe.eval.samples,
        )
    return {
        "steps": run.step,
        "skipped_steps": 0,
        "epochs_proved": len({event["epoch"] for event in read_events(run_dir, EpochReceipt.kind) if event["ok"]}),
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "validation_loss": found.loss if found is not None else None,
        "validation_accuracy": found.accuracy if found is not None else None,
        "baseline_loss": run.data.spec.baseline_loss,
        "tokens_per_s": sum(one["tokens"] for one in steps) / seconds if seconds else 0.0,
        "samples_per_s": sum(one["samples"] for one in steps) / seconds if seconds else 0.0,
        "weights_sha256": hash_weights(run.model),
        "checkpoint_error": None,
    }


def finalize_run(spec: ProcessSpec, halt: str, *, total_steps: int, started: float) -> dict[str, Any]:
    """Close a run from the process of a server, and write its summary.

    Args:
        spec: of that server.
        halt: why the run was stopped; empty when it was finished.
        total_steps: that it was to take.
        started: when this server was, as ``time.time()`` tells it.
    """
    found = evaluate_last_checkpoint(spec.kept_dir, with_evaluation=not halt)
    summary = summarise_servers(
        found,
        plan=spec.plan,
        total_steps=total_steps,
        stopped_by=halt or None,
        wall_seconds=time.time() - started,
        # Of this server: nobody on this machine can measure the others.
        peak_rss_bytes=[peak_resident_bytes(os.getpid())],
        num_deaths=None,
        notices={**count_notices(spec.kept_dir), "messages_dropped": count_dropped(spec.kept_dir)},
    )
    write_summary(spec.kept_dir, summary)
    return summary


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The step events of all servers in the order of steps; of a step that was told twice, the later telling."""
    by_step: dict[int, dict[str, Any]] = {}
    for event in read_events(run_dir, StepDone.kind):
        if event.get("loss") is not None and not math.isfinite(float(event["loss"])):
            continue
        known = by_step.get(event["step"])
        if known is None or known["t"] < event["t"]:
            by_step[event["step"]] = event
    return [by_step[step] for step in sorted(by_step)]


def main() -> None:
    """Entry point: ``shoal.serverrun.server.finalize RUN_DIR OUT [--evaluate] [--publish=RANK]``."""
    run_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    found = evaluate_last_checkpoint(run_dir, with_evaluation="--evaluate" in sys.argv[3:])
    for one in sys.argv[3:]:
        if one.startswith("--publish="):
            found["publish"] = publish_last(load_run(run_dir), int(one.partition("=")[2]))
    replace_text(out, json.dumps(found))


if __name__ == "__main__":
    main()
