"""The reference: alone, in the plan's tree of sums, near the flat sum, and without anybody's random numbers."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from shoal.core.errors import RequestError
from shoal.verify.reference import train as reference
from shoal.verify.reference.case import Tree
from shoal.verify.reference.model import build_reference
from shoal.verify.reference.recording import Recording
from shoal.verify.reference.train import narrow_weights, run_reference, tree_gradients
from support.training.replay_cases import REVERSE, SEQ2SEQ, case_of, run_here


def test_it_imports_nothing_of_what_it_judges():
    line = "import shoal.verify.oracle.process; import shoal.verify.reference.model as r; r.assert_alone()"
    subprocess.run([sys.executable, "-c", line], check=True, timeout=60)
    wrong = f"import shoal.parallel.apply; {line}"
    done = subprocess.run([sys.executable, "-c", wrong], capture_output=True, text=True, timeout=60, check=False)
    assert "must not share code" in done.stderr


def test_a_run_is_recorded_step_by_step(tmp_path):
    found = run_here(run_reference, case_of(), Tree(replicas=2, microbatches=2), tmp_path)
    recording = Recording.open(tmp_path, "reference")
    assert len(recording) == 2
    first, second = recording.step(0), recording.step(1)
    assert {key.partition("/")[0] for key in first.tensors} == {"grad", "weight", "optimizer"}
    assert not torch.equal(first.tensors["weight/head.weight"], second.tensors["weight/head.weight"])
    assert found["flat"] < 1e-5
    assert first.norm == pytest.approx(
        float(torch.stack([t.double().norm() for k, t in first.tensors.items() if k.startswith("grad/")]).norm())
    )


def test_the_tree_decides_the_bits_and_not_the_value():
    ids = np.arange(8)
    found = []
    for tree in (Tree(replicas=1, microbatches=1), Tree(replicas=2, microbatches=2), Tree(replicas=4, microbatches=1)):
        found.append(tree_gradients(build_reference(case_of()), 0, ids, tree, 1.0)[1])
    for other in found[1:]:
        assert any(not torch.equal(found[0][name], other[name]) for name in other)
        for name in other:
            torch.testing.assert_close(found[0][name], other[name], rtol=1e-4, atol=1e-6)


def test_unequal_replicas_are_weighed():
    """Lengths vary, so a mean of means would be another number than the flat mean."""
    case = case_of(model=SEQ2SEQ, data=REVERSE)
    whole, _ = tree_gradients(build_reference(case), 0, np.arange(8), Tree(replicas=1, microbatches=1), 1.0)
    cut, _ = tree_gradients(build_reference(case), 0, np.arange(8), Tree(replicas=4, microbatches=1), 1.0)
    assert cut == pytest.approx(whole, rel=1e-5)


def test_a_clipped_step_is_shorter(tmp_path):
    plain, clipped = tmp_path / "plain", tmp_path / "clipped"
    plain.mkdir()
    clipped.mkdir()
    for folder, clip in ((plain, None), (clipped, 1e-3)):
        optim = {"name": "sgd", "lr": 1.0, "clip": clip}
        run_here(run_reference, case_of(optim=optim, steps=1), Tree(replicas=1, microbatches=1), folder)
    moved, held = (Recording.open(folder, "reference") for folder in (plain, clipped))
    assert moved.step(0).norm == held.step(0).norm > 1e-3
    assert sum(value**2 for value in held.facts["movement"].values()) ** 0.5 == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("tree", [Tree(replicas=2, microbatches=2), Tree(replicas=1, microbatches=4, directions=2)])
def test_what_no_sample_touches_has_no_gradient_and_is_left_alone(tmp_path, monkeypatch, tree):
    """As in any training in one process; zeros would have AdamW decay it."""
    monkeypatch.setattr("shoal.verify.reference.model.build_model", lambda config, spec: Sparing())
    case = case_of(
        model={"name": "mlp", "layers": 1, "hidden": 16},
        data={"source": "synthetic", "kind": "classes", "samples": 64, "features": [16], "classes": 4},
        optim={"name": "adamw", "lr": 1e-2, "weight_decay": 0.5},
    )
    run_here(run_reference, case, tree, tmp_path)
    last = Recording.open(tmp_path, "reference").step(1).tensors
    assert {key for key in last if key.startswith("grad/")} == {"grad/used.weight", "grad/used.bias"}
    assert last["weight/spare"].tolist() == [1.0] * 3


class Sparing(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(16, 4), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.used(x)


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.scale = nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.norm(self.inner(x)) * (1.0 + self.scale.float())


@pytest.mark.parametrize(("batch_norm", "sizes"), [("local", [2, 2, 2, 2]), ("sync", [4, 4])])
def test_narrow_weights_are_looked_for_in_microbatches_as_a_step_runs_them(monkeypatch, batch_norm, sizes):
    """In one pass of the whole global batch, divided by the number of its targets, of which there may be none."""
    monkeypatch.setattr("shoal.verify.reference.model.build_model", lambda config, spec: Narrow())
    classes = {"source": "synthetic", "kind": "classes", "samples": 64}
    parts = build_reference(
        case_of(
            model={"name": "mlp", "layers": 1, "hidden": 16}, data=classes, precision="float64", batch_norm=batch_norm
        )
    )
    honest, seen = reference.batch_loss, []

    def batch_loss(parts, step, ids, weight):
        seen.append((len(ids), weight))
        return honest(parts, step, ids, weight)

    monkeypatch.setattr(reference, "batch_loss", batch_loss)
    monkeypatch.setattr(reference, "weigh", lambda parts, ids: 0.0)
    assert narrow_weights(parts, Tree(replicas=2, microbatches=2)) == ["scale"]
    assert seen == [(size, 1.0) for size in sizes]


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.noise = Noise()

    def forward(self, x):
        return self.noise(self.inner(x))


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.empty_like(x).normal_()


class LayerDrop(Noisy):
    """Python's own generator decides, which torch's does not notice."""

    def forward(self, x):
        return self.inner(x) * (1.0 if random.random() < 0.5 else 0.5)


@pytest.mark.parametrize(("build", "named"), [(Noisy, "noise"), (LayerDrop, "Python's random")])
def test_random_numbers_of_its_own_are_refused_by_name(tmp_path, monkeypatch, build, named):
    monkeypatch.setattr("shoal.verify.reference.model.build_model", lambda config, spec: build())
    case = case_of(
        model={"name": "mlp", "layers": 1, "hidden": 16},
        data={"source": "synthetic", "kind": "classes", "samples": 64},
    )
    with pytest.raises(RequestError, match=named):
        run_here(run_reference, case, Tree(replicas=1, microbatches=1), tmp_path)


class OffLayerDrop(Noisy):
    def forward(self, x):
        return x[:, :4] if torch.rand([]) < 0.0 else self.inner(x)


def test_draws_that_decide_nothing_are_not_refused(tmp_path, monkeypatch):
    """In later steps either, whose passes are not looked at as closely."""
    monkeypatch.setattr("shoal.verify.reference.model.build_model", lambda config, spec: OffLayerDrop())
    case = case_of(
        model={"name": "mlp", "layers": 1, "hidden": 16},
        data={"source": "synthetic", "kind": "classes", "samples": 64, "features": [16], "classes": 4},
    )
    run_here(run_reference, case, Tree(replicas=1, microbatches=2), tmp_path)
    assert len(Recording.open(tmp_path, "reference")) == 2


class LateNoise(OffLayerDrop):
    """Begins to draw in earnest after a pass that drew what decides nothing."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        x = super().forward(x)
        return self.noise(x) if self.calls > 2 else x


