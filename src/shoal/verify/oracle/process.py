"""The process that computes what plans are compared with: one process without parallelism, by whichever rule the plan has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.launch.pool import serve
from shoal.verify.oracle.compression import run_compressed
from shoal.verify.oracle.delayed import run_delayed
from shoal.verify.oracle.islands import run_islands
from shoal.verify.oracle.replay import run_replay
from shoal.verify.reference.case import Case, Tree, UpdateLog
from shoal.verify.reference.train import run_reference


def _run_job(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    case = Case(**job["case"])
    if "log" in job:
        return run_replay(case, UpdateLog.from_values(job["log"]), Path(job["folder"]))
    tree = Tree(**job["tree"])
    return _rule_of(tree)(case, tree, Path(job["folder"]))


def _rule_of(tree: Tree) -> Callable[[Case, Tree, Path], dict[str, Any]]:
    if tree.islands > 1:
        return run_islands
    if tree.delay is not None:
        return run_delayed
    return run_compressed if tree.compression else run_reference


def main() -> None:
    """Entry point: serves jobs."""
    serve(_run_job)


if __name__ == "__main__":
    main()
