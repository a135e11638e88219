"""Whether a store is what was written: every byte of all files that its versions name, and whether they agree with each other."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.data.receipt import hash_rows
from shoal.data.store.block import read_block
from shoal.data.store.errors import BrokenFile
from shoal.data.store.folder import BLOCKS, INDEX, StoreFolder, block_name
from shoal.data.store.index import PartIndex, run_schema, sortable_keys
from shoal.data.store.manifest import FileRef, Manifest
from shoal.data.store.reader import read_blocks
from shoal.data.store.splits import list_splits, read_split
from shoal.data.store.stats import describe_json
from shoal.data.table import Column

_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong with one file."""

    file: str
    problem: str


def verify_store(
    folder: StoreFolder, *, version: int | None = None, on_block: Callable[[int, int], None] = lambda done, total: None
) -> list[Problem]:
    """Read a store through.

    Args:
        folder: of the store.
        version: the one whose blocks are read; the newest, which has the blocks of all, when left out.
        on_block: told how many blocks are read, and how many there are.

    Raises:
        RequestError: there is no store.
    """
    problems: list[Problem] = []
    versions = folder.versions()
    if not versions:
        folder.manifest()
    for number in versions:
        _try(problems, lambda number=number: folder.manifest(number))  # type: ignore[misc]
    try:
        manifest = folder.manifest(version)
        problems += _verify_blocks(folder, manifest, on_block)
    except BrokenFile as error:
        if all(problem.file != error.file for problem in problems):
            problems.append(Problem(file=error.file, problem=error.problem))
    for name in list_splits(folder):
        _try(problems, lambda name=name: read_split(folder, name))  # type: ignore[misc]
    return problems


def _try(problems: list[Problem], read: Callable[[], object]) -> None:
    try:
        read()
    except BrokenFile as error:
        problems.append(Problem(file=error.file, problem=error.problem))


def _verify_blocks(folder: StoreFolder, manifest: Manifest, on_block: Callable[[int, int], None]) -> list[Problem]:
    problems: list[Problem] = []
    blocks = read_blocks(folder, manifest)
    keys: list[Column | None] = []
    for number in range(len(blocks)):
        ref = FileRef(
            digest=blocks.digest(number),
            num_bytes=int(blocks.num_bytes[number]),
            num_rows=int(blocks.num_rows[number]),
        )
        name = f"{folder.address}/{BLOCKS}/{block_name(ref.digest)}"
        key = None
        try:
            table = read_block(folder.read(BLOCKS, ref), manifest.schema, file=name)
            if len(table) != ref.num_rows:
                raise BrokenFile(name, f"it has {len(table)} rows, and the manifest says {ref.num_rows}")
            if blocks.stats.value(number) != describe_json(table):
                problems.append(
                    Problem(file=name, problem="the statistics in the list of blocks are not those of its rows")
                )
            if manifest.key is not None:
                key = table[manifest.key].take(np.arange(len(table), dtype=np.int64))
        except BrokenFile as error:
            problems.append(Problem(file=error.file, problem=error.problem))
        keys.append(key)
        on_block(number + 1, len(blocks))
    if manifest.key is not None:
        problems += _verify_index(folder, manifest, keys)
    hashes = 0
    for start in range(0, manifest.num_rows, _AT_ONCE):
        hashes += hash_rows(np.arange(start, min(manifest.num_rows, start + _AT_ONCE), dtype=np.int64))
    if hashes % 2**128 != manifest.row_hashes:
        problems.append(Problem(file=folder.address, problem="the sum of its row hashes is not the manifest's"))
    return problems


def _verify_index(folder: StoreFolder, manifest: Manifest, keys: list[Column | None]) -> list[Problem]:
    assert manifest.key is not None
    field, problems, first = manifest.schema[manifest.key], [], 0
    for part in manifest.parts:
        columns = keys[first : first + part.num_blocks]
        first += part.num_blocks
        if part.index is None or any(column is None for column in columns):
            continue
        try:
            index = PartIndex(folder, part.index, field)
            runs = [folder.read_table(INDEX, ref, run_schema(field)) for ref in index.refs()]
        except BrokenFile as error:
            problems.append(Problem(file=error.file, problem=error.problem))
            continue
        there = [column for column in columns if column is not None]
        found = np.concatenate([sortable_keys(column) for column in there])
        rows = np.concatenate([run["row"].values for run in runs])
        said = np.concatenate([run["key"].values for run in runs])
        count = sum(len(column) if column.valid is None else int(column.valid.sum()) for column in there)
        is_right = len(rows) == count and (not count or (rows.min() >= 0 and rows.max() < len(found)))
        if not is_right or bool((found[rows] != said).any()) or bool((said[1:] < said[:-1]).any()):
            file = f"{folder.address}/{INDEX}/{block_name(part.index.digest)}"
            problems.append(Problem(file=file, problem="it does not lead from the keys to their rows"))
    return problems
