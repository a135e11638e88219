"""Predicts a table of published runs, and times the search for the best plan of a large model.

python benchmarks/planner/main.py TABLE.csv
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path

from shoal.costs.transformer import TransformerShape, transformer_chain
from shoal.planner.job import Job
from shoal.planner.predict import predict_run
from shoal.planner.presets import build_cluster
from shoal.planner.score import score, score_by_source
from shoal.planner.search import search
from shoal.planner.stacks import find_stack
from shoal.planner.table import read_table

RESULTS = Path(__file__).with_name("results")
LARGE = TransformerShape(layers=105, hidden=20480, heads=128, vocab=51200, sequence=2048, fused_attention=True)


def time_search(cluster: str, global_batch: int) -> dict[str, object]:
    """Processor seconds of a search for 530B parameters, on one core."""
    where = build_cluster(cluster)
    job = Job(
        chain=transformer_chain(LARGE),
        cluster=where,
        stack=find_stack("megatron-core", where.device.name),
        global_batch=global_batch,
    )
    start = time.process_time()
    found = search(job)
    seconds = time.process_time() - start
    best = found.ranked[0]
    print(
        f"{cluster}: {found.num_plans} plans in {seconds:.1f} s of processor time; best {best.plan}, {best.seconds:.3g} s"
    )
    return {"cluster": cluster, "plans": found.num_plans, "processor_s": seconds, "best": best.as_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    arguments = parser.parse_args()
    rows = [predict_run(run) for run in read_table(arguments.table)]
    sources = {source.split(" [")[0]: found.as_dict() for source, found in score_by_source(rows).items()}
    for source, found in sources.items():
        print(source, {key: value for key, value in found.items() if value is not None})
    searches = [time_search("a100-80gb:640x8", 5120), time_search("h100:12500x8", 100_000)]
    content = {"rows": len(rows), "all": score(rows).as_dict(), "sources": sources, "search": searches}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{date.today().isoformat()}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
