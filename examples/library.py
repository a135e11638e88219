"""Shoal inside your own loop, with no recipe.

python examples/library.py                                          one process
torchrun --standalone --nproc-per-node 2 examples/library.py       two, the same script
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import Hook, OptimConfig, TrainConfig, Trainer, from_datasets


class LargestGradient(Hook):
    """Remembers the parameter whose gradient was the largest, before clipping."""

    name, size = "", 0.0

    def on_gradients(self, step: int, parameters: Mapping[str, nn.Parameter], loss_scale: float) -> None:
        """Gradients are summed over all ranks here."""
        for name, parameter in parameters.items():
            if parameter.grad is not None and float(parameter.grad.norm()) > self.size:
                self.name, self.size = name, float(parameter.grad.norm())


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 8, generator=generator)
    targets = (inputs.sum(1) > 0).long()
    train, held_out = TensorDataset(inputs[64:], targets[64:]), TensorDataset(inputs[:64], targets[:64])

    torch.manual_seed(1)  # every process builds the same weights
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))

    data = from_datasets(train, validation=held_out)
    config = TrainConfig(steps=60, global_batch=32)
    largest = LargestGradient()
    optim = OptimConfig(lr=1e-2)
    with Trainer(model, data, loss=nn.CrossEntropyLoss(), train=config, optim=optim, hooks=[largest]) as trainer:
        for info in trainer.training_steps():
            if info.step % 20 == 0 and trainer.world.is_first:
                print(f"step {info.step}: loss {info.loss:.4f}, gradient norm {info.grad_norm:.3f}")
        found = trainer.evaluate("validation")
        if found is not None and trainer.world.is_first:
            print(f"validation: loss {found.loss:.4f}, accuracy {found.accuracy:.2f}")
            print(f"the largest gradient was that of {largest.name}, {largest.size:.3f}")


if __name__ == "__main__":
    main()
