"""PowerSGD beside torch's own hook, on the same gradients: from the same factors on, every sum is the same.

A loss that is higher than dense is then the method's, and not this implementation's (``benchmarks/replicas_loss``).
"""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.mesh import build_mesh
from shoal.compression.config import CompressionConfig
from shoal.compression.exchange import CompressedSum
from shoal.compression.layout import TensorPart
from shoal.core.axes import Axis
from shoal.core.compressrule import CompressRule
from shoal.core.plan import Plan
from shoal.testing.ranks import run_on_ranks

ROWS, COLS, RANK = 96, 64, 4
DENSE, STEPS = 2, 14
"""Steps that torch's hook sums dense, and steps in all."""


def differences(world, loses_residual):
    """How far the sums of both are apart at each step, relative to their length."""
    mesh = build_mesh(world, Plan.parse("dp=2"))
    rule, config = CompressRule.parse(f"powersgd:{RANK}"), CompressionConfig(min_elements=0)
    parts, device = {"weight": TensorPart((ROWS, COLS))}, torch.device("cpu")
    sums = CompressedSum(parts, rule, config, mesh.channel(Axis.DATA), seed=1, device=device)
    layer = torch.nn.Linear(COLS, ROWS, bias=False)
    wrapped = DistributedDataParallel(layer, process_group=world.group, init_sync=False)
    state = powerSGD_hook.PowerSGDState(
        world.group, matrix_approximation_rank=RANK, start_powerSGD_iter=DENSE, orthogonalization_epsilon=0.0
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    signal = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(99)) * 0.3
    noise = torch.Generator().manual_seed(world.rank)
    found = []
    for step in range(STEPS):
        given = signal + torch.randn(ROWS, COLS, generator=noise)
        layer.weight.grad = None
        wrapped(torch.eye(COLS)).backward(given.t().contiguous())
        if step < DENSE:
            continue
        if step == DENSE:
            # Both draw their first factors at random: from here on both have torch's, and what it has not sent.
            sums.shared_state()["right"]["weight"][0].copy_(state.q_memory_dict[0].view(COLS, RANK))
            sums.own_state()["residual"]["weight"].copy_(state.error_dict[0].view(-1)[: ROWS * COLS])
            continue
        own = {"weight": given.clone()}
        sums.begin_step(step)
        sums.reduce_(own)
        sums.commit()
        if loses_residual:
            sums.own_state()["residual"]["weight"].zero_()
        found.append(float((own["weight"] / world.size - layer.weight.grad).norm() / layer.weight.grad.norm()))
    mesh.close()
    return found


@pytest.mark.soak
def test_every_sum_is_that_of_torchs_hook():
    for found in run_on_ranks(differences, 2, False):
        assert len(found) == STEPS - DENSE - 1 and max(found) < 2e-5, found
    for found in run_on_ranks(differences, 2, True):
        assert max(found[1:]) > 0.05, "a residual that is lost was not seen"
