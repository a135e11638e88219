"""``shoal export``: figures of runs for Prometheus, OpenTelemetry, Perfetto and Grafana."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, log, write_result
from shoal.core.errors import RequestError

_Runs = Annotated[
    Path | None, typer.Argument(metavar="RUNS", help="A folder of run directories, or one run; runs when left out.")
]
_Prometheus = Annotated[
    int | None,
    typer.Option("--prometheus", metavar="PORT", min=0, max=65535, help="Answer scrapes there; 0 takes any port."),
]
_Host = Annotated[str, typer.Option("--host", help="Listen there; other than loopback needs --token-file.")]
_Token = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="A secret that every scrape has to give.")
]
_Otlp = Annotated[
    str | None, typer.Option("--otlp", metavar="URL", help="Send to an OpenTelemetry collector (shoal[otel]).")
]
_Every = Annotated[
    float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Between two that are sent to --otlp.")
]
_Once = Annotated[
    bool, typer.Option("--once", help="Print the text for Prometheus, or send to --otlp, once, and exit.")
]
_Perfetto = Annotated[
    Path | None, typer.Option("--perfetto", metavar="FILE", help="Write a trace of one whole run for Perfetto.")
]
_Grafana = Annotated[bool, typer.Option("--grafana", help="Print a Grafana dashboard for these metrics.")]


def export(
    runs: _Runs = None,
    prometheus: _Prometheus = None,
    host: _Host = "127.0.0.1",
    token_file: _Token = None,
    otlp: _Otlp = None,
    every: _Every = 10.0,
    once: _Once = False,
    perfetto: _Perfetto = None,
    grafana: _Grafana = False,
    json_file: JsonFile = None,
) -> None:
    """Hand the figures of RUNS to other programs; they are read from run directories, so no run notices."""
    # Verbs import what they need when they run: see cli/main.py.
    check_result_file(json_file)
    check_result_file(perfetto, "--perfetto")
    is_metrics = prometheus is not None or otlp is not None or once
    wanted = [is_metrics, perfetto is not None, grafana]
    if sum(wanted) != 1:
        raise RequestError(
            "say one of what to export: --prometheus PORT and --otlp URL (or --once to print), --perfetto FILE, --grafana"
        )
    folder = runs if runs is not None else Path("runs")
    if grafana:
        from shoal.dashboard.exporters.grafana import dashboard_text

        print(dashboard_text(), end="")
        write_result(json_file, {"grafana": True})
        return
    if perfetto is not None:
        from shoal.dashboard.exporters.wholerun import export_trace

        result = export_trace(folder, perfetto)
        log(
            f"wrote {perfetto}: {result['events']} events of {result['ranks']} ranks; open it at https://ui.perfetto.dev"
        )
        write_result(json_file, result)
        return
    from shoal.dashboard.exporters.service import ExportRequest, serve_metrics

    request = ExportRequest(
        folder=folder, port=prometheus, host=host, token_file=token_file, otlp=otlp, every=every, once=once
    )
    write_result(json_file, serve_metrics(request, say=log, show=lambda text: print(text, end="")))