def test_draws_that_begin_after_harmless_ones_are_refused(tmp_path, monkeypatch):
    """The first pass had drawn, so later ones were not looked at, and the plan was blamed for what the model did."""
    monkeypatch.setattr("shoal.verify.reference.model.build_model", lambda config, spec: LateNoise())
    case = case_of(
        model={"name": "mlp", "layers": 1, "hidden": 16},
        data={"source": "synthetic", "kind": "classes", "samples": 64, "features": [16], "classes": 4},
    )
    with pytest.raises(RequestError, match="normal_ in module 'noise'"):
        run_here(run_reference, case, Tree(replicas=1, microbatches=2), tmp_path)


class Stubborn(Noisy):
    def forward(self, x):
        return self.inner(x.float())


def test_a_model_that_cannot_run_in_float64_is_refused_in_float64(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.verify.reference.model.build_model", lambda config, spec: Stubborn())
    case = case_of(
        model={"name": "mlp", "layers": 1, "hidden": 16},
        data={"source": "synthetic", "kind": "classes", "samples": 64, "features": [16], "classes": 4},
        precision="float64",
    )
    with pytest.raises(RequestError, match=r"in float64: .*; .* --dtype float32"):
        run_here(run_reference, case, Tree(replicas=1, microbatches=1), tmp_path)


def test_a_model_that_cannot_run_so_few_samples_is_refused_with_their_number(tmp_path, monkeypatch):
    """A batch norm that is given one sample raises: under pp=2 that was reported as a crash."""
    build = lambda config, spec: nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4))  # noqa: E731
    monkeypatch.setattr("shoal.verify.reference.model.build_model", build)
    case = case_of(
        model={"name": "mlp", "layers": 1, "hidden": 16},
        data={"source": "synthetic", "kind": "classes", "samples": 64, "features": [16], "classes": 4},
    )
    with pytest.raises(RequestError, match=r"on a microbatch of 1 samples: ValueError: Expected more than 1 value"):
        run_here(run_reference, case, Tree(replicas=1, microbatches=8), tmp_path)


