"""``shoal data follow``: rows that arrive in a folder or a topic become versions of a store, each row once."""

import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.console import JsonFile, check_result_file, log, write_result
from shoal.core.errors import RequestError

_Source = Annotated[str, typer.Argument(metavar="SRC", help="A folder of files, or kafka://host:port/topic.")]
_Target = Annotated[
    str, typer.Argument(metavar="STORE", help="The store; made with the first rows where there is none.")
]
_Format = Annotated[
    str | None, typer.Option("--format", metavar="NAME", help="Of the files; by their names if left out.")
]
_Pattern = Annotated[str | None, typer.Option("--pattern", metavar="GLOB", help="Which files of the folder.")]
_Key = Annotated[
    str | None,
    typer.Option("--key", metavar="COLUMN", help="The column that rows are found by, of a store that is made."),
]
_Columns = Annotated[
    str | None, typer.Option("--columns", metavar="A,B", help="These columns only; all when left out.")
]
_Type = Annotated[
    list[str] | None,
    typer.Option("--type", metavar="COLUMN=TYPE", help="Type of a column of a store that is made; may be given again."),
]
_Every = Annotated[
    float,
    typer.Option("--every", metavar="SECONDS", min=0.05, help="A file is taken in when it was the same for so long."),
]
_Idle = Annotated[
    float | None,
    typer.Option(
        "--until-idle", metavar="SECONDS", min=0, help="End when nothing has arrived for so long; else never."
    ),
]
_Rejects = Annotated[
    Path | None,
    typer.Option("--rejects", metavar="FILE", help="Add rows that do not fit to FILE; else the first is an error."),
]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="KEY=VALUE", help="A setting of the store's or librdkafka's client; may be given again."
    ),
]


def follow(
    source: _Source,
    target: _Target,
    format: _Format = None,
    pattern: _Pattern = None,
    key: _Key = None,
    columns: _Columns = None,
    type: _Type = None,
    every: _Every = 0.4,
    until_idle: _Idle = None,
    rejects: _Rejects = None,
    option: _Set = None,
    json_file: JsonFile = None,
) -> None:
    """Take in what arrives at SRC, as new versions of STORE, until SIGTERM. Killed and run again, it goes on where it was."""
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.cli.data.opening import read_types
    from shoal.data.formats.options import ReadOptions, Rejects
    from shoal.data.storage.config import StorageConfig
    from shoal.data.store.ingest.files import FolderArrivals
    from shoal.data.store.ingest.loop import take_in
    from shoal.data.store.ingest.messages import TopicArrivals
    from shoal.data.store.writer import BuildOptions

    settings = read_options(option or ())
    is_topic = source.startswith("kafka://")
    if is_topic and (format or pattern):
        raise RequestError("--format and --pattern are of files; messages of a topic are JSON objects: leave them out")
    read = ReadOptions(
        types=read_types(type or ()),
        columns=tuple(columns.split(",")) if columns else None,
        rejects=Rejects(rejects, is_appended=True),
        storage=StorageConfig() if is_topic else StorageConfig(options=settings),
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    arrivals: Any = (
        TopicArrivals(source, options=read, settings=settings)
        if is_topic
        else FolderArrivals(
            source, format=format, pattern=pattern, options=read, warn=lambda text: log(f"warning: {text}")
        )
    )
    try:
        done = take_in(
            arrivals,
            target,
            options=BuildOptions(key=key),
            every_s=every,
            idle_s=until_idle,
            is_over=stop.is_set,
            on_version=lambda made, what: print(
                f"{target}: version {made.version}, {made.num_rows} rows, with {what}", flush=True
            ),
        )
    finally:
        arrivals.close()
    if read.rejects.count:
        log(f"{read.rejects.count} rows did not fit and are in {rejects}")
    write_result(
        json_file,
        {"store": target, "versions": done.versions, "rows": done.rows, "rejected": read.rejects.count},
    )


def read_options(said: list[str] | tuple[str, ...]) -> dict[str, str]:
    """Settings by their names, out of KEY=VALUE.

    Raises:
        RequestError: one of them is none.
    """
    found = {}
    for one in said:
        name, equals, value = one.partition("=")
        if not (name and equals):
            raise RequestError(f"--option {one} is no KEY=VALUE; write it like --option region=us-east-1")
        found[name] = value
    return found
