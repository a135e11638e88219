"""Why a plan, and why not another: where the time goes, as sentences made from estimates."""

from collections.abc import Iterator, Mapping, Sequence

from shoal.planner.hardware.presets import GIB
from shoal.planner.search.estimate import Estimate

_WORTH = 0.005
"""Share of a step below which a difference is not worth a word."""


def time_parts(found: Estimate) -> Mapping[str, float]:
    """Seconds of a step by what they are spent on; they add up to the step."""
    parts, exposed = found.parts, found.exposed
    # Transfers that a software waits for are inside passes too; others are part of what ranks wait for each other.
    axes = ("tp", "cp", "ep") if parts.overlaps_transfer else ("tp", "cp", "ep", "pp")
    inside = {axis: share * found.seconds for axis, share in exposed.items() if axis in axes}
    bubble = found.bubble * (found.seconds - parts.after_pipeline)
    after = {
        "dp": exposed.get("dp", 0.0) * found.seconds,
        "update": parts.update,
        "fixed": parts.fixed,
    }
    compute = found.seconds - bubble - sum(inside.values()) - sum(after.values())
    named = {
        "compute": compute,
        "pipeline bubble": bubble,
        **{f"{axis} communication": s for axis, s in inside.items()},
    }
    return {**named, "dp communication": after["dp"], "update": after["update"], "fixed": after["fixed"]}


def explain(ranked: Sequence[Estimate]) -> list[str]:
    """Why the first plan of a ranking, beside the second, and why a slower one can be the first."""
    best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    spent = time_parts(best)
    shares = ", ".join(
        f"{name} {seconds / best.seconds:.0%}" for name, seconds in spent.items() if seconds / best.seconds >= _WORTH
    )
    lines = [f"{_name(best, second)}: {shares}"]
    if second is not None:
        lines += list(_differences(best, second))
    fastest = min(ranked, key=lambda one: one.seconds)
    if fastest.seconds < best.seconds:
        lines.append(
            f"{best.plan} comes first although {fastest.plan} is {best.seconds / fastest.seconds - 1:.1%} faster: times "
            "this close cannot be told apart, so the plan with the fewest keys is preferred"
        )
    return lines


def why_not(asked: Estimate, best: Estimate) -> list[str]:
    """Why a plan that somebody asks about is not the answer."""
    lines = []
    if not asked.fits:
        lines.append(
            f"{asked.plan} does not fit: its fullest rank needs {asked.memory.allocated / GIB:.1f} GiB and "
            f"{asked.limit / GIB:.1f} are free; {_largest(asked)}"
        )
    if (str(asked.plan), asked.precision) == (str(best.plan), best.precision):
        return [*lines, f"{asked.plan} is the fastest plan that was found"]
    return [*lines, *_differences(best, asked)]


def _largest(found: Estimate) -> str:
    parts = {
        name: value for name, value in found.memory.as_dict().items() if name not in ("allocated", "reserve", "device")
    }
    name = max(parts, key=lambda part: parts[part])
    cure = {
        "activations": "recompute, smaller microbatches or sequence parallelism would lower them",
        "optimizer": "zero=1 would share them out over dp",
        "gradients": "zero=2 would share them out over dp",
        "weights": "more tp, pp or zero=3 would share them out",
        "working": "smaller microbatches would lower it",
        "versions": "a schedule with one copy of the weights would lower it",
    }[name]
    return f"the largest part is {name} with {parts[name] / GIB:.1f} GiB; {cure}"


def _name(found: Estimate, beside: Estimate | None) -> str:
    """A plan, and its precision where the one beside it has another."""
    return (
        str(found.plan)
        if beside is None or beside.precision == found.precision
        else f"{found.plan} in {found.precision}"
    )


def _differences(best: Estimate, other: Estimate) -> Iterator[str]:
    slower = other.seconds / best.seconds - 1
    if abs(slower) < _WORTH / 10:
        yield f"{_name(other, best)} is as fast"
    else:
        word = "slower" if slower >= 0 else "faster"
        yield f"{_name(other, best)} is {abs(slower):.1%} {word}: {other.seconds:.4g} s in place of {best.seconds:.4g} s"
    own, theirs = time_parts(best), time_parts(other)
    names = dict.fromkeys([*own, *theirs])
    changes = {name: theirs.get(name, 0.0) - own.get(name, 0.0) for name in names}
    for name, change in sorted(changes.items(), key=lambda item: -abs(item[1])):
        if abs(change) / best.seconds >= _WORTH:
            verb = "more" if change > 0 else "less"
            yield f"  {name}: {abs(change):.3g} s {verb} ({own.get(name, 0.0):.3g} s against {theirs.get(name, 0.0):.3g} s)"
