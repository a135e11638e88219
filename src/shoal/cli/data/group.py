"""``shoal data``: build a store out of files, look at it, prove that it is whole, and measure how fast it is read.

Every verb is a file of its own beside this one and has one line below. Exit 0: done; 1: something is not whole; 2: the request
was wrong.
"""

import typer

from shoal.cli.data.bench import bench
from shoal.cli.data.build import build
from shoal.cli.data.follow import follow
from shoal.cli.data.show import show
from shoal.cli.data.split import split
from shoal.cli.data.stats import stats
from shoal.cli.data.verify import verify

app = typer.Typer(
    help="Build, grow, show, verify and measure stores of data.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("build")(build)
app.command("follow")(follow)
app.command("show")(show)
app.command("verify")(verify)
app.command("split")(split)
app.command("stats")(stats)
app.command("bench")(bench)
