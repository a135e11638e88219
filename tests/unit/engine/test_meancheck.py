"""A loss that is no mean over its items is told of before a run that splits its batch, and no other loss is."""

import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.data.sources.own import from_datasets
from shoal.engine.config import TrainConfig
from shoal.engine.meancheck import find_other_mean
from shoal.trainer.loop import Trainer

torch.set_num_threads(1)
WEIGHTS = torch.tensor([1.0, 3.0, 0.2, 1.0])


def whole_numbers(num_samples=32):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_samples, 6, generator=generator), torch.randint(0, 4, (num_samples,), generator=generator)


def padded_rows(num_samples=32, length=5):
    """Targets by position, of which a different number counts in every sample, in some none."""
    generator = torch.Generator().manual_seed(4)
    targets = torch.randint(0, 4, (num_samples, length), generator=generator)
    lengths = torch.arange(num_samples)[:, None] % (length + 1)
    return torch.randn(num_samples, length, 6, generator=generator), targets.masked_fill(
        torch.arange(length) >= lengths, -100
    )


def measured(num_samples=32):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_samples, 6, generator=generator), torch.randn(num_samples, 4, generator=generator)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))


def by_position():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))


class Scored(nn.Module):
    """Puts its loss out by itself, as modules of the Hugging Face library do."""

    def __init__(self):
        super().__init__()
        self.inner = by_position()

    def forward(self, inputs):
        scores = self.inner(inputs)
        return {"loss": scores.pow(2).mean() if self.is_mean else scores.std(), "scores": scores}


def scored(is_mean):
    found = Scored()
    found.is_mean = is_mean
    return found


def entropy(output, targets):
    return F.cross_entropy(output, targets)


def by_token(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100)


def by_row(output, targets):
    """The mean over samples of each one's mean: a long sample's items count for less."""
    each = F.cross_entropy(output.transpose(1, 2), targets, reduction="none", ignore_index=-100)
    counted = (targets != -100).sum(1).clamp(min=1)
    return (each.sum(1) / counted).mean()


def weighted(output, targets):
    return F.cross_entropy(output, targets, weight=WEIGHTS)


def summed(output, targets):
    return F.cross_entropy(output, targets, reduction="sum")


def contrastive(output, targets):
    rows = F.normalize(output, dim=1)
    return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


def smoothed(output, targets):
    return F.cross_entropy(output, targets, label_smoothing=0.1) + 0.01 * output.pow(2).mean()


def right_weights(output, targets):
    return (WEIGHTS[targets] * F.cross_entropy(output, targets, reduction="none")).mean()


def halves(output, targets):
    return F.cross_entropy(output.half().float(), targets)


CASES = [
    ("entropy", net, entropy, whole_numbers, None),
    ("module", net, nn.CrossEntropyLoss(label_smoothing=0.1), whole_numbers, None),
    ("smoothed", net, smoothed, whole_numbers, None),
    ("weights that are right", net, right_weights, whole_numbers, None),
    ("float32 only", net, halves, whole_numbers, None),
    ("padded", by_position, by_token, padded_rows, None),
    ("squares", net, nn.MSELoss(), measured, None),
    ("huber", net, F.huber_loss, measured, None),
    ("computed by the model", lambda: scored(True), lambda out, _: out["loss"], measured, None),
    ("class weights", net, weighted, whole_numbers, r"weight\[target\]"),
    ("class weights of a module", net, nn.CrossEntropyLoss(weight=WEIGHTS), whole_numbers, r"weight\[target\]"),
    ("sum", net, summed, whole_numbers, "reduction='mean'"),
    ("sum of squares", net, nn.MSELoss(reduction="sum"), measured, "reduction='mean'"),
    ("contrastive", net, contrastive, whole_numbers, "one microbatch"),
    ("mean of rows", by_position, by_row, padded_rows, "not the mean over its items"),
    ("spread, by the model", lambda: scored(False), lambda out, _: out["loss"], measured, "one microbatch"),
]


def look(model, loss, made, plan="dp=2"):
    source = from_datasets(TensorDataset(*made())).train
    return find_other_mean(model, loss, source, plan=Plan.parse(plan), train=TrainConfig(steps=1, global_batch=16))


