"""A file of token ids: opened as a memory map, and refused with its numbers when it is not one. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.core.units import format_bytes
from shoal.data.config import TokensConfig
from shoal.data.spec import WatchedFile

# Above this a look at every id would take seconds: then ids are sampled here, and every batch is checked as it is read.
SCANNED_BYTES = 1 << 29
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """The ids, still on disk, and how many different ones there can be."""

    ids: NDArray[Any]
    vocab: int
    file: WatchedFile
    """As it was before its ids were read."""


def open_tokens(config: TokensConfig) -> TokenFile:
    """Map a token file and look through its ids.

    Raises:
        RequestError: the file is missing, empty, torn, of another shape or type, or holds an id outside the vocabulary.
    """
    path = Path(config.path).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise RequestError(f"data.path: {path.absolute()} {what}; give a .npy or raw file of token ids")
    file = WatchedFile.observe(path.absolute())
    ids = _map_npy(path) if path.suffix == ".npy" else _map_raw(path, config.dtype)
    if ids.size == 0:
        raise RequestError(f"{path} holds 0 token ids; the corpus is empty")
    return TokenFile(ids=ids, vocab=_check_range(path, ids, config.vocab), file=file)


def _map_npy(path: Path) -> NDArray[Any]:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise RequestError(f"{path} is not a whole .npy file: {error}; write it with numpy.save") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(
            f"{path} holds {ids.dtype} of the shape {ids.shape}; token ids are whole numbers in one dimension: "
            f"save ids.reshape(-1) of an integer type"
        )
    return np.asarray(ids)


def _map_raw(path: Path, dtype: str) -> NDArray[Any]:
    kind = np.dtype(dtype).newbyteorder("<")
    size = path.stat().st_size
    if size % kind.itemsize:
        raise RequestError(
            f"{path} has {size} bytes, which is no multiple of {kind.itemsize} bytes per {dtype}; "
            f"the file is torn, or data.dtype is another"
        )
    if size == 0:
        return np.empty(0, dtype=kind)
    return np.asarray(np.memmap(path, dtype=kind, mode="r"))


def _check_range(path: Path, ids: NDArray[Any], vocab: int | None) -> int:
    is_scanned = ids.nbytes <= SCANNED_BYTES
    if vocab is None and not is_scanned:
        raise RequestError(
            f"{path} has {format_bytes(ids.nbytes)}, too much to look for its highest id at every start "
            f"(the limit is {format_bytes(SCANNED_BYTES)}); set data.vocab"
        )
    chunks = range(0, ids.size, _CHUNK)
    if not is_scanned:
        chunks = chunks[:: -(-len(chunks) * _CHUNK * ids.itemsize // SCANNED_BYTES)]
    lowest = min(int(ids[start : start + _CHUNK].min()) for start in chunks) if ids.dtype.kind == "i" else 0
    highest = max(int(ids[start : start + _CHUNK].max()) for start in chunks)
    if lowest < 0:
        raise RequestError(
            f"{path} holds the id {lowest}; token ids are 0 or more: is data.dtype the one it was written with?"
        )
    if vocab is None:
        return highest + 1
    if highest >= vocab:
        raise RequestError(
            f"{path} holds the id {highest} and data.vocab is {vocab}; set data.vocab to {highest + 1} or more, "
            f"or is data.dtype not the one it was written with?"
        )
    return vocab
