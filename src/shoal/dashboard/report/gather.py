"""Everything that a report needs of a run: the views that the page in the browser has too, and curves of the whole run."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.dashboard.opening import open_run
from shoal.dashboard.report.card import build_card
from shoal.dashboard.report.page import CurvePicture, Parts
from shoal.dashboard.report.pictures import DrawnCurve, Tick
from shoal.dashboard.runs.pyramid import finite_list
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.overview import run_row
from shoal.dashboard.views.ranks import ranks_answer
from shoal.dashboard.views.story import story_items
from shoal.dashboard.views.timeline import timeline_answer

_POINTS = 300
_BINS = 60
_MOST_TICKS = 60
_MOST_LOGGED = 4
_MEMORY_RANKS = 6
_TITLES = {
    "learning_rate": "Learning rate",
    "gradient_norm": "Gradient norm",
    "tokens_per_s": "Tokens per second",
    "samples_per_s": "Samples per second",
    "step_seconds": "Seconds of a step",
    "round_distance": "Distance of islands",
    "staleness": "Staleness, in updates",
    "noise_scale": "Gradient noise scale",
}
_TICKS = {
    "checkpoint_saved": "checkpoint",
    "rank_failed": "a rank failed",
    "rolled_back": "rolled back",
    "view": "view",
}


def gather(path: Path) -> Parts:
    """What a report of a run is made of.

    Raises:
        RequestError: there is no run at this path.
    """
    run, now = open_run(path), time.time()
    row = run_row(run, now)
    ranks, timeline = ranks_answer(run, bins=_BINS), timeline_answer(run)
    story = story_items(run, now)
    return Parts(
        card=build_card(run, row, ranks, timeline, story),
        curves=list(_curves(run)),
        ticks=list(_ticks(run)),
        ranks=ranks,
        timeline=timeline,
        story=[{**item, "time": "" if item["t"] is None else _moment(item["t"])} for item in story],
        recipe=run.recipe,
        made_at=_moment(now),
    )


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _curves(run: Run) -> Iterator[CurvePicture]:
    names = [curve.name for curve in run.curve_names()]
    losses = ["loss", *(name for name in names if name.endswith("_loss") and ":" not in name)]
    yield CurvePicture(title="Loss", lines=tuple(_lines(run, losses[:4])))
    for name, title in _TITLES.items():
        # Samples say the same as tokens where there are tokens.
        if name in names and not (name == "samples_per_s" and "tokens_per_s" in names):
            yield CurvePicture(title=title, lines=tuple(_lines(run, [name])))
    memory = [line for file in run.ranks[:_MEMORY_RANKS] for line in _lines(run, ["memory"], file.rank)]
    yield CurvePicture(title="Memory of ranks, in GiB", lines=tuple(_scaled(line, 2.0**-30) for line in memory))
    for name in [name for name in names if name.startswith("log:")][:_MOST_LOGGED]:
        yield CurvePicture(title=name[4:][:60], lines=tuple(_lines(run, [name])))


def _lines(run: Run, names: list[str], rank: int | None = None) -> Iterator[DrawnCurve]:
    for name in names:
        curve = run.curve(name, rank)
        if curve is None:
            continue
        places, buckets, _ = curve.window("step", None, None, _POINTS)
        yield DrawnCurve(
            name=name if rank is None else f"rank {rank}",
            x=places.tolist(),
            low=finite_list(buckets.low),
            high=finite_list(buckets.high),
            mean=finite_list(buckets.mean),
            bad=buckets.bad.tolist(),
        )


def _scaled(line: DrawnCurve, factor: float) -> DrawnCurve:
    def scale(values: Any) -> list[float | None]:
        return [None if value is None else value * factor for value in values]

    low, high, mean = scale(line.low), scale(line.high), scale(line.mean)
    return DrawnCurve(name=line.name, x=line.x, low=low, high=high, mean=mean, bad=line.bad)


def _ticks(run: Run) -> Iterator[Tick]:
    found: dict[tuple[str, float], Tick] = {}
    for event in run.events(*_TICKS):
        step = event.get("step")
        if isinstance(step, int):
            text = f"{_TICKS[event['kind']]}, step {step}"
            found[event["kind"], step] = Tick(x=float(step), text=text)
    for event in run.events("run_started"):
        if event.get("generation") and isinstance(event.get("step"), int):
            step = float(event["step"])
            found["restart", step] = Tick(x=step, text=f"restart at step {event['step']}")
    # Failures and restarts are few and say most; of checkpoints the newest.
    by_need = sorted(found.items(), key=lambda one: (one[0][0] == "checkpoint_saved", -one[1].x))
    yield from sorted((tick for _, tick in by_need[:_MOST_TICKS]), key=lambda tick: tick.x)