@pytest.mark.parametrize(
    ("build", "loss", "made", "told"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_who_is_told_of(build, loss, made, told):
    found = look(build(), loss, made)
    if told is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(told, found), found


@pytest.mark.parametrize(
    ("plan", "is_told"), [("dp=1", False), ("tp=2", False), ("dp=1 microbatches=2", True), ("ps=1 workers=2", True)]
)
def test_only_plans_that_split_the_batch_are_looked_at(plan, is_told):
    assert (look(net(), summed, whole_numbers, plan) is not None) == is_told


def test_nothing_of_the_model_or_of_the_random_states_changes():
    model = net().train()
    model[3].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert look(model, contrastive, whole_numbers) is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model] == [True, True, True, False, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_what_cannot_be_run_here_is_left_to_the_run():
    class Training(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) if self.training else SimpleNamespace(found=None)

    assert look(Training(6, 4), summed, whole_numbers) is None


def test_a_module_that_asserts_its_size_of_batch_is_left_to_the_run():
    class Eight(nn.Linear):
        def forward(self, inputs):
            assert inputs.shape[0] == 8
            return super().forward(inputs)

    assert look(Eight(6, 4), summed, whole_numbers) is None


def test_no_copy_is_made_of_a_large_model(monkeypatch):
    assert look(scored(False), lambda out, _: out["loss"], measured) is not None
    monkeypatch.setattr("shoal.engine.meancheck._MOST_BYTES", 100)
    assert look(scored(False), lambda out, _: out["loss"], measured) is None
    assert look(net(), summed, whole_numbers) is not None, "its output is enough"


def train(loss, *, was_tried=False):
    """The weights after a few steps of a script's own trainer, with dropout, batch norm and samples that draw."""

    class Drawn(TensorDataset):
        def __getitem__(self, i):
            inputs, target = super().__getitem__(i)
            return inputs + random.random() + float(np.random.random()) + torch.rand(()), target

    trainer = Trainer(
        net(),
        from_datasets(Drawn(*whole_numbers())),
        loss=loss,
        train=TrainConfig(steps=3, global_batch=8),
        plan=Plan.parse("dp=1 microbatches=2"),
        was_tried=was_tried,
    )
    with trainer:
        trainer.train()
        return trainer.hash_weights()


def test_a_script_is_told_and_no_bit_of_its_run_changes(capsys):
    tried = train(weighted, was_tried=True)
    assert "not the mean" not in capsys.readouterr().err
    assert train(weighted) == tried
    assert capsys.readouterr().err.count("warning: the loss is not the mean over its items") == 1
    train(entropy)
    assert "not the mean" not in capsys.readouterr().err


def test_a_loss_that_no_parameter_is_behind_trains_nothing_and_is_refused():
    """Advised to set unused_parameters, such a run trained to its end with a gradient norm of 0."""
    with pytest.raises(RunError, match="the loss depends on no parameter"):
        train(lambda output, targets: F.cross_entropy(output.detach(), targets))


@pytest.mark.parametrize("is_weightless", [False, True])
def test_a_loss_that_is_now_and_then_a_constant_is_trained_on(is_weightless):
    """Such as one over triplets, of which some microbatches have none: a run of hours ended at the first of them."""
    calls = []

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = by_position()

        def forward(self, inputs):
            calls.append(len(inputs))
            scores = self.inner(inputs)
            return scores.detach() if len(calls) in (3, 5, 6) else scores

    torch.manual_seed(2)
    inputs, targets = whole_numbers(16)
    if is_weightless:
        targets = torch.full_like(targets, -100)
        targets[0] = 1
    trainer = Trainer(
        Sometimes(),
        from_datasets(TensorDataset(inputs, targets)),
        loss=entropy,
        train=TrainConfig(steps=6, global_batch=8),
        plan=Plan.parse("dp=1 microbatches=2"),
        was_tried=True,
    )
    with trainer:
        trainer.train()
        assert trainer.progress.step == 6 and len(calls) == 12
