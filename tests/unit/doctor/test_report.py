import subprocess
import sys

from shoal.doctor.checks import State, judge
from shoal.doctor.report import examine


def test_everything_a_run_needs_is_looked_at(tmp_path):
    names = [check.name for check in examine(tmp_path, quick=True)]
    assert len(names) == len(set(names))
    wanted = {
        "python",
        "shoal",
        "torch",
        "cores",
        "tiles",
        "memory",
        "disk",
        "shared memory",
        "open files",
        "backends",
        "interface",
        "ports",
    }
    assert wanted <= set(names)


def test_it_works_without_torch(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from shoal.doctor.report import examine\n"
        "print({check.name: check for check in examine(Path(sys.argv[1]), quick=True)}['torch'].state)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "ok"


def test_wrong_goes_before_note():
    assert judge("x", "y", values={}).state is State.OK
    assert judge("x", "y", values={}, note="n").state is State.NOTE
    both = judge("x", "y", values={}, note="n", wrong="w")
    assert both.state is State.WRONG and both.advice == "w"
