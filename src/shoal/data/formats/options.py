"""How files are read, and what becomes of a row that does not fit: values that every format understands. No pyarrow."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from shoal.core.errors import RequestError
from shoal.data.storage.config import StorageConfig
from shoal.data.table import Schema
from shoal.data.tiers.config import CacheConfig

MAX_BATCH_BYTES = 1 << 26
MAX_VALUE_BYTES = 1 << 24


class BadRow(RequestError):
    """A row that does not fit."""

    def __init__(self, file: str, row: int, column: str | None, why: str) -> None:
        where = f"{file}, row {row}" + (f", column {column!r}" if column is not None else "")
        super().__init__(
            f"{where}: {why}; mend the row, say another type (data.types; --type of shoal data), or let such rows go to "
            "a file with data.rejects = PATH"
        )
        self.file, self.row, self.column, self.why = file, row, column, why


class Rejects:
    """Where rows go that do not fit: an error for the first, or a file of JSON lines with all of them and the reasons.

    The file appears when everything was read. Whoever reads the same data writes the same file.

    Args:
        path: of the file.
        is_appended: rows are added to what it holds at once, for whoever reads without an end.
    """

    def __init__(self, path: Path | None = None, *, is_appended: bool = False) -> None:
        self._path, self._is_appended = path, is_appended
        self._file: IO[str] | None = None
        self.count = 0

    @property
    def are_kept(self) -> bool:
        """True where a bad row is no error."""
        return self._path is not None

    def add(self, file: str, row: int, column: str | None, why: str, raw: Any = None) -> None:
        """Turn a row away.

        Raises:
            BadRow: there is no file for them.
        """
        self.count += 1
        if self._path is None:
            raise BadRow(file, row, column, why)
        if self._file is None:
            try:
                self._beside.parent.mkdir(parents=True, exist_ok=True)
                target, mode = (self._path, "a") if self._is_appended else (self._beside, "w")
                self._file = target.open(mode, encoding="utf-8")
            except OSError as error:
                raise RequestError(f"data.rejects: {self._path} cannot be written: {error.strerror}") from error
        values = {
            "file": file,
            "row": row,
            "column": column,
            "why": why,
            "raw": None if raw is None else str(raw)[:4096],
        }
        self._file.write(json.dumps(values, ensure_ascii=True) + "\n")

    @property
    def _beside(self) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.{os.getpid()}.part")

    def __enter__(self) -> "Rejects":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None and self._path is not None:
            self._file.close()
            self._file = None
            if self._is_appended:
                return
            if kind is None:
                os.replace(self._beside, self._path)
            else:
                self._beside.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What is read, and within which bounds."""

    columns: tuple[str, ...] | None = None
    """These only, in this order; all when left out."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Kinds of columns that are not left to a look at the first rows: ``f4``, ``i8``, ``bool``, ``text``, ``time``,
    ``list:f4``."""
    like: Schema | None = None
    """The columns that the rows must have, as those of a store that they are appended to: formats that do not say their types
    take these in place of a look at the first rows."""
    missing: tuple[str, ...] = ("",)
    """Texts of a CSV file that stand for a missing value."""
    delimiter: str | None = None
    """Of a CSV file; ``,`` when left out, and a tab where the name ends in .tsv."""
    header: tuple[str, ...] = ()
    """Names of the columns of a CSV file that has no header line; its first line when left out."""
    skip_lines: int = 0
    """Lines of a CSV file before its first row, where ``header`` is given."""
    quotes: bool = True
    """False where a quote in a CSV file is a letter as any other."""
    storage: StorageConfig = field(default_factory=StorageConfig)
    """Deadlines, retries and settings of the storage that the files are in."""
    cache: CacheConfig | None = None
    """What is kept near of files that are not on this machine; nothing when left out."""
    dtype: str = "uint16"
    """Of raw token ids."""
    sequence: int | None = None
    """Token ids of one row."""
    rejects: Rejects = field(default_factory=Rejects)
    batch_rows: int = 1 << 16
    """Rows of one table at most."""
    batch_bytes: int = MAX_BATCH_BYTES
    """Of one table, about; it is what bounds memory."""
    value_bytes: int = MAX_VALUE_BYTES
    """Of one line or one value at most."""
    head_rows: int = 1000
    """Rows of each file that are looked at for the types of formats that do not say them."""

    def wants(self, name: str) -> bool:
        """True for a column that is read."""
        return self.columns is None or name in self.columns
