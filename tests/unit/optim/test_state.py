"""Optimizer state by name: resuming is bitwise, and what does not fit is refused before anything changes."""

import pytest
import torch
from torch import nn

from shoal.core.errors import RunError
from shoal.optim.build import build_optimizer, export_state, import_state
from shoal.optim.config import OptimConfig

NAMES = ["sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "lars", "lamb", "torch.optim.NAdam"]


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer, dict]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2)).to(dtype=dtype)
    optimizer = build_optimizer(OptimConfig(name=name, lr=0.1, weight_decay=0.01), model)
    return model, optimizer, {parameter: key for key, parameter in model.named_parameters()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resumed_run_ends_in_the_same_bits(name, dtype):
    whole, optimizer, names = make(name, dtype)
    train(whole, optimizer, range(7))

    first, optimizer_a, names_a = make(name, dtype)
    train(first, optimizer_a, range(3))
    saved = {key: tensor.clone() for key, tensor in export_state(optimizer_a, names_a).items()}
    resumed, optimizer_b, names_b = make(name, dtype)
    resumed.load_state_dict(first.state_dict())
    import_state(optimizer_b, names_b, saved)
    train(resumed, optimizer_b, range(3, 7))

    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    ends = export_state(optimizer, names), export_state(optimizer_b, names_b)
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sgd"])
def test_state_matters(name):
    """The test above could pass with state that is never used; forgetting it must show."""
    first, optimizer_a, _ = make(name)
    train(first, optimizer_a, range(3))
    forgetful, optimizer_b, _ = make(name)
    forgetful.load_state_dict(first.state_dict())
    train(first, optimizer_a, range(3, 5))
    train(forgetful, optimizer_b, range(3, 5))
    assert not torch.equal(first[0].weight, forgetful[0].weight)


def test_names_say_parameter_and_key_in_order():
    _, optimizer, names = make("adamw")
    keys = list(export_state(optimizer, names))
    assert keys == sorted(keys)
    assert keys[:3] == ["0.bias/exp_avg", "0.bias/exp_avg_sq", "0.bias/step"]
    assert len(keys) == 3 * len(names)


def test_export_before_the_first_step_is_whole_and_imports():
    _, optimizer, names = make("momentum")
    saved = export_state(optimizer, names)
    assert all(not tensor.any() for tensor in saved.values())
    import_state(optimizer, names, saved)


def test_state_is_found_by_name_when_the_groups_change():
    """torch's own state_dict would hand the moments out by position."""
    model, optimizer, names = make("adamw")
    train(model, optimizer, range(2))
    saved = {key: tensor.clone() for key, tensor in export_state(optimizer, names).items()}
    other = build_optimizer(OptimConfig(exempt_1d=False), model)
    import_state(other, names, saved)
    for parameter in model.parameters():
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda saved: saved.pop("0.bias/exp_avg"), "1 tensors are missing.*0.bias/exp_avg"),
        (lambda saved: saved.update({"9.bias/exp_avg": torch.zeros(1)}), "1 are not of this AdamW.*9.bias/exp_avg"),
        (lambda saved: saved.update({"0.bias/exp_avg": torch.zeros(4)}), r"0.bias/exp_avg.*\(4,\).*\(3,\)"),
        (lambda saved: saved.update({"2.bias/exp_avg": torch.zeros(2).double()}), "float64.*float32"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(change, words):
    model, optimizer, names = make("adamw")
    train(model, optimizer, range(2))
    before = {key: tensor.clone() for key, tensor in export_state(optimizer, names).items()}
    saved = {key: torch.zeros_like(tensor) for key, tensor in before.items()}
    change(saved)
    with pytest.raises(RunError, match=words):
        import_state(optimizer, names, saved)
    assert all(torch.equal(tensor, before[key]) for key, tensor in export_state(optimizer, names).items())
