"""``shoal keys``: make the key that a process needs to talk to others beyond this machine, and show its public half.

The secret stays in its file, which only its owner can read; the public half is what goes on the lists of others.
"""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, write_result

app = typer.Typer(
    help="Make and show keys for runs on several machines.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_New = Annotated[Path, typer.Argument(metavar="FILE", help="The key file to make; its public half goes to FILE.pub.")]
_File = Annotated[Path, typer.Argument(metavar="FILE", help="A key file.")]


@app.command()
def new(file: _New, json_file: JsonFile = None) -> None:
    """Make a key in FILE, which only you can read, and its public half in FILE.pub. Nothing is ever overwritten."""
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.comm.wire.keys import make_keys, public_file

    keys = make_keys(file)
    print(f"{file}: secret, keep it to yourself")
    print(f"{public_file(file)}: {keys.public_hex}")
    write_result(json_file, {"file": file, "public_file": public_file(file), "public": keys.public_hex})


@app.command()
def show(file: _File, json_file: JsonFile = None) -> None:
    """Print the public half of the key in FILE, after checking that the key is whole and nobody else can read it."""
    check_result_file(json_file)
    from shoal.comm.wire.keys import load_keys

    keys = load_keys(file)
    print(keys.public_hex)
    write_result(json_file, {"file": file, "public": keys.public_hex})
