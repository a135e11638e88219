"""Publishes one version in a process without torch, for tests that kill it at every system call.

The two ``access`` calls mark in a trace where it begins and ends.
"""

import os
import sys
from pathlib import Path

from support.checkpoint.versions import publish_one

os.access("shoal-publish-begins", os.F_OK)
publish_one(Path(sys.argv[1]), int(sys.argv[2]), keep=2)
os.access("shoal-publish-ends", os.F_OK)
