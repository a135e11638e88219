"""A replica under torchft: DDP by its manager on the same small transformer; one that was killed is started again and heals."""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo


def main() -> None:
    """Train until it is killed; a line for each step that was committed."""
    folder, number, lighthouse = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica-{number}",
        hostname="127.0.0.1",
    )
    replicated, wrapped = DistributedDataParallel(manager, model), OptimizerWrapper(manager, optimizer)
    with (folder / f"steps-{number}.jsonl").open("a", buffering=1) as log:
        while True:
            wrapped.zero_grad()
            replicated(torch.randn(4, 32, 64)).square().mean().backward()
            before = manager.current_step()
            wrapped.step()
            if manager.current_step() > before:
                told = {"t": time.time(), "step": manager.current_step(), "replicas": manager.num_participants()}
                log.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
