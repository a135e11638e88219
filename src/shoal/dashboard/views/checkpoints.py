"""The checkpoints of a run: which are there, how large, and what is known of whether they are whole."""

import re
from pathlib import PurePath
from typing import Any

from shoal.dashboard.runs.columns import as_number
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.plain import finite, text

_FOLDER = re.compile(r"step-([0-9]{1,15})")
_MOST = 200


def checkpoints(run: Run) -> list[dict[str, Any]]:
    """The checkpoints on the disk and those that events tell of, oldest first.

    States: ``good``: a step was taken from it, so it was whole; ``whole``: committed, and nobody found a fault; ``torn``: without
    its manifest; ``refused``: passed over, with the reason; ``gone``: told of, and not here (any more, or kept elsewhere).
    """
    found: dict[str, dict[str, Any]] = {}
    for event in run.events("checkpoint_saved"):
        name = PurePath(text(event.get("path"), 500)).name
        if match := _FOLDER.fullmatch(name):
            known = {"bytes": finite(event.get("num_bytes")), "t": finite(event.get("t"))}
            seconds = {"write_s": finite(event.get("write_seconds")), "stall_s": finite(event.get("stall_seconds"))}
            found[name] = {"name": name, "step": int(match[1]), "state": "gone", "reason": "", **known, **seconds}
    for name in run.names_in("checkpoints"):
        if match := _FOLDER.fullmatch(name):
            files = run.names_in(f"checkpoints/{name}")
            state = "good" if "good" in files else "whole" if "manifest.json" in files else "torn"
            nothing: dict[str, Any] = {"bytes": None, "t": None, "write_s": None, "stall_s": None}
            on_disk = found.setdefault(name, {"name": name, "step": int(match[1]), "reason": "", **nothing})
            on_disk["state"] = state
            if on_disk["bytes"] is None:
                on_disk["bytes"] = sum(run.size_of("checkpoints", name, file) or 0 for file in files[:1000])
    for event in run.events("checkpoint_refused"):
        name = PurePath(text(event.get("path"), 500)).name
        # One that was saved again after it had been refused is another one.
        if name in found and as_number(event["t"]) >= (found[name]["t"] or 0.0):
            found[name] |= {"state": "refused", "reason": text(event.get("reason"), 300)}
    return sorted(found.values(), key=lambda one: int(one["step"]))[-_MOST:]
