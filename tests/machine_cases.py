"""A machine with round numbers, as this machine's own file would have them."""

from shoal.planner.machine import (
    CollectiveTime,
    CopyTime,
    Machine,
    MatmulTime,
    Provenance,
    Sharing,
    cpu_name,
    num_cores,
    torch_version,
)


def collective(operation, ranks, processes, num_bytes, seconds):
    return CollectiveTime(operation=operation, ranks=ranks, processes=processes, num_bytes=num_bytes, seconds=seconds)


def build(**changes):
    provenance = {
        "date": "2026-01-01T00:00:00+00:00",
        "cpu": cpu_name(),
        "cores": num_cores(),
        "torch": torch_version(),
        "seconds": 1.0,
        "what": "a test",
    }
    values = {
        "provenance": Provenance(**provenance),
        "matmuls": [MatmulTime(processes=1, threads=1, rows=2, inner=2, outer=2, seconds=1e-6)],
        "copies": [CopyTime(processes=1, num_bytes=1024, seconds=1e-6)],
        "sharing": [
            Sharing(processes=1, threads=2, slow_down=1.0),
            Sharing(processes=2, threads=1, slow_down=1.2),
            Sharing(processes=4, threads=1, slow_down=2.2),
        ],
        "collectives": [
            collective("sum", 2, 2, 1000, 1e-3),
            collective("sum", 2, 2, 3000, 2e-3),
            collective("sum", 4, 4, 1000, 5e-3),
            collective("sum", 4, 4, 3000, 9e-3),
            collective("sum", 2, 4, 1000, 1.5e-3),
            collective("sum", 2, 4, 3000, 3e-3),
        ],
        "rank_bytes": 1000,
    }
    return Machine(**{**values, **changes})
