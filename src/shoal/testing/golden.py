"""Golden values: numbers that were right once and must not change unnoticed.

A golden file is JSON beside the tests. ``SHOAL_WRITE_GOLDEN=1`` rewrites it; the diff in the commit is then the record of
what changed, and CHANGELOG's *Numerics* says why.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path


def check_golden(path: Path, values: Sequence[float], *, relative: float) -> None:
    """Compare a list of numbers with the golden file at ``path``.

    Args:
        path: the golden file.
        values: what was computed now.
        relative: allowed relative error; machines differ in the last bits of a matrix product.

    Raises:
        AssertionError: a value differs, or the file is missing.
    """
    if os.environ.get("SHOAL_WRITE_GOLDEN") == "1":
        path.write_text(json.dumps(list(values), indent=1) + "\n")
        return
    assert path.exists(), f"no golden file {path}; write it with SHOAL_WRITE_GOLDEN=1"
    golden = json.loads(path.read_text())
    assert len(golden) == len(values), f"{path.name} has {len(golden)} values, this run gave {len(values)}"
    for index, (before, now) in enumerate(zip(golden, values, strict=True)):
        error = abs(now - before) / max(abs(before), 1e-12)
        assert error <= relative, f"{path.name}[{index}] was {before!r} and is {now!r} (off by {error:.2g})"
