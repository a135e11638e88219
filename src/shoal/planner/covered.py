"""What the rows were like that a stack's constants were fitted on, and in what a run goes beyond them.

Beyond the rows that taught its constants a formula holds only as far as it is right, and a reader should know when it must.
"""

from collections.abc import Sequence

from shoal.planner.stacks import Covered
from shoal.planner.table import Run

_DEGREES = ("tp", "pp", "cp", "ep")


def numbers_of(run: Run) -> dict[str, float]:
    """What of a run is compared: devices, tokens of a sample, width, degrees."""
    degrees = {axis: float(getattr(run.plan, axis)) for axis in _DEGREES}
    return {
        "devices": float(run.num_devices),
        "sequence": float(run.shape.sequence),
        "hidden": float(run.shape.hidden),
        **degrees,
    }


def cover(runs: Sequence[Run]) -> dict[str, object]:
    """The least and the most of each number that some runs have, and the types that they compute in."""
    numbers = [numbers_of(run) for run in runs]
    ends = {name: [min(each[name] for each in numbers), max(each[name] for each in numbers)] for name in numbers[0]}
    return {"numbers": ends, "precisions": sorted({run.precision for run in runs})}


def beyond(run: Run, covered: Covered | None) -> list[str]:
    """In what a run lies outside what was fitted on, in words; nothing where that is not known."""
    if covered is None:
        return []
    found = [
        f"{name} {value:g} is outside the {low:g} to {high:g} that were calibrated on"
        for name, value in numbers_of(run).items()
        for low, high in (covered.numbers.get(name, (value, value)),)
        if not low <= value <= high
    ]
    if run.precision not in covered.precisions:
        found.append(f"{run.precision} was not calibrated on, but {', '.join(covered.precisions)}")
    return found
