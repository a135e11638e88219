"""What a person would write for torchrun: the same model, data and optimizer, one step, and the time when it ended."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal.data.build import build_splits
from shoal.data.config import StdlibConfig
from shoal.models.build import build_model
from shoal.models.config import GptConfig
from shoal.models.losses import build_loss


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    data = build_splits(StdlibConfig(sequence=32, limit_bytes=1_000_000), 1)
    torch.manual_seed(1)
    config = GptConfig(layers=4, hidden=64, heads=4, kv_heads=2, dropout=0.1)
    model = DistributedDataParallel(build_model(config, data.spec))
    loss_of = build_loss(config, data.spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    items = data.train.collate(range(rank * 16 // size, (rank + 1) * 16 // size))
    loss_of(model(*items.inputs), items.targets).backward()
    optimizer.step()
    if rank == 0:
        print(f"first step ended at {time.time()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
