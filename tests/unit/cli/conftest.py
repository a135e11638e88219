"""The ``shoal`` command: forked with everything imported, or as it is installed, for tests of how it begins and ends."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.processes.command import start_command

SHOAL = Path(sys.executable).parent / "shoal"


@pytest.fixture
def shoal(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Run ``shoal`` with these arguments in an empty folder."""

    def run(*arguments: object, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with start_command(*arguments, environment=environment, cwd=tmp_path, **streams) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    return run


@pytest.fixture
def installed_shoal(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """The same with the command as a user runs it."""

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
