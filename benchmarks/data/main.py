"""The data room: what caches hit, how orders mix, what fitting, a step, reading a store and HDFS
cost, and how soon an append is seen.

python benchmarks/data/main.py [--only appends|caches|fit|hdfs|order|steps|stores]
"""

import argparse
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

from appends import measure_appends
from caches import measure_caches
from fit import measure_fit
from hdfs import measure_hdfs
from orders import measure_orders
from steps import measure_steps
from stores import measure_stores

PARTS: dict[str, Callable[[], dict[str, object]]] = {
    "appends": measure_appends,
    "caches": measure_caches,
    "order": measure_orders,
    "fit": measure_fit,
    "hdfs": measure_hdfs,
    "steps": measure_steps,
    "stores": measure_stores,
}


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
