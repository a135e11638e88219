"""The data room: what caches hit, and what fitting costs.

python benchmarks/data/main.py [--only caches|fit]
"""

import argparse
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

from caches import measure_caches
from fit import measure_fit

PARTS: dict[str, Callable[[], dict[str, object]]] = {"caches": measure_caches, "fit": measure_fit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(PARTS), help="measure this part alone")
    only = parser.parse_args().only
    for name in [only] if only else sorted(PARTS):
        print(f"== {name}")
        results = PARTS[name]()
        file = Path(__file__).parent / "results" / f"{date.today()}-{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
