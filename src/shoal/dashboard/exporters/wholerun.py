"""``shoal export --perfetto``: a run directory becomes one trace file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError
from shoal.dashboard.exporters.perfetto import write_trace
from shoal.dashboard.exporters.tracks import tracks_of
from shoal.dashboard.opening import open_run
from shoal.dashboard.views.timeline import timeline_answer


def export_trace(path: Path, file: Path) -> dict[str, Any]:
    """Write the trace of a run; what is in it.

    Raises:
        RequestError: there is no run, or no rank of it has said anything.
        RunError: the disk refused.
    """
    run = open_run(path)

    def predicted(step: int) -> list[Mapping[str, Any]]:
        return list(timeline_answer(run, step)["predicted"] or ())

    tracks, begin = tracks_of(run, predicted)
    ranks = sum(track.kind == "rank" for track in tracks)
    if not ranks:
        raise RequestError(f"{path} has no events of a rank yet; wait for the first step")
    about = {"run": run.name, "plan": str(run.plan.get("plan", "")), "begin": f"{begin:.6f}"}
    events = write_trace(file, tracks, begin, about)
    forecast = sum(track.kind == "predicted" for track in tracks)
    return {"file": str(file), "events": events, "ranks": ranks, "predicted": forecast, "begin": begin}
