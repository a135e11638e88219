"""From config to module and loss, the user's own among them."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.core.errors import RequestError
from shoal.models.build import build_model
from shoal.models.config import CnnConfig, GptConfig, MlpConfig, OwnModelConfig, Seq2SeqConfig
from shoal.models.losses import build_loss, by_targets, cross_entropy, squared_error

torch.set_num_threads(1)
NOTHING = {"vocab": None, "sequence": None, "features": None, "classes": None, "outputs": None}
TOKENS = SimpleNamespace(**{**NOTHING, "kind": "tokens", "vocab": 16, "sequence": 8})
PAIRS = SimpleNamespace(**{**NOTHING, "kind": "pairs", "vocab": 16, "sequence": 8})
DIGITS = SimpleNamespace(**{**NOTHING, "kind": "classes", "features": (1, 8, 8), "classes": 10})
NUMBERS = SimpleNamespace(**{**NOTHING, "kind": "regression", "features": (3,), "outputs": 2})
OWN = SimpleNamespace(**{**NOTHING, "kind": "own"})


def test_each_shipped_model_is_built_for_its_data() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    assert build_model(GptConfig(layers=1), TOKENS)(tokens).shape == (2, 8, 16)
    assert build_model(Seq2SeqConfig(layers=1), PAIRS)(tokens, tokens).shape == (2, 8, 16)
    assert build_model(CnnConfig(), DIGITS)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert build_model(MlpConfig(), DIGITS)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert build_model(MlpConfig(), NUMBERS)(torch.zeros(2, 3)).shape == (2, 2)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RequestError, match="heads 3 do not divide hidden 128"):
        build_model(GptConfig(heads=3), TOKENS)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text(
        "from torch import nn\n"
        "def build(width): return nn.Linear(width, 1)\n"
        "def sized(spec, extra=0): return nn.Linear(spec.features[0] + extra, spec.outputs)\n"
        "def wrong(): return 'a string'\n"
        "def loss(output, targets): return (output - targets).abs().mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own")
def test_an_own_model_gets_its_arguments_and_the_spec_if_it_asks() -> None:
    plain = build_model(OwnModelConfig(build="own_model:build", args={"width": 5}), OWN)
    assert isinstance(plain, nn.Linear) and plain.in_features == 5
    sized = build_model(OwnModelConfig(build="own_model:sized", args={"extra": 1}), NUMBERS)
    assert isinstance(sized, nn.Linear) and (sized.in_features, sized.out_features) == (4, 2)


@pytest.mark.usefixtures("own")
def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(RequestError, match=r"'own_model:wrong' returned a str; return an nn\.Module"):
        build_model(OwnModelConfig(build="own_model:wrong"), OWN)


@pytest.mark.usefixtures("own")
def test_an_own_loss_is_used_by_shipped_models_too() -> None:
    loss = build_loss(MlpConfig(loss="own_model:loss"), NUMBERS)
    assert loss(torch.tensor([1.0, 4.0]), torch.tensor([0.0, 0.0])).item() == 2.5


def test_the_loss_follows_the_kind_of_data() -> None:
    assert build_loss(GptConfig(), TOKENS) is cross_entropy
    assert build_loss(Seq2SeqConfig(), PAIRS) is cross_entropy
    assert build_loss(CnnConfig(), DIGITS) is cross_entropy
    assert build_loss(MlpConfig(), NUMBERS) is squared_error
    own = build_loss(OwnModelConfig(build="a:b"), OWN)
    assert own is by_targets
    assert own(torch.zeros(2, 4), torch.tensor([0, 1])).item() == pytest.approx(math.log(4))
    assert own(torch.zeros(2, 1), torch.full((2, 1), 3.0)).item() == 9.0


def test_cross_entropy_is_the_mean_over_what_counts() -> None:
    output = torch.randn(2, 3, 5)
    targets = torch.tensor([[1, -100, 2], [-100, -100, 4]])
    chosen = output.log_softmax(-1)
    expected = -(chosen[0, 0, 1] + chosen[0, 2, 2] + chosen[1, 2, 4]) / 3
    torch.testing.assert_close(cross_entropy(output, targets), expected)


def test_cross_entropy_of_nothing_is_zero_with_a_zero_gradient() -> None:
    output = torch.randn(1, 2, 5, requires_grad=True)
    loss = cross_entropy(output, torch.full((1, 2), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert output.grad is not None and not output.grad.any()


def test_half_precision_scores_are_summed_in_float32() -> None:
    assert cross_entropy(torch.zeros(1, 4, dtype=torch.bfloat16), torch.tensor([0])).dtype == torch.float32
    assert cross_entropy(torch.zeros(1, 4, dtype=torch.float64), torch.tensor([0])).dtype == torch.float64


def test_squared_error_never_broadcasts() -> None:
    with pytest.raises(RequestError, match=r"puts out \(3, 1\) and the targets are \(3,\)"):
        squared_error(torch.zeros(3, 1), torch.zeros(3))


def test_losses_read_the_logits_of_an_output_object() -> None:
    scores, targets = torch.randn(4, 3), torch.tensor([0, 2, -100, 1])
    assert torch.equal(cross_entropy(SimpleNamespace(logits=scores), targets), cross_entropy(scores, targets))
    numbers = torch.randn(4, 3)
    assert torch.equal(by_targets(SimpleNamespace(logits=scores), numbers), squared_error(scores, numbers))
    with pytest.raises(RequestError, match="no scores are found"):
        cross_entropy((scores, scores), targets)
