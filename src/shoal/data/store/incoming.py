"""From the address of data to the units that a build shares out among processes."""

from collections.abc import Sequence

from shoal.core.errors import RequestError
from shoal.data.store.tokenfiles import token_units
from shoal.data.store.units import Unit
from shoal.data.table import Schema


def open_units(address: str, *, format: str | None = None, dtype: str = "uint16") -> tuple[Sequence[Unit], Schema]:
    """The units of some data and their columns.

    Args:
        address: a file, a folder or an address.
        format: what it is; by the names of its files when left out.
        dtype: of raw token ids.

    Raises:
        RequestError: there is no such data, its format is unknown, or its files have different columns.
    """
    if format == "tokens" or (format is None and address.endswith((".npy", ".bin"))):
        return token_units(address, dtype=dtype)
    raise RequestError(f"{address}: the format is not known")
