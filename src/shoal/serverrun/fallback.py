"""A run with parameter servers that ended in gradients which are not finite goes back to its last good checkpoint.

The servers have marked the checkpoints from which finite gradients came, and are gone; whether it was such an end, the events
say. No torch.
"""

import math
from pathlib import Path

from shoal.checkpoint.goodness import fall_back, newest_good
from shoal.core.events import GradientRefused, StepDone
from shoal.core.rundir import RunDir
from shoal.telemetry.lines import decode_events


def fall_back_if_refused(run_dir: Path, *, since: float) -> str:
    """Set aside what is newer than the newest good checkpoint, where the last gradients were refused; what to say, or nothing.

    A gradient that was refused before a step was taken did not end the run.

    Args:
        run_dir: of a run that has failed.
        since: when it was started, as ``time.time()`` tells it: what happened before was another attempt.

    Raises:
        OSError: the disk refused.
    """
    root = RunDir(run_dir).checkpoints
    refused = taken = since
    for path in sorted(RunDir(run_dir).events(0).parent.glob("rank-*.jsonl")):
        for event in decode_events(path.read_bytes().splitlines()):
            if event.get("kind") == GradientRefused.kind:
                refused = max(refused, event["t"])
            elif event.get("kind") == StepDone.kind and math.isfinite(float(event["loss"] or 0.0)):
                taken = max(taken, event["t"])
    if refused <= taken:
        return ""
    return f"{fall_back(root, newest_good(root)).describe(root)}. Resume with a lower optim.lr"
