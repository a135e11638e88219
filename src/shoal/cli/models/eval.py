"""``shoal eval``: loss and accuracy of a run's newest whole checkpoint on a held-out split."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, write_result

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
_Split = Annotated[str, typer.Option("--split", metavar="validation|test", help="Which held-out split.")]
_Samples = Annotated[
    int | None,
    typer.Option(
        "--samples",
        metavar="N",
        min=0,
        help="Use the first N samples; 0 uses all. [default: the recipe's eval.samples]",
    ),
]
_SAY_EVERY_SECONDS = 2.0


def eval(run: _Run, split: _Split = "validation", samples: _Samples = None, json_file: JsonFile = None) -> None:
    """Evaluate the newest whole checkpoint of RUN."""
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.core.errors import RequestError, did_you_mean

    if split not in ("validation", "test"):
        raise RequestError(f"there is no split {split!r}; {did_you_mean(split, ('validation', 'test'))}")
    check_result_file(json_file)
    from shoal.trainer.inspect import evaluate_run

    progress = _Progress()
    result = evaluate_run(run, split=split, limit=samples, on_progress=progress.update)
    if result["samples"] < result["split_samples"]:
        print(
            f"used the first {result['samples']} of {result['split_samples']} samples; --samples 0 uses all of them",
            file=sys.stderr,
        )
    for key, value in result.items():
        if value is not None:
            print(f"{key}: {value}")
    write_result(json_file, result)


class _Progress:
    """Says every few seconds how far the evaluation is: a split can take minutes."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._next = self._started + _SAY_EVERY_SECONDS

    def update(self, done: int, count: int) -> None:
        """Print a line when it is time for one."""
        now = time.monotonic()
        if now < self._next or done == 0:
            return
        from shoal.core.units import format_duration

        self._next = now + _SAY_EVERY_SECONDS
        left = (now - self._started) / done * (count - done)
        print(f"evaluated {done} of {count} samples, {format_duration(left)} left", file=sys.stderr, flush=True)