class DropsPlaces(nn.Module):
    """Dropout on something that all samples share, as Funnel's on its table of positions."""

    def __init__(self):
        super().__init__()
        self.table, self.drop, self.out = nn.Parameter(torch.ones(16, 4)), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(x @ self.drop(self.table))


def test_a_dropout_whose_mask_depends_on_the_microbatch_is_refused_by_name(tmp_path, monkeypatch):
    """It was said that one pass over the batch gives another gradient, and not why."""
    monkeypatch.setattr("shoal.verify.reference.model.build_model", lambda config, spec: DropsPlaces())
    case = case_of(
        model={"name": "mlp", "layers": 1, "hidden": 16},
        data={"source": "synthetic", "kind": "classes", "samples": 64, "features": [16], "classes": 4},
    )
    with pytest.raises(RequestError, match=r"dropout 'drop' sees a tensor of shape \(16, 4\)"):
        run_here(run_reference, case, Tree(replicas=2, microbatches=2), tmp_path)


class DropsPlacesInCode(DropsPlaces):
    def forward(self, x):
        return self.out(x @ nn.functional.dropout(self.table, 0.5))


@pytest.mark.parametrize("build", [DropsPlaces, DropsPlacesInCode])
def test_such_a_dropout_excuses_nothing_else(tmp_path, monkeypatch, build):
    """Any difference between a plan's sum and one pass was its fault, and so the model's."""
    honest = tree_gradients

    def doubled(parts, step, ids, tree, scale):
        loss, gradients = honest(parts, step, ids, tree, scale)
        return loss, {name: 2 * gradient for name, gradient in gradients.items()}

    monkeypatch.setattr("shoal.verify.reference.model.build_model", lambda config, spec: build())
    case = case_of(
        model={"name": "mlp", "layers": 1, "hidden": 16},
        data={"source": "synthetic", "kind": "classes", "samples": 64, "features": [16], "classes": 4},
    )
    tree = Tree(replicas=2, microbatches=2)
    with pytest.raises(RequestError, match=r"sees a tensor of shape \(16, 4\)"):
        run_here(run_reference, case, tree, tmp_path)
    monkeypatch.setattr("shoal.verify.reference.train.tree_gradients", doubled)
    assert run_here(run_reference, case, tree, tmp_path)["flat"] > 0.4


def test_a_loss_that_is_not_finite_alone_is_refused(tmp_path):
    case = case_of(optim={"name": "sgd", "lr": 1e30}, steps=3)
    with pytest.raises(RequestError, match="one process alone"):
        run_here(run_reference, case, Tree(replicas=1, microbatches=1), tmp_path)


def test_the_flat_sum_sees_what_the_tree_hides(tmp_path, monkeypatch):
    """A wrong weight would be wrong in every tree alike, and the flat pass has none."""
    honest = tree_gradients

    def doubled(parts, step, ids, tree, scale):
        loss, gradients = honest(parts, step, ids, tree, scale)
        return loss, {name: 2 * gradient for name, gradient in gradients.items()}

    monkeypatch.setattr("shoal.verify.reference.train.tree_gradients", doubled)
    assert run_here(run_reference, case_of(steps=1), Tree(replicas=2, microbatches=1), tmp_path)["flat"] > 0.4


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_true_zeros_are_told_by_float64_for_16_bits(tmp_path, precision):
    """The bias of the layer before batch norm, and not the norm's own, which is small and no zero."""
    model = {"name": "mlp", "layers": 2, "hidden": 16, "batch_norm": True}
    case = case_of(
        model=model,
        data={"source": "synthetic", "kind": "classes", "samples": 64},
        precision=precision,
        batch_norm="sync",
    )
    run_here(run_reference, case, Tree(replicas=2, microbatches=1), tmp_path)
    recording = Recording.open(tmp_path, "reference")
    zeros = recording.facts["zeros"]
    if precision == "float32":
        assert zeros == []
        return
    trained = {name.removeprefix("grad/") for name in recording.step(0).tensors if name.startswith("grad/")}
    norms = {name for name, module in build_reference(case).model.named_modules() if isinstance(module, nn.BatchNorm1d)}
    assert zeros and set(zeros) < trained
    assert all(name.endswith(".bias") and name.rpartition(".")[0] not in norms for name in zeros)
