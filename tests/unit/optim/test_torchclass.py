"""Classes of torch.optim by name: which work, what they keep, and what is refused before anything starts."""

import pytest
import torch
from torch import nn

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.optim.build import build_optimizer, initialise_state, num_state_bytes, set_rate
from shoal.optim.config import OptimConfig
from shoal.optim.flat import is_flat
from shoal.optim.rates import rate
from shoal.optim.torchclass import REASONS, check_named

USABLE = {
    "ASGD": {},
    "Adadelta": {"rho": 0.8},
    "Adagrad": {"lr_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {"momentum_decay": 0.01, "decoupled_weight_decay": True},
    "RAdam": {"betas": [0.8, 0.99]},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}
CASES = [pytest.param(name, args, id=name) for name, args in USABLE.items()]


def section(name: str, args: dict, **more) -> OptimConfig:
    return OptimConfig(name=f"torch.optim.{name}", args=args, lr=0.05, **more)


def refusal(name: str, args: dict | None = None, **more) -> str:
    with pytest.raises(RequestError) as caught:
        check_named(section(name, args or {}, **more))
    return str(caught.value)


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5)).to(dtype)
    # One number among the parameters: state of its shape must not be taken for a count.
    model.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    optimizer.step()


def test_every_optimizer_of_torch_works_or_has_a_reason():
    """A torch that brings a new one must be looked at: it is either usable or refused, and here somebody says which."""
    there = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert there == USABLE.keys() | REASONS.keys()


@pytest.mark.parametrize(("name", "args"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_is_that_of_torchs_own_object(name, args, dtype):
    """Also with a warm-up, which ASGD's first step did not see: its state was made at the full rate."""
    has_decay = name != "Rprop"
    rates = {"warmup": 2, "schedule": "cosine"} if name != "Rprop" else {}
    config = section(name, args, weight_decay=0.01 if has_decay else 0.0, exempt_1d=False, **rates)
    ours, theirs = model_of(dtype), model_of(dtype)
    optimizer = build_optimizer(config, ours)
    initialise_state(optimizer)
    fused = {"fused": True} if name in ("SGD", "Adam", "AdamW", "Adagrad") else {}
    decay = {"weight_decay": 0.01} if has_decay else {}
    plain = getattr(torch.optim, name)(theirs.parameters(), lr=0.05, **decay, **args, **fused)
    for seed in range(4):
        for one in (optimizer, plain):
            set_rate(one, rate(config, seed, total_steps=4))
        step(ours, optimizer, seed)
        step(theirs, plain, seed)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize(("name", "args"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bytes_that_are_foretold_are_those_of_the_storages(name, args, dtype):
    config, model = section(name, args), model_of(dtype)
    optimizer = build_optimizer(config, model)
    initialise_state(optimizer)
    step(model, optimizer, 0)
    assert is_flat(optimizer), "a step went on in other memory"
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if value is not None
    }
    numels = [parameter.numel() for parameter in model.parameters()]
    assert sum(storages.values()) == num_state_bytes(config, numels, dtype.itemsize)


def test_a_decay_that_is_left_out_is_none_in_the_trial_as_in_a_run(monkeypatch):
    """The trial used torch's own default, which for AdamW is 0.01; a run has 0."""
    tried = []
    honest = torch.optim.AdamW.step

    def look(self, closure=None):
        tried.extend(group["weight_decay"] for group in self.param_groups)
        return honest(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", look)
    check_named(section("AdamW", {"eps": 1e-7}))
    assert {*tried} == {0.0}


def test_exempt_parameters_have_no_decay():
    groups = build_optimizer(section("NAdam", {}, weight_decay=0.1), model_of()).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


@pytest.mark.parametrize("name", sorted(REASONS))
def test_what_needs_whole_tensors_is_refused_with_the_reason_and_what_to_use(name):
    said = refusal(name)
    assert name in said and "cannot be used" in said and ("use " in said or "update=lbfgs" in said)


def test_an_optimizer_that_looks_at_other_elements_is_refused_though_nobody_listed_it(monkeypatch):
    class Normed(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.div_(parameter.grad.norm())
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "Normed", Normed, raising=False)
    assert "depends on other elements" in refusal("Normed")


def test_state_of_another_shape_is_refused_though_nobody_listed_it(monkeypatch):
    class Remembering(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["seen"] = torch.ones(3)
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "Remembering", Remembering, raising=False)
    assert "cannot be used: its state" in refusal("Remembering")


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("nadam", {}, "did you mean 'NAdam'"),
        ("RAdm", {}, "did you mean 'RAdam'"),
        ("lr_scheduler", {}, "the choices are"),
        ("NAdam", {"momentm_decay": 0.1}, "takes no 'momentm_decay'; it takes betas (default (0.9, 0.999))"),
        ("NAdam", {"betas": "x"}, "does not work with these arguments"),
        ("NAdam", {"betas": [0.9]}, "does not work with these arguments"),
        ("RMSprop", {"alpha": -1}, "-1"),
        ("NAdam", {"lr": 0.1}, "set optim.lr instead"),
        ("NAdam", {"weight_decay": 0.1}, "set optim.weight_decay instead"),
        ("NAdam", {"foreach": True}, "leave it out"),
        ("SGD", {"momentum": 0.9, "dampening": 0.1}, "made before it"),
        ("ASGD", {"alpha": 1e9}, "does not work with these arguments"),
        ("SGD", {"momentum": 1e38}, "are not finite"),
        ("RMSprop", {"alpha": 1.5}, "are not finite"),
    ],
)
def test_a_wrong_name_or_argument_is_answered_with_what_there_is(name, args, words):
    assert words in refusal(name, args)


@pytest.mark.parametrize("given", [{"warmup": 3}, {"schedule": "cosine"}, {"schedule": "plateau"}])
def test_a_schedule_that_nobody_reads_is_refused(given):
    """Rprop trained without it, and nothing said so."""
    (key, value), *_ = given.items()
    assert f"optim.{key} {value}: torch.optim.Rprop reads the learning rate at its first step" in refusal(
        "Rprop", **given
    )
    check_named(section("ASGD", {}, **given))


def test_weight_decay_that_nobody_reads_is_refused():
    assert "Rprop has no weight decay" in refusal("Rprop", weight_decay=0.1)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"name": "nadam"}, "named by its class, such as torch.optim.NAdam"),
        ({"name": "adamw", "args": {"amsgrad": True}}, "args (amsgrad) are for a class of torch, and name is adamw"),
        ({"name": "torch.optim.NAdam", "betas": [0.8, 0.9]}, "set args.betas"),
        ({"name": "torch.optim.NAdam", "eps": 1e-6}, "set args.eps"),
        ({"name": "torch.optim.RMSprop", "momentum": 0.5}, "set args.momentum"),
    ],
)
def test_a_section_that_contradicts_itself_is_refused(keys, words):
    with pytest.raises(RequestError) as caught:
        validate(OptimConfig, keys, origin="recipe")
    assert words in str(caught.value)
