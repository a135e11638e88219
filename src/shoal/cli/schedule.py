"""``shoal schedule``: draw a pipeline schedule, say what it costs, and write it as CSV, SVG or JSON."""

import dataclasses
import shutil
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.console import STDOUT, JsonFile, check_result_file, has_colour, print_table, to_json, write_result
from shoal.cli.startup import LightCommand
from shoal.core.errors import RequestError

if TYPE_CHECKING:
    from shoal.schedules.player import Timeline
    from shoal.schedules.pricing import Report
    from shoal.schedules.schedule import Schedule

_LARGEST = 100_000
"""Stages, times ranks or microbatches: beyond it nobody can look at the result, and it takes a minute to make."""
_COLUMNS = ("rank", "stages", "peak activations", "versions", "busy", "idle")


class Format(StrEnum):
    """What stdout gets."""

    TEXT = "text"
    CSV = "csv"
    SVG = "svg"
    JSON = "json"


class ScheduleCommand(LightCommand):
    """Adds the families to the help, read from the catalogue when help is asked for and not on every start."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write a line per family."""
        from shoal.schedules.catalogue import FAMILIES

        with formatter.section("Families"):
            formatter.write_dl([(family.name, family.summary) for family in FAMILIES.values()])


_Name = Annotated[str, typer.Argument(metavar="NAME", help="A family of the list below, or a CSV file of your own.")]
_Ranks = Annotated[int | None, typer.Option("--pp", metavar="P", help="Ranks of the pipeline.")]
_Microbatches = Annotated[int | None, typer.Option("--microbatches", metavar="M", help="Microbatches of a step.")]
_Chunks = Annotated[
    int | None, typer.Option("--chunks", metavar="V", help="Stages per rank, where the family leaves them open.")
]
_Replicas = Annotated[
    str | None,
    typer.Option(
        "--replicas",
        metavar="R-R-...",
        help="Ranks of every stage, such as 2-1: R of them take turns at R times the work.",
    ),
]
_Format = Annotated[Format, typer.Option("--format", help="What to print; csv, svg and json alone on stdout.")]
_Forward = Annotated[float, typer.Option("--forward", metavar="TIME", help="A stage's forward.")]
_Input = Annotated[float, typer.Option("--input", metavar="TIME", help="A stage's gradient of its input.")]
_Weight = Annotated[float, typer.Option("--weight", metavar="TIME", help="A stage's gradient of its weights.")]
_Transfer = Annotated[float, typer.Option("--transfer", metavar="TIME", help="From one rank to another.")]
_Overlapped = Annotated[
    float | None,
    typer.Option("--overlapped", metavar="TIME", help="A forward and a backward at once; their sum if left out."),
]


def schedule(
    name: _Name,
    pp: _Ranks = None,
    microbatches: _Microbatches = None,
    chunks: _Chunks = None,
    replicas: _Replicas = None,
    output: _Format = Format.TEXT,
    forward: _Forward = 1.0,
    input_time: _Input = 1.0,
    weight: _Weight = 1.0,
    transfer: _Transfer = 0.0,
    overlapped: _Overlapped = None,
    json: JsonFile = None,
) -> None:
    """Draw a pipeline schedule and say what it costs: its bubble, and what each rank holds."""
    check_result_file(json)
    if json == STDOUT and output is not Format.TEXT:
        raise RequestError(f"--format {output} and --json - both write to stdout; name a file after --json")
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.schedules.pricing import Costs, build_report, price

    costs = Costs(forward=forward, input=input_time, weight=weight, transfer=transfer, overlapped=overlapped)
    found = _find(name, pp, microbatches, chunks, replicas)
    if found.grid.replicas:
        # What stages of several ranks are for: the cut gives a stage of R ranks R times the work.
        costs = dataclasses.replace(costs, stages=tuple(map(float, found.grid.replicas)))
    timeline = price(found, costs)
    report = build_report(found, timeline, costs)
    # Who wants JSON there wants no drawing beside it on stderr.
    if json != STDOUT:
        _PRINTERS[output](found, timeline, report)
    write_result(json, report.as_values())


def _find(
    name: str, ranks: int | None, microbatches: int | None, chunks: int | None, replicas: str | None
) -> "Schedule":
    from shoal.core.pipelines import parse_replicas
    from shoal.schedules.catalogue import FAMILIES, find_family, make_schedule

    turns = None if replicas is None else parse_replicas(replicas)
    if name.lower().endswith(".csv") or (name not in FAMILIES and Path(name).is_file()):
        return _read(Path(name), {"pp": ranks, "microbatches": microbatches, "chunks": chunks, "replicas": replicas})
    family = find_family(name)
    if ranks is None and turns is not None:
        ranks = sum(turns)
    if ranks is None or microbatches is None:
        missing = " and ".join(
            option for option, value in (("--pp", ranks), ("--microbatches", microbatches)) if value is None
        )
        raise RequestError(
            f"{name} needs {missing}: try shoal schedule {name} --pp {ranks or 4} --microbatches {microbatches or 8}"
        )
    per_rank = chunks or family.chunks or family.default_chunks
    size = max(1, ranks) * per_rank * max(ranks, microbatches)
    if size > _LARGEST:
        raise RequestError(
            f"{ranks} ranks with {per_rank} stage(s) each and {microbatches} microbatches make a grid of {size} cells, and at "
            f"most {_LARGEST} are drawn; ask for fewer"
        )
    return make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks, replicas=turns)


def _read(path: Path, asked: dict[str, int | str | None]) -> "Schedule":
    from shoal.schedules.catalogue import numbers_of, read_schedule

    found = read_schedule(path)
    has = numbers_of(found.grid)
    for option, value in asked.items():
        if value is not None and value != has[option]:
            raise RequestError(
                f"--{option} is {value}, and {path} has {has[option]}; leave --{option} out, or write another file"
            )
    return found


def _print_text(found: "Schedule", timeline: "Timeline", report: "Report") -> None:
    from shoal.schedules.draw import draw_time

    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    print(draw_time(found, timeline, colour=has_colour(), width=width))
    print()
    print(
        f"{report.name}: {report.bubble:.1%} idle in {report.makespan:.6g}, {report.bubble_in_own_span:.1%} within the ranks' "
        f"own spans; {found.grid}"
    )
    print()
    rows = [
        (rank.rank, _join(rank.stages), rank.peak_activations, rank.versions, f"{rank.busy:.6g}", f"{rank.idle:.6g}")
        for rank in report.per_rank
    ]
    print_table(_COLUMNS, rows)


def _join(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _print_csv(found: "Schedule", timeline: "Timeline", report: "Report") -> None:
    from shoal.schedules.csv_file import write_csv

    sys.stdout.write(write_csv(found))


def _print_svg(found: "Schedule", timeline: "Timeline", report: "Report") -> None:
    from shoal.schedules.draw import draw_svg

    sys.stdout.write(draw_svg(found, timeline))


def _print_json(found: "Schedule", timeline: "Timeline", report: "Report") -> None:
    sys.stdout.write(to_json(report.as_values()))


_PRINTERS: dict[Format, Callable[["Schedule", "Timeline", "Report"], None]] = {
    Format.TEXT: _print_text,
    Format.CSV: _print_csv,
    Format.SVG: _print_svg,
    Format.JSON: _print_json,
}
