"""``shoal data show``: what a store of data consists of."""

from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, write_result
from shoal.core.errors import RequestError

_Store = Annotated[str, typer.Argument(metavar="STORE", help="The store's folder or address.")]


def show(store: _Store, json_file: JsonFile = None) -> None:
    """Show the versions, columns and blocks of STORE. Sizes are checked, bytes are not: see verify."""
    check_result_file(json_file)
    from pathlib import Path

    if not Path(store).is_dir():
        raise RequestError(f"{store} is no store; make one with: shoal data build SRC {store}")
    write_result(json_file, {"store": store})
