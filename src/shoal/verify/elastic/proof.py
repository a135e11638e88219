"""Runs a plan twice, undisturbed and under a script of deaths, and compares every loss and the weights: to the bit.

Both are real runs under the supervisor. The undisturbed one knows nothing of elastic runs, and is proved against one process by
the proof of its plan.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomlkit

from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.telemetry.eventlog import decode_events
from shoal.telemetry.summaryfile import read_summary
from shoal.trainer.config import Recipe, dump_recipe, read_recipe
from shoal.verify.compare.judge import Difference
from shoal.verify.elastic.script import Script, parse_script
from shoal.verify.result import PlanResult, crashed, refused

_SECONDS = 900.0
_DISTURBANCE = "shoal.verify.elastic.disturbance:Disturbance"


def prove_elastic(recipe: Recipe, plan: Plan, text: str, *, bug: str = "") -> PlanResult:
    """Prove that a plan whose replicas come and go by a script ends in the bits of the plan left alone.

    Args:
        recipe: of the run.
        plan: what is proved.
        text: the script, such as ``4,3,1,4``.
        bug: of ``elastic_bugs.py``, to be planted in the ranks.
    """
    started, name = time.monotonic(), f"{plan}, replicas {text}"
    steps = 0
    try:
        script = parse_script(text, dp=plan.dp or 1)
        steps = script.steps
        with tempfile.TemporaryDirectory(prefix="shoal-verify-elastic-") as folder:
            alone = _train(recipe, plan, script, Path(folder) / "alone", is_disturbed=False)
            found = _train(recipe, plan, script, Path(folder) / "disturbed", is_disturbed=True, bug=bug)
        difference = _compare(alone, found, script)
    except RequestError as error:
        return refused(name, dtype=recipe.train.precision, steps=steps, reason=str(error))
    except RunError as error:
        seconds = time.monotonic() - started
        return crashed(name, dtype=recipe.train.precision, steps=steps, error=error, is_ours=True, wall_s=seconds)
    return PlanResult(
        plan=name,
        dtype=recipe.train.precision,
        steps=steps,
        status="proven" if difference is None else "differs",
        reason="the bits of the run that nobody disturbed" if difference is None else str(difference),
        bitwise=difference is None,
        worst={"loss": 0.0, "weight": 0.0} if difference is None else {},
        first_difference=difference,
        wall_s=time.monotonic() - started,
    )


def _train(
    recipe: Recipe, plan: Plan, script: Script, folder: Path, *, is_disturbed: bool, bug: str = ""
) -> dict[str, Any]:
    folder.mkdir()
    own = tomlkit.parse(dump_recipe(recipe)).unwrap()
    own["plan"] = str(plan)
    own["train"] = {**own["train"], "steps": script.steps}
    for length in ("epochs", "tokens", "time_limit"):
        own["train"].pop(length, None)
    own["checkpoint"] = {**own.get("checkpoint", {}), "every": 0}
    if is_disturbed:
        grows = bool(script.arrivals)
        # The script says who is present, and only a batch that is held has the bits of the run left alone.
        settings = {"mode": "shrink", "rejoin": grows, "max_failures": 100, "batch": "hold", "drop_stragglers": False}
        own["elastic"] = {**own.get("elastic", {}), **settings}
        own["elastic"].pop("max_dp", None)
        arguments = {"script": script.text, "dp": plan.dp or 1, "bug": bug}
        own["callbacks"] = [*own.get("callbacks", []), {"build": _DISTURBANCE, "args": arguments}]
    path, run_dir = folder / "recipe.toml", folder / "run"
    path.write_text(tomlkit.dumps(own))
    read_recipe(path)
    command = [sys.executable, "-m", "shoal", "train", str(path), "--run-dir", str(run_dir)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"the run did not end within {_SECONDS:g} s") from None
    if done.returncode == 2:
        raise RequestError(done.stderr.strip().removeprefix("error: "))
    summary = read_summary(run_dir)
    if done.returncode or summary is None:
        raise RunError(f"the run ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    run = RunDir(run_dir)
    return {
        "weights": summary["weights_sha256"],
        "validation": summary["validation_loss"],
        "losses": _losses(run, plan.world_size),
        "views": [event["replicas"] for event in _events(run.supervisor_events) if event["kind"] == "view"],
    }


def _events(path: Path) -> list[dict[str, Any]]:
    return list(decode_events(path.read_bytes().splitlines())) if path.exists() else []


def _losses(run: RunDir, num_ranks: int) -> dict[int, list[float]]:
    """Every loss that any rank told of a step: a step that was done again must have had the same."""
    found: dict[int, set[float]] = {}
    for rank in range(num_ranks):
        for event in _events(run.events(rank)):
            if event["kind"] == "step":
                found.setdefault(int(event["step"]), set()).add(float(event["loss"]))
    return {step: sorted(losses) for step, losses in sorted(found.items())}


def _compare(alone: dict[str, Any], found: dict[str, Any], script: Script) -> Difference | None:
    for step, losses in alone["losses"].items():
        other = found["losses"].get(step, [])
        if other != losses:
            pattern = f"{losses} undisturbed, {other} with {script.text} replicas"
            return Difference(kind="loss", pattern=f"step {step}: {pattern}")
    if found["weights"] != alone["weights"]:
        return Difference(kind="weight", pattern=f"sha256 {found['weights'][:16]} in place of {alone['weights'][:16]}")
    if found["validation"] != alone["validation"]:
        return Difference(kind="loss", pattern=f"validation: {found['validation']} in place of {alone['validation']}")
    lowest, wanted = min(found["views"]), min(script.counts)
    if lowest != wanted or found["views"][-1] != script.counts[-1]:
        return Difference(kind="run", pattern=f"replicas went {json.dumps(found['views'])}, not {script.text}")
    return None
