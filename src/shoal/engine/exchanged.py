"""What replicas or islands sent each other in a run, for its summary, where they do not simply sum gradients at every step."""

from typing import Any

import torch

from shoal.comm.trafficcounter import ExchangeMeter
from shoal.comm.world import World
from shoal.compression.exchange import CompressedSum
from shoal.engine.model import ParallelModel
from shoal.telemetry.measurements import ExchangeMeasured


def measure_exchange(engine: ParallelModel, step: int) -> ExchangeMeasured | None:
    """The same of this rank alone, while it trains, and how much it has not sent; None where there is nothing to tell."""
    islands, exchange = engine.islands, engine.reduction.exchange
    sums: CompressedSum | None
    meter: ExchangeMeter
    if islands is not None:
        sums, meter = islands.sums, islands.meter
    elif exchange is not None:
        sums, meter = exchange.sums, exchange.sums.meter
    else:
        return None
    unsent = {} if sums is None else sums.own_state()
    kept = [tensor for what in ("residual", "unsent") for tensor in unsent.get(what, {}).values()]
    norms = torch.stack([tensor.norm() for tensor in kept]) if kept else None
    return ExchangeMeasured(
        step=step,
        sent_bytes=round(meter.num_bytes),
        dense_bytes=round(meter.dense_bytes),
        residual_norm=None if norms is None else float(norms.norm()),
    )


def summarise_exchange(engine: ParallelModel, world: World) -> dict[str, Any]:
    """Bytes of all ranks together, the ratio to whole sums at every step, and rounds; nothing where there is nothing to tell.

    Bytes are those since this process started, without evaluations and saves. All ranks call it together.
    """
    islands, exchange = engine.islands, engine.reduction.exchange
    meter: ExchangeMeter
    if islands is not None:
        meter = islands.meter
    elif exchange is not None:
        meter = exchange.sums.meter
    else:
        return {}
    told = torch.tensor([meter.num_bytes, meter.dense_bytes], dtype=torch.float64, device=world.device)
    sent, dense = world.all_reduce_(told).tolist()
    return {
        "exchange": {
            "bytes": round(sent),
            "dense_bytes": round(dense),
            "ratio": dense / sent if sent else None,
            "rounds": None if islands is None else islands.num_rounds,
        }
    }
