"""``port_before.py`` with Shoal: five lines are changed and two are gone.

shoal run examples/port_after.py --plan "dp=2 zero=1"
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal

x = torch.linspace(-3, 3, 512).unsqueeze(1)
dataset = TensorDataset(x, torch.sin(x))
torch.manual_seed(1)

accelerator = shoal.Run(seed=1).start()
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=80)
loader = accelerator.loader(dataset, global_batch=32, shuffle=True)
loss_of = nn.MSELoss()
model, optimizer, scheduler = accelerator.setup(model, optimizer, scheduler, loss=loss_of)
for epoch in range(5):
    for batch in loader:
        optimizer.zero_grad()
        loss = accelerator.forward_backward(batch)
        optimizer.step()
        scheduler.step()
    accelerator.print(f"epoch {epoch}: loss {float(loss):.4f}")
