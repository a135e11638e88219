"""Which versions of a store there are, also where nothing can be listed."""

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.data.store.folder import is_store, open_folder
from shoal.data.store.reader import open_store
from shoal.data.store.writer import append_store, build_store
from shoal.data.table import Table, number_column
from support.data.webserver import Web, serving


def _table(first: int) -> Table:
    return Table.of([number_column("x", np.arange(first, first + 10))])


def test_the_newest_version_is_found_on_a_server_that_does_not_list(tmp_path):
    web = Web()
    with serving(web):
        address = f"{web.address}/data/rows"
        assert not is_store(address)
        with pytest.raises(RequestError, match="is no store of data"):
            open_store(address)
        for version in range(1, 10):
            if version == 1:
                build_store([_table(0)], str(tmp_path))
            else:
                append_store([_table(10 * version - 10)], str(tmp_path))
            files = (path for path in tmp_path.rglob("*") if path.is_file())
            web.files = {f"data/rows/{path.relative_to(tmp_path).as_posix()}": path.read_bytes() for path in files}
            assert open_folder(address).versions() == list(range(1, version + 1))
        reader = open_store(address)
        assert reader.version == 9 and reader.read(np.array([0, 89]))["x"].values.tolist() == [0, 89]
        with pytest.raises(RequestError, match="no version 12; it has versions 1 to 9"):
            open_store(address, version=12)
