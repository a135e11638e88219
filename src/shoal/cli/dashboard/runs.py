"""``shoal runs``: the runs of a folder, two of them side by side, and taking away old ones."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.console import JsonFile, check_result_file, log, print_table, write_result
from shoal.cli.startup import LightGroup
from shoal.core.errors import EXIT_NO


class RunsGroup(LightGroup):
    """``shoal runs FOLDER`` lists: what is no verb of the group is a folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put ``list`` in front where no verb stands there."""
        is_verb = bool(args) and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if is_verb else ["list", *args])


app = typer.Typer(
    help="List the runs of a folder (shoal runs FOLDER), compare two, take away old ones.",
    no_args_is_help=False,
    rich_markup_mode=None,
)

_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of run directories; runs when left out.")]
_Filter = Annotated[
    str | None,
    typer.Option(
        "--filter", metavar="TEXT", help="Only runs with this in name, plan, status or hash, or in one: status=failed."
    ),
]
_Sort = Annotated[
    str, typer.Option("--sort", metavar="COLUMN", help="Order by a column; -COLUMN is the other way round.")
]
_Top = Annotated[int | None, typer.Option("--top", metavar="N", min=1, help="Show so many.")]


@app.command("list")
def list_runs(
    folder: _Folder = Path("runs"),
    filter_text: _Filter = None,
    sort: _Sort = "age",
    top: _Top = None,
    json_file: JsonFile = None,
) -> None:
    """List the runs of a folder."""
    # Verbs import what they need when they run: see cli/main.py.
    check_result_file(json_file)
    from shoal.dashboard.terminal.listing import COLUMNS, cells_of, choose_rows, list_folder

    found = list_folder(folder)
    rows = choose_rows(found["runs"], filter_text=filter_text, sort=sort, top=top)
    if rows:
        print_table(COLUMNS, [cells_of(row, found["now"]) for row in rows])
    else:
        log(
            f"no runs in {folder}"
            if not found["runs"]
            else f"none of {len(found['runs'])} runs matches {filter_text!r}"
        )
    for skipped in found["skipped"]:
        log(f"skipped {skipped['name']}: {skipped['reason']}")
    write_result(json_file, {**found, "runs": rows})


_First = Annotated[Path, typer.Argument(metavar="A", help="A run directory.")]
_Second = Annotated[Path, typer.Argument(metavar="B", help="Another one.")]


@app.command("compare")
def compare_runs(first: _First, second: _Second, json_file: JsonFile = None) -> None:
    """Show how two runs differ: recipe, plan, results, and the first step at which they part."""
    check_result_file(json_file)
    from shoal.dashboard.terminal.comparing import compare, lines_of

    found = compare(first, second)
    for line in lines_of(found):
        print(line)
    write_result(json_file, found)


_Older = Annotated[
    str | None, typer.Option("--older", metavar="TIME", help="Only runs that wrote nothing for so long, such as 30d.")
]
_Newest = Annotated[int | None, typer.Option("--keep", metavar="N", min=0, help="The newest N of these stay.")]
_Failed = Annotated[bool, typer.Option("--failed", help="Only runs that failed.")]
_Interrupted = Annotated[bool, typer.Option("--interrupted", help="Only runs that were interrupted.")]
_Completed = Annotated[bool, typer.Option("--completed", help="Only runs that were completed.")]
_Name = Annotated[str | None, typer.Option("--name", metavar="TEXT", help="Only runs with this in their name.")]
_Yes = Annotated[
    bool, typer.Option("--yes", help="Do it; without this, what would go is shown and nothing is removed.")
]


@app.command("prune")
def prune_runs(
    folder: _Folder = Path("runs"),
    older: _Older = None,
    keep: _Newest = None,
    failed: _Failed = False,
    interrupted: _Interrupted = False,
    completed: _Completed = False,
    name: _Name = None,
    yes: _Yes = False,
    json_file: JsonFile = None,
) -> None:
    """Take away old runs, whole run directories only; without --yes it says which these would be."""
    check_result_file(json_file)
    from shoal.core.units import format_bytes, parse_duration
    from shoal.dashboard.cleanup.choice import Conditions
    from shoal.dashboard.cleanup.prune import prune

    wanted = {"failed": failed, "interrupted": interrupted, "completed": completed}
    conditions = Conditions(
        older_seconds=parse_duration(older) if older is not None else None,
        keep=keep,
        statuses=tuple(status for status in ("failed", "interrupted", "completed") if wanted[status]),
        names=name,
    )
    found = prune(folder, conditions, really=yes)
    rows = [(one["run"], one["outcome"], format_bytes(one["bytes"]), one["reason"]) for one in found["runs"]]
    if rows:
        print_table(("run", "", "size", "because"), rows)
    else:
        log(f"no runs in {folder}")
    goes = [one for one in found["runs"] if one["outcome"] in ("goes", "gone")]
    size = format_bytes(sum(one["bytes"] for one in goes))
    log(
        f"{len(goes)} of {len(rows)} runs {'are gone' if yes else 'would go'}, {size}"
        + ("" if yes else "; --yes does it")
    )
    write_result(json_file, found)
    if any(one["outcome"] == "failed" for one in found["runs"]):
        raise typer.Exit(EXIT_NO)
