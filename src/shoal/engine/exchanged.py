"""What replicas or islands sent each other in a run, for its summary, where they do not simply sum gradients at every step."""

from typing import Any

import torch

from shoal.comm.trafficcounter import ExchangeMeter
from shoal.comm.world import World
from shoal.engine.model import ParallelModel


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
