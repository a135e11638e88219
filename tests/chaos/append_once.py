"""One append to a store in a process without torch, for tests that kill it at every system call.

The two ``access`` calls mark in a trace where the append begins and ends.
"""

import os
import sys

from shoal.data.store.blockwriter import BlockOptions
from shoal.data.store.writer import append_store
from support.data.tables import make_table

address, first = sys.argv[1], int(sys.argv[2])
os.access("shoal-append-begins", os.F_OK)
append_store(
    [make_table(300, first=first)],
    address,
    block=BlockOptions(target_bytes=1 << 14),
    offsets={"log": first + 300},
    after={"log": first},
)
os.access("shoal-append-ends", os.F_OK)
