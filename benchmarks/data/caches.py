"""Every eviction policy on the access traces of training, beside the optimum. Counts alone: the same on every machine."""

from shoal.cli.data.caches import cache_table
from shoal.data.cache.replay import replay, replay_all
from shoal.data.cache.traces import build_traces


def measure_caches() -> dict[str, object]:
    """The table, and whether the bars are met."""
    rows = replay_all()
    header, lines = cache_table(rows)
    table = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    table += ["| " + " | ".join(line) + " |" for line in lines]
    print("\n".join(table))
    found = {row[0].policy: {each.trace: each for each in row} for row in rows}
    planned = max(each.fetches / found["belady"][name].fetches for name, each in found["planned"].items())
    blend = {}
    for trace in build_traces():
        best = max(found[name][trace.name].hits for name in ("lru", "mru"))
        blend[trace.name] = found["blend"][trace.name].hits / best
    print("\nblend / better of lru and mru: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in blend.items()))
    print(f"planned / belady in fetches, the worst trace: {planned:.3f}")
    window = build_window_ratio()
    print(f"planned / belady on the window shuffle by accesses known ahead: {window}")
    return {
        "hits": {name: {trace: each.hits for trace, each in row.items()} for name, row in found.items()},
        "blend": blend,
        "planned": planned,
        "look_ahead": window,
    }


def build_window_ratio() -> dict[int, float]:
    """How far ahead a plan has to reach."""
    from shoal.data.cache.traces import build_block_traces

    trace = build_block_traces()[1]
    least = replay("belady", trace, 100).fetches
    return {
        ahead: round(replay("planned", trace, 100, look_ahead=ahead).fetches / least, 3) for ahead in (1024, 4096, 8192)
    }
