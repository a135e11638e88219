"""The installed ``shoal`` command, run as a user runs it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SHOAL = Path(sys.executable).parent / "shoal"


@pytest.fixture
def shoal(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Run ``shoal`` with these arguments in an empty folder."""

    def run(*arguments: object, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(SHOAL), *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
