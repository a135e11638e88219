"""A rank under ``torchrun``: DDP on a small transformer, a checkpoint every 20 steps from which it goes on."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

EVERY = 20


def main() -> None:
    """Train until it is killed; the first rank writes a line for each step."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    model = DistributedDataParallel(torch.nn.TransformerEncoder(layer, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    saved, step = folder / "saved.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with (folder / "steps.jsonl").open("a", buffering=1) as log:
        while True:
            optimizer.zero_grad()
            model(torch.randn(4, 32, 64)).square().mean().backward()
            optimizer.step()
            step += 1
            if dist.get_rank() == 0:
                log.write(json.dumps({"t": time.time(), "step": step, "start": start}) + "\n")
                if step % EVERY == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, saved.with_suffix(".new"))
                    saved.with_suffix(".new").rename(saved)


if __name__ == "__main__":
    main()
