"""``shoal place``: which launcher was found in this environment, and what it makes of this process."""

import os
from dataclasses import asdict

import typer

from shoal.cli.console import JsonFile, check_result_file, print_table, write_result


def place(json_file: JsonFile = None) -> None:
    """Say which rank this process is, by whose word, and where the ranks meet; exit 2 where launchers disagree."""
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.launch.environments import read_place

    found = read_place(os.environ)
    if not found.is_launched:
        typer.echo("nobody launched this process: it is alone, and `shoal train` starts the ranks of a plan itself")
    else:
        local = "" if found.local_size is None else f" of {found.local_size}"
        print_table(
            ("what", "found"),
            [
                ("launcher", found.launcher),
                ("rank", f"{found.rank} of {found.world_size}"),
                ("on this host", f"{found.local_rank}{local}"),
                ("hosts", ", ".join(found.hosts) or "the launcher does not say"),
                ("ranks meet at", found.store or f"{found.address}:{found.port}"),
                ("restarts so far", str(found.generation)),
                ("by", ", ".join(found.evidence)),
            ],
        )
    write_result(json_file, asdict(found))
