"""A run with parameter servers that ended in gradients which are not finite: which checkpoint is good, by its events. No torch.

The servers knew it, and are gone. A step whose loss was finite was computed with the weights before it.
"""

import math
from pathlib import Path

from shoal.checkpoint.layout import step_name
from shoal.checkpoint.retention import set_aside
from shoal.checkpoint.whole import committed_names
from shoal.core.events import GradientRefused, StepDone
from shoal.core.rundir import RunDir
from shoal.telemetry.lines import decode_events


def fall_back(run_dir: Path, *, since: float) -> str:
    """Set aside the checkpoints from which no step was taken, where gradients were refused; what to say of it, or nothing.

    Args:
        run_dir: of a run that has failed.
        since: when it was started, as ``time.time()`` tells it: what happened before was another attempt.

    Raises:
        OSError: the disk refused.
    """
    root = RunDir(run_dir).checkpoints
    committed = sorted(step for step, _ in committed_names(root))
    refused, taken = 0, None
    for path in sorted(RunDir(run_dir).events(0).parent.glob("rank-*.jsonl")):
        for event in decode_events(path.read_bytes().splitlines()):
            if event["t"] < since:
                continue
            refused += event.get("kind") == GradientRefused.kind
            if event.get("kind") == StepDone.kind and math.isfinite(float(event["loss"] or 0.0)):
                taken = max(taken or 0, event["step"])
    if not refused or not committed:
        return ""
    doubtful = [step for step in committed if step >= (committed[-1] if taken is None else taken)]
    good = next((step for step in reversed(committed) if step not in doubtful), None)
    set_aside(root, doubtful)
    said = f"last good checkpoint: {root / step_name(good) if good is not None else 'none'}"
    if not doubtful:
        return said
    named = ", ".join(map(step_name, doubtful))
    were = "was" if len(doubtful) == 1 else "were"
    return f"{said} ({named} {were} set aside, because no step could be taken from there). Resume with a lower optim.lr"
