"""Twenty lines of plain PyTorch, and ``shoal.Run``: the same script under any plan.

python examples/run.py
torchrun --nproc-per-node 2 examples/run.py
shoal run examples/run.py --plan "dp=2 zero=1"
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal

x = torch.linspace(-3, 3, 512).unsqueeze(1)
dataset = TensorDataset(x, torch.sin(x))

with shoal.Run(seed=1) as run:
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=160)
    loader = run.loader(dataset, global_batch=32)
    model, optimizer, scheduler = run.setup(model, optimizer, scheduler, loss=nn.MSELoss())
    for epoch in range(loader.epoch, 10):
        for batch in loader:
            loss = run.forward_backward(batch)
            run.clip(1.0)
            optimizer.step()
            scheduler.step()
            run.log(loss=loss)
        run.print(f"epoch {epoch}: loss {loss:.4f}")
