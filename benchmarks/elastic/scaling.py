"""What the decisions of an elastic run cost as hosts grow in number: processor time of one event, and bytes of one view.

python benchmarks/elastic/scaling.py [--hosts 10 100 1000 10000]

A simulation: the state machine of ``elastic/group.py`` is given what so many hosts would tell it. No process, no network.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

from shoal.elastic import group
from shoal.elastic.commit import Holding, Shard, choose_step
from shoal.elastic.groupchanges import Died, HeardAgain, Ready, Ticked
from shoal.elastic.groupstate import Host, State, Unit, Wanted

HERE = Path(__file__).resolve().parent
SECONDS = 0.5


def build(hosts: int) -> State:
    """A run of one replica on each host, with its first view."""
    state = State(wanted=Wanted(num_logical=hosts, lease_seconds=10.0))
    units, known = {}, {}
    for number in range(hosts):
        name, member = f"host-{number}", f"rank {number}"
        unit = Unit(name=f"replica-{number}", spare=False, members={0: member}, hosts={member: name})
        units[unit.name], known[name] = unit, Host(heard=0.0, agent="a", slots=1)
    state = group.replace(state, units=units, hosts=known, began=0.0)
    # All have joined, and all but one are ready: told one after the other, that would cost the square of the hosts.
    units = {
        name: unit if name == "replica-0" else group.replace(unit, ready=frozenset(unit.members.values()))
        for name, unit in state.units.items()
    }
    state, _ = group.step(group.replace(state, units=units), Ready(member="rank 0", now=0.0))
    assert state.view is not None and len(state.view.replicas) == hosts
    return state


def cost(call: Callable[[], object]) -> float:
    """Processor seconds of one call."""
    count, begun = 0, time.process_time()
    while (spent := time.process_time() - begun) < SECONDS:
        call()
        count += 1
    return spent / count


def measure(hosts: int) -> dict[str, float]:
    """Of so many hosts."""
    state = build(hosts)
    # All that a turn of the coordinator may hear; a host of this run tells eight times in a lease.
    heard = HeardAgain(agents={f"host-{one}": "a" for one in range(hosts)}, now=1.0)
    reports = [Holding(member=f"rank {one}", own=(Shard(step=9, index=0, num_shards=1),)) for one in range(hosts)]
    assert state.view is not None
    return {
        "heartbeat_us": round(1e6 * cost(lambda: group.step(state, heard)) / hosts, 2),
        "tick_us": round(1e6 * cost(lambda: group.step(state, Ticked(now=1.0))), 1),
        "death_us": round(1e6 * cost(lambda: group.step(state, Died(member="rank 1", cause="", now=1.0))), 1),
        "choose_step_us": round(1e6 * cost(lambda: choose_step(reports)), 1),
        "view_bytes": len(state.view.to_json()),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[10, 100, 1000, 10000])
    options = parser.parse_args()
    results = {"date": str(date.today()), "machine": platform.machine()}
    for hosts in options.hosts:
        results[str(hosts)] = found = measure(hosts)
        print(hosts, json.dumps(found), flush=True)
    (HERE / "results" / f"scaling-{date.today()}.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
