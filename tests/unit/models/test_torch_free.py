"""What the command line imports before it starts anything does not import torch."""

import subprocess
import sys


def test_importing_them_does_not_import_torch() -> None:
    imports = ", ".join(f"shoal.models.{module}" for module in ("config", "check"))
    program = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_checking_a_shipped_model_does_not_import_torch() -> None:
    program = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from shoal.models.check import check_model\n"
        "from shoal.models.config import GptConfig\n"
        "spec = SimpleNamespace(kind='tokens', vocab=256, sequence=8, features=None, classes=None, outputs=None)\n"
        "check_model(GptConfig(), spec)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
