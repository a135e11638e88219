"""How well orders mix, and what they read: deterministic figures, of data that is sorted by its label."""

from dataclasses import asdict

from shoal.data.sampling.quality import measure_order
from shoal.data.sampling.samplers import Sequential, Shuffled
from shoal.data.sampling.window import Windowed, even_blocks, expected_chi2

SAMPLES, BLOCK, BATCH = 64_000, 32, 64
WINDOWS = (16, 64, 320, 640)


def measure_orders() -> dict[str, object]:
    """Quality and fetches of a full shuffle, of windows and of no shuffle, with a cache as large as a window."""
    starts = even_blocks(SAMPLES, BLOCK)
    orders = {"full": (Shuffled(0, SAMPLES), 320), "time": (Sequential(SAMPLES), 320)}
    orders |= {f"window {window}": (Windowed(0, starts, window), window) for window in WINDOWS}
    found: dict[str, object] = {}
    print(f"{SAMPLES} samples in blocks of {BLOCK}, batches of {BATCH}")
    for name, (order, cache) in orders.items():
        quality = measure_order(order, starts, batch=BATCH, cache_blocks=cache)
        found[name] = asdict(quality)
        said = f"{name:12} chi2 {quality.chi2:6.2f}  fetches per block {quality.fetches_per_block:6.2f}"
        if name.startswith("window"):
            window = int(name.split()[1])
            said += f"  expected chi2 {expected_chi2(blocks=len(starts) - 1, window=window, batch=BATCH):.2f}"
        print(said)
    return found
