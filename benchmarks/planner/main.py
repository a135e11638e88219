"""Predicts a table of published runs, and times the search for the best plan of a large model.

python benchmarks/planner/main.py [TABLE.csv]

The table is not part of the repository: where it is not found beside it, only the search is measured, and nothing is written.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path

from shoal.planner.config import ShapeConfig
from shoal.planner.hardware.presets import build_cluster
from shoal.planner.hardware.software import find_software, find_stack
from shoal.planner.pricing.job import Job
from shoal.planner.search.search import Limits, search
from shoal.planner.tables.predict import predict_run
from shoal.planner.tables.score import score, score_by_source
from shoal.planner.tables.table import read_table
from shoal.tuning.planned_model import shape_costs, shape_facts

RESULTS = Path(__file__).with_name("results")
TABLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "published_runs_calibration.csv"
LARGE = ShapeConfig(layers=105, hidden=20480, heads=128, vocab=51200, sequence=2048)


def time_search(cluster: str, global_batch: int) -> dict[str, object]:
    """Processor seconds of a search for 530B parameters, on one core, with all that ``shoal plan`` asks of a plan."""
    where, software = build_cluster(cluster), find_software("megatron-core")
    job = Job(
        chain=shape_costs(LARGE, "bfloat16", software),
        cluster=where,
        stack=find_stack(software, where.device.name),
        global_batch=global_batch,
    )
    start = time.process_time()
    found = search(job, Limits(facts=shape_facts(LARGE)))
    seconds = time.process_time() - start
    best = found.ranked[0]
    print(
        f"{cluster}: {found.num_plans} plans in {seconds:.1f} s of processor time; best {best.plan}, {best.seconds:.3g} s"
    )
    return {"cluster": cluster, "plans": found.num_plans, "processor_s": seconds, "best": best.as_dict()}


def predict_table(table: Path) -> dict[str, object]:
    """The figures of every source and of all rows, with the stored constants."""
    rows = [predict_run(run) for run in read_table(table)]
    sources = {source.split(" [")[0]: found.as_dict() for source, found in score_by_source(rows).items()}
    for source, found in sources.items():
        print(source, {key: value for key, value in found.items() if value is not None})
    return {"rows": len(rows), "all": score(rows).as_dict(), "sources": sources}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path, nargs="?", default=TABLE)
    arguments = parser.parse_args()
    searches = [time_search("a100-80gb:640x8", 5120), time_search("h100:12500x8", 100_000)]
    if arguments.table == TABLE and not TABLE.exists():
        print(f"skipped the predictions: {TABLE} is not there; give a table of runs to have them")
        return
    content = {**predict_table(arguments.table), "search": searches}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{date.today().isoformat()}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
