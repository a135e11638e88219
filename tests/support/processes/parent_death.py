"""``parent_death.py PID ARGUMENTS`` becomes ``python ARGUMENTS``, and is killed when its parent PID, a test session, is."""

import os
import sys

from shoal.comm.parentdeath import die_with_parent

die_with_parent(int(sys.argv[1]))
# The kernel keeps the promise across this call.
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
