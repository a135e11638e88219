"""A machine with round numbers, as this machine's own file would have them."""

from shoal.planner.hardware.machine import (
    CollectiveTime,
    CopyTime,
    CoreSharing,
    Machine,
    MatmulTime,
    Provenance,
    cpu_name,
    num_cores,
    torch_version,
)

GIB = 2**30
SLOW = {1: 1.0, 2: 1.5, 4: 3.0}
"""How much slower each of so many processes is."""
SMALL, LARGE = (64, 64, 256), (1024, 512, 1024)


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
            CoreSharing(processes=1, threads=2, slow_down=1.0),
            CoreSharing(processes=2, threads=1, slow_down=1.2),
            CoreSharing(processes=4, threads=1, slow_down=2.2),
        ],
        "collectives": [
            collective("all_reduce", 2, 2, 1000, 1e-3),
            collective("all_reduce", 2, 2, 3000, 2e-3),
            collective("all_reduce", 4, 4, 1000, 5e-3),
            collective("all_reduce", 4, 4, 3000, 9e-3),
            collective("all_reduce", 2, 4, 1000, 1.5e-3),
            collective("all_reduce", 2, 4, 3000, 3e-3),
        ],
        "rank_bytes": 1000,
    }
    return Machine(**{**values, **changes})


def product_seconds(rows, inner, outer, slow):
    flops, moved = 2 * rows * inner * outer, 4 * (rows * inner + inner * outer + rows * outer)
    return slow * (flops / 50e9 + moved / 8e9 + 20e-6)


def measured(**changes):
    """A machine of two cores with times that follow from a rate, a bandwidth and a time for each kernel."""
    origin = build().provenance.model_copy(update={"cores": 2})
    values = {
        "provenance": origin,
        "matmuls": [
            MatmulTime(
                processes=count,
                threads=1,
                rows=rows,
                inner=inner,
                outer=outer,
                seconds=product_seconds(rows, inner, outer, slow),
            )
            for count, slow in SLOW.items()
            for rows, inner, outer in (SMALL, LARGE)
        ],
        "copies": [CopyTime(processes=count, num_bytes=4_000_000, seconds=slow * 1e-3) for count, slow in SLOW.items()],
        "collectives": [
            collective("all_reduce", count, count, size, 1e-4 * count + size / 1e9)
            for count in (2, 4)
            for size in (4096, 4 << 20)
        ],
        "rank_bytes": GIB // 4,
        "memory_bytes": 8 * GIB,
    }
    return build(**{**values, **changes})
