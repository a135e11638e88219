"""``shoal dash``: the page that one keeps open beside a training run."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, write_result

_Runs = Annotated[Path, typer.Argument(metavar="[RUNS]", help="A run directory, or a folder of them.")]
_Port = Annotated[
    int,
    typer.Option("--port", min=0, max=65535, help="Listen on this port, or on the next one that is free; 0 takes any."),
]
_Host = Annotated[str, typer.Option("--host", help="Listen there; other than loopback needs --token-file.")]
_Token = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="A secret with which programs may ask (Authorization: Bearer)."),
]


def dash(
    runs: _Runs = Path("runs"),
    port: _Port = 6100,
    host: _Host = "127.0.0.1",
    token_file: _Token = None,
    json_file: JsonFile = None,
) -> None:
    """Show runs in the browser: curves, ranks, timelines, failures, live. Reads run directories only; ends with Ctrl-C."""
    # Verbs import what they need when they run: see cli/main.py.
    check_result_file(json_file)
    from shoal.dashboard.server.start import DashRequest
    from shoal.dashboard.server.start import dash as serve_dashboard

    request = DashRequest(runs=runs, host=host, port=port, token_file=token_file)
    result = serve_dashboard(request, lambda line: print(line, flush=True))
    write_result(json_file, result)
