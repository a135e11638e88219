"""What the command line imports before it starts anything does not import torch."""

import subprocess
import sys

import pytest

FREE = ["config", "spec", "order", "check", "sources.corpus", "sources.tokens", "sources.synthetic", "sources.digits"]


@pytest.mark.parametrize("modules", [FREE])
def test_importing_them_does_not_import_torch(modules: list[str]) -> None:
    imports = ", ".join(f"shoal.data.{module}" for module in modules)
    program = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_checking_every_shipped_source_imports_neither_torch_nor_scikit_learn() -> None:
    program = (
        "import sys\n"
        "from shoal.data.check import check_data\n"
        "from shoal.data.config import DigitsConfig, StdlibConfig, SyntheticConfig\n"
        "for config in (StdlibConfig(), DigitsConfig(), SyntheticConfig()):\n"
        "    check_data(config)\n"
        "sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
