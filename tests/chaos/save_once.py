"""One save and its retention in a process without torch, for tests that kill or starve it at every system call.

The two ``access`` calls mark in a trace where the save begins and ends.
"""

import os
import sys
from pathlib import Path

from shoal.checkpoint.retention import expire
from support.checkpoint.forged import make

root, step, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
os.access("shoal-save-begins", os.F_OK)
make(root, step, seed=seed)
expire(root, newest=step, keep=1, keep_every=None)
os.access("shoal-save-ends", os.F_OK)
