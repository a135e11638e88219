"""The tracks of a run's trace: every step of every rank, what is known inside chosen steps, curves, and what happened."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from shoal.dashboard.exporters.perfetto import Count, Instant, Slice, Track, shifts
from shoal.dashboard.runs.columns import as_number
from shoal.dashboard.runs.eventfile import EventFile
from shoal.dashboard.runs.run import Run

_ALIGN_BY = 2000
"""Steps that clocks are compared by, the newest."""
_INSTANTS = {
    "checkpoint_saved": "checkpoint",
    "checkpoint_failed": "checkpoint failed",
    "checkpoint_refused": "checkpoint refused",
    "rank_failed": "rank failed",
    "view": "view",
    "resumed": "resumed",
    "non_finite": "not finite",
    "loss_spiked": "loss spiked",
    "rolled_back": "rolled back",
    "straggler": "straggler",
    "hung": "hung",
    "went_back": "went back",
    "published": "published",
    "warning": "warning",
}
_DETAILS = ("step", "culprit_rank", "cause", "phase", "num_bytes", "epoch", "message", "reason", "generation", "member")

Predicted = Callable[[int], list[Mapping[str, Any]]]
"""What was predicted of a step: a row for each rank, with its spans."""


def tracks_of(run: Run, predicted: Predicted) -> tuple[list[Track], float]:
    """The tracks of a run, and the moment at which its trace begins.

    Args:
        run: as it is known.
        predicted: of a step whose spans were kept.
    """
    ranks = [file for file in run.ranks if file.timed.rows or file.kept]
    hosts = {event["rank"]: str(event.get("host", "")) for event in run.events("placed")}
    coordinates = {event["rank"]: event.get("coordinates") for event in run.events("placed")}
    names = {event["rank"]: str(event.get("name", ""))[:100] for event in run.events("placed")}
    moved = shifts({file.rank or 0: _ends(file) for file in ranks if file.steps.rows}, hosts)
    tracks = [Track(kind="run", rank=-1, label=f"run {run.name}", counts=_loss(run), instants=list(_instants(run)))]
    chosen = _chosen_steps(ranks)
    forecast = {step: predicted(step) for step in chosen}
    # A forecast begins when the first rank does.
    firsts = {
        step: [found["begin"] + moved.get(file.rank or 0, 0.0) for file in ranks for found in _spans(file, step)]
        for step in chosen
    }
    begins = {step: min(found) for step, found in firsts.items() if found}

    def _stage(rank: object) -> object:
        at = coordinates.get(rank)
        # Ranks of one stage do alike, and the forecast has one row for all of them; ranks without a stage are like nobody.
        return at["pp"] if isinstance(at, dict) and isinstance(at.get("pp"), int) else f"rank {rank}"

    for file in ranks:
        rank = file.rank or 0
        place = _place(hosts.get(rank, ""), coordinates.get(rank))
        tracks.append(
            Track(
                kind="rank",
                rank=rank,
                label=f"{names.get(rank) or f'rank {rank}'}{place}",
                slices=_Slices(lambda file=file: _of_rank(file, chosen)),  # type: ignore[misc]
                counts=list(_memory(file)),
                shift=moved.get(rank, 0.0),
            )
        )
        slices = []
        for step, begin in begins.items():
            rows = [row for row in forecast[step] if row["rank"] == rank or _stage(row["rank"]) == _stage(rank)]
            slices += [one for row in rows[:1] for one in _inside(row["spans"], begin - moved.get(rank, 0.0), step)]
        if slices:
            label = f"rank {rank} as predicted"
            tracks.append(Track(kind="predicted", rank=rank, label=label, slices=slices, shift=moved.get(rank, 0.0)))
    return tracks, _begin(ranks, run)


class _Slices:
    """Slices that are made while they are written."""

    def __init__(self, make: Callable[[], Iterator[Slice]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Slice]:
        return self._make()


def _place(host: str, coordinates: object) -> str:
    axes = [f"{axis}={index}" for axis, index in coordinates.items()] if isinstance(coordinates, dict) else []
    words = [word for word in (host, " ".join(axes)) if word]
    return f" ({', '.join(words)})" if words else ""


def _begin(ranks: list[EventFile], run: Run) -> float:
    tables = [file.timed for file in ranks if file.timed.rows]
    firsts = [float(table.column("t")[0] - table.column("seconds")[0]) for table in tables]
    started = [float(event["t"]) for event in run.events("run_started")]
    known = [moment for moment in (*firsts, *started) if np.isfinite(moment)]
    return min(known, default=0.0)


def _ends(file: EventFile) -> dict[int, float]:
    steps, moments = file.steps.column("step")[-_ALIGN_BY:], file.steps.column("t")[-_ALIGN_BY:]
    return dict(zip(steps.tolist(), moments.tolist(), strict=True))


def _chosen_steps(ranks: list[EventFile]) -> list[int]:
    return sorted({place.step for file in ranks for place in file.spans})


def _of_rank(file: EventFile, chosen: list[int]) -> Iterator[Slice]:
    """Its steps, and then what is known inside chosen ones: slices of a thread_name come by their start."""
    table = file.timed
    has_loss = table is file.steps
    columns = [table.column(name) for name in ("step", "t", "seconds", "data_seconds", "skipped", "loss")]
    until = -np.inf
    for step, end, seconds, data, skipped, loss in zip(*(column.tolist() for column in columns), strict=True):
        # A clock that is set back, or two words for one moment, must not make slices that overlap.
        start = max(end - seconds, until)
        until = max(until, end)
        told = {"loss": loss} | ({"skipped": True} if skipped else {}) if has_loss else {}
        details = {"data_seconds": data, **told}
        yield Slice(
            thread_name="steps", name=f"step {int(step)}", start=start, seconds=max(0.0, end - start), details=details
        )
    for step in chosen:
        for found in _spans(file, step):
            yield from _inside(found["spans"], found["begin"], step)


def _spans(file: EventFile, step: int) -> list[dict[str, Any]]:
    """The spans of a step, the newest word for it, if they are sound."""
    found = file.read_spans(step)[-1:]
    return [{"begin": float(one["begin"]), "spans": one["spans"]} for one in found if _is_sound(one)]


def _is_sound(event: Mapping[str, Any]) -> bool:
    return isinstance(event.get("spans"), list) and np.isfinite(as_number(event.get("begin")))


def _inside(rows: list[Any], begin: float, step: int) -> Iterator[Slice]:
    sound = [row for row in rows if isinstance(row, list | tuple) and len(row) >= 4]
    timed = [(as_number(row[2]), as_number(row[3]), row) for row in sound]
    for start, seconds, row in sorted(timed, key=lambda one: one[0]):
        kind, name = str(row[0])[:40], str(row[1])[:100]
        thread_name = f"comm {name.partition(' ')[0]}" if kind == "comm" else kind
        num_bytes = as_number(row[4]) if len(row) > 4 else 0.0
        details: dict[str, Any] = {"step": step} | ({"bytes": num_bytes} if num_bytes else {})
        yield Slice(thread_name=thread_name, name=name, start=begin + start, seconds=seconds, details=details)


def _memory(file: EventFile) -> Iterator[Count]:
    if "memory" in file.tables:
        table = file.tables["memory"]
        for moment, resident in zip(table.column("t").tolist(), table.column("rss_bytes").tolist(), strict=True):
            yield Count(name="memory", at=moment, value=resident)


def _loss(run: Run) -> list[Count]:
    lead = run.lead()
    if lead is None:
        return []
    moments = lead.steps.column("t").tolist()
    found = [
        Count(name="loss", at=at, value=value)
        for at, value in zip(moments, lead.steps.column("loss").tolist(), strict=True)
    ]
    for key, table in lead.tables.items():
        kind, _, split = key.partition(":")
        if kind == "evaluated":
            pairs = zip(table.column("t").tolist(), table.column("loss").tolist(), strict=True)
            found += [Count(name=f"{split} loss", at=at, value=value) for at, value in pairs]
    return found


def _instants(run: Run) -> Iterator[Instant]:
    told: set[str] = set()
    for event in run.events(*_INSTANTS):
        # All ranks say that a checkpoint was saved, and each says it a moment later than the one before.
        key = str([event.get(name) for name in ("kind", "step", "epoch", "message", "culprit_rank")])
        if key in told:
            continue
        told.add(key)
        details = {name: event[name] for name in _DETAILS if event.get(name) is not None}
        yield Instant(name=_INSTANTS[event["kind"]], at=float(event["t"]), details=details)
    generations = {"0"}
    for event in run.events("run_started"):
        if str(event.get("generation")) not in generations:
            generations.add(str(event.get("generation")))
            details = {"generation": event.get("generation"), "step": event.get("step")}
            yield Instant(name="restart", at=float(event["t"]), details=details)
