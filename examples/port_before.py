"""A plain loop with its own optimizer and scheduler, as people write it for accelerate; ``port_after.py`` is its port.

python examples/port_before.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

x = torch.linspace(-3, 3, 512).unsqueeze(1)
dataset = TensorDataset(x, torch.sin(x))
torch.manual_seed(1)

accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=80)
loader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)
loss_of = nn.MSELoss()
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
for epoch in range(5):
    for batch in loader:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
    accelerator.print(f"epoch {epoch}: loss {float(loss):.4f}")
