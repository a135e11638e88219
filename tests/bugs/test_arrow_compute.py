"""Story: a table of Parquet files with texts ended in ``module 'pyarrow' has no attribute 'compute'`` in processes where nothing
else had imported that part of pyarrow: a reader of its own, such as a script that only opens data."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq

READ = """
import sys
from shoal.data.formats.opening import open_tables
assert "pyarrow.compute" not in sys.modules
_, tables = open_tables(sys.argv[1])
print([table["text"].value(row) for table in tables for row in range(table.num_rows)])
"""


def test_texts_are_read_where_nothing_else_uses_arrow(tmp_path):
    pq.write_table(pa.table({"text": ["a", "b", "a"]}), tmp_path / "a.parquet")
    command = [sys.executable, "-c", READ, str(tmp_path / "a.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['a', 'b', 'a']"
