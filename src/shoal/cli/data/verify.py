"""``shoal data verify``: whether a store is what was written."""

from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, log, write_result

_Store = Annotated[str, typer.Argument(metavar="STORE", help="The store's folder or address.")]
_Version = Annotated[
    int | None,
    typer.Option("--version", metavar="N", min=1, help="Which version's blocks; those of all when left out."),
]
_Delete = Annotated[
    float | None,
    typer.Option(
        "--delete-unreferenced",
        metavar="HOURS",
        min=0.0,
        help="Delete files that no version names and that are so old.",
    ),
]


def verify(store: _Store, version: _Version = None, delete: _Delete = None, json_file: JsonFile = None) -> None:
    """Read every byte of STORE and compare it with its digest. Exit 1 if a file is not as it was written."""
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.data.store.checks.unreferenced import delete_unreferenced
    from shoal.data.store.checks.whole import verify_store
    from shoal.data.store.folder import open_folder

    folder = open_folder(store)

    def tell(done: int, total: int) -> None:
        if done % 1000 == 0:
            log(f"{done} of {total} blocks read")

    problems = verify_store(folder, version=version, on_block=tell)
    print(f"{folder.address}: {'whole' if not problems else 'not whole'}")
    for problem in problems:
        print(f"  {problem.file}: {problem.problem}")
    deleted = []
    if delete is not None and not problems:
        deleted = [entry.path for entry in delete_unreferenced(folder, older_s=delete * 3600)]
        print(f"deleted {len(deleted)} files that no version names")
    write_result(json_file, {"store": folder.address, "whole": not problems, "problems": problems, "deleted": deleted})
    if problems:
        raise typer.Exit(1)
