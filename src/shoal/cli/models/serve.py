"""``shoal serve``: predictions over HTTP with the newest model that a run has published."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.console import JsonFile, check_result_file, write_result

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory; the run may be under way.")]
_Host = Annotated[str, typer.Option("--host", help="Listen there; other than loopback needs --token-file.")]
_Port = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Listen on this port; 0 takes any, and prints it.")
]
_Token = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="A secret that every request has to give.")
]
_Batch = Annotated[int, typer.Option("--batch", metavar="N", min=1, max=1024, help="Rows of a pass of the model.")]
_Wait = Annotated[
    float, typer.Option("--max-wait", metavar="MS", min=0.0, help="Milliseconds that a request waits for others.")
]
_Rows = Annotated[int, typer.Option("--max-rows", metavar="N", min=1, max=4096, help="Rows that a request may have.")]
_Deadline = Annotated[
    float, typer.Option("--deadline", metavar="SECONDS", min=0.01, help="After which a request is answered with 504.")
]


def serve(
    run: _Run,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    token_file: _Token = None,
    batch: _Batch = 8,
    max_wait: _Wait = 2.0,
    max_rows: _Rows = 64,
    deadline: _Deadline = 10.0,
    json_file: JsonFile = None,
) -> None:
    """Answer predictions with the newest published model of RUN, until SIGTERM."""
    # Verbs import what they need when they run: see cli/main.py.
    check_result_file(json_file)
    from shoal.serve.server import ServeRequest
    from shoal.serve.server import serve as serve_run
    from shoal.serve.token import read_token

    request = ServeRequest(
        run_dir=run,
        host=host,
        port=port,
        token_file=token_file,
        batch=batch,
        max_wait_ms=max_wait,
        max_rows=max_rows,
        deadline_seconds=deadline,
    )
    read_token(host, token_file)

    def tell(address: str, served: dict[str, Any]) -> None:
        if served["version"] is None:
            what = f"its newest whole checkpoint (step {served['step']}), for it has published nothing"
        else:
            what = f"version {served['version']} (step {served['step']})"
        print(f"serving {run} at {address}: {what}", flush=True)

    result = serve_run(request, on_ready=tell)
    write_result(json_file, result)
