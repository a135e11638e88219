"""The admission of ranks that a launcher started on several hosts: what they must have in common before the first step.

Other code, another version or another recipe on one host trains silently. So every rank puts down what it has in the
launcher's store, rank 0 compares, and all ranks end together with one message that names the host. Data and
model are compared after they are built (``samedata.py``, ``model.py``).
"""

import hashlib
import json
import platform
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path

from torch._C._distributed_c10d import Store  # torch types this name only there

from shoal.core.errors import AgreedError, RunError
from shoal.launch.hosts.digest import code_digest

_FIXES = {
    "shoal": "install one version of Shoal on all hosts",
    "torch": "install one version of torch on all hosts",
    "python": "use one Python on all hosts",
    "code": "the version of Shoal is the same and its files are not: install the same files on all hosts",
    "recipe": "give every host the same recipe file and the same --set",
}


def facts_of(path: Path, asked: Sequence[str | None]) -> dict[str, str]:
    """What this rank has: its versions, its recipe file, and what the command line asked for beside it."""
    try:
        recipe = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        recipe = f"none ({error.strerror})"
    words = hashlib.sha256(json.dumps(list(asked)).encode()).hexdigest()[:8]
    return {
        "host": socket.gethostname(),
        "shoal": metadata.version("shoal"),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "code": code_digest(),
        "recipe": f"{recipe}-{words}",
    }


def find_difference(facts: Mapping[int, Mapping[str, str]]) -> str:
    """In what a rank differs from rank 0, with the fix; empty when all agree. Pure."""
    standard = facts[0]
    for rank, own in sorted(facts.items()):
        for name, fix in _FIXES.items():
            if own[name] != standard[name]:
                return (
                    f"rank {rank} on host {own['host']} has {name} {own[name]} and rank 0 on host {standard['host']} has "
                    f"{standard[name]}: {fix}"
                )
    return ""


def pass_admission(store: Store, own: Mapping[str, str], *, rank: int, world_size: int, seconds: float) -> list[str]:
    """Compare what all ranks have; the hosts by rank.

    Raises:
        AgreedError: a rank has something else; all ranks raise the same.
        RunError: a rank did not come.
    """
    store.set(f"door/{rank}", json.dumps(dict(own)))
    names = [f"door/{other}" for other in range(world_size)]
    try:
        if rank == 0:
            store.wait(names, timedelta(seconds=seconds))
            facts = {other: json.loads(store.get(name)) for other, name in enumerate(names)}
            verdict = {"error": find_difference(facts), "hosts": [facts[other]["host"] for other in sorted(facts)]}
            store.set("door/verdict", json.dumps(verdict))
        store.wait(["door/verdict"], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise RunError(
            f"rank {rank} on {own['host']} waited {seconds:g} s for the other ranks before the first step: {error}"
        ) from error
    verdict = json.loads(store.get("door/verdict"))
    if verdict["error"]:
        raise AgreedError(verdict["error"])
    return [str(host) for host in verdict["hosts"]]
