"""``shoal eval``: loss and accuracy of a run's newest whole checkpoint on a held-out split."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.result import JsonFile, check_result_file, write_result

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
_Split = Annotated[str, typer.Option("--split", metavar="validation|test", help="Which held-out split.")]
_Samples = Annotated[int, typer.Option("--samples", metavar="N", min=0, help="Use the first N samples; 0 uses all.")]


def eval(run: _Run, split: _Split = "validation", samples: _Samples = 0, json_file: JsonFile = None) -> None:
    """Evaluate the newest whole checkpoint of RUN."""
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.core.errors import RequestError, did_you_mean

    if split not in ("validation", "test"):
        raise RequestError(f"there is no split {split!r}; {did_you_mean(split, ('validation', 'test'))}")
    check_result_file(json_file)
    from shoal.trainer.inspect import evaluate_run

    result = evaluate_run(run, split=split, limit=samples)
    for key, value in result.items():
        print(f"{key}: {value}")
    write_result(json_file, result)
