"""Synthetic data: of its shapes, of its rule, of its seed only."""

import numpy as np
import pytest

from shoal.data.config import SyntheticConfig
from shoal.data.sources.synthetic import END, IGNORED, PADDING, START, describe_synthetic, make_arrays

KINDS = ["tokens", "classes", "regression", "reverse"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_everything(kind: str) -> None:
    config = SyntheticConfig.model_validate({"kind": kind, "samples": 50})
    one, two, other = make_arrays(config, 1), make_arrays(config, 1), make_arrays(config, 2)
    assert all(np.array_equal(a, b) for a, b in zip(one.inputs, two.inputs, strict=True))
    assert np.array_equal(one.targets, two.targets)
    assert not np.array_equal(one.inputs[0], other.inputs[0])


def test_tokens_count_on() -> None:
    made = make_arrays(SyntheticConfig(kind="tokens", samples=500, vocab=64, sequence=32), 0)
    (tokens,) = made.inputs
    assert tokens.shape == made.targets.shape == (500, 32)
    assert np.array_equal(tokens[:, 1:], made.targets[:, :-1])
    assert tokens.min() >= 0 and tokens.max() < 64
    steps = (made.targets - tokens) % 64
    usual = np.array([np.bincount(row, minlength=64).argmax() for row in steps])
    assert set(usual.tolist()) == {1, 2, 3}
    assert 0.85 < (steps == usual[:, None]).mean() < 0.95


def test_classes_are_near_their_centres() -> None:
    made = make_arrays(SyntheticConfig(kind="classes", samples=1000, features=(3, 4), classes=3), 0)
    (inputs,) = made.inputs
    assert inputs.shape == (1000, 3, 4) and inputs.dtype == np.float32
    centres = np.stack([inputs[made.targets == label].mean(axis=0) for label in range(3)])
    nearest = ((inputs[:, None] - centres[None]) ** 2).sum(axis=(2, 3)).argmin(axis=1)
    assert (nearest == made.targets).mean() > 0.9


def test_regression_can_be_predicted() -> None:
    made = make_arrays(SyntheticConfig(kind="regression", samples=1000, features=(4,), outputs=2), 0)
    assert made.targets.shape == (1000, 2) and made.targets.dtype == np.float32
    inverse = np.arctanh(np.clip(made.targets, -0.999, 0.999))
    residual = np.linalg.lstsq(made.inputs[0], inverse, rcond=None)[1]
    assert (residual < 0.2 * (inverse**2).sum(axis=0)).all()


def test_reversed_pairs_are_reversed_and_padded() -> None:
    made = make_arrays(SyntheticConfig(kind="reverse", samples=300, sequence=8, vocab=20), 0)
    source, target_in = made.inputs
    lengths = set()
    for word, fed, wanted in zip(source.tolist(), target_in.tolist(), made.targets.tolist(), strict=True):
        letters = [token for token in word if token != PADDING]
        lengths.add(len(letters))
        assert word == letters + [PADDING] * (8 - len(letters))
        assert min(letters) > END
        backwards = letters[::-1]
        assert wanted == [*backwards, END] + [IGNORED] * (7 - len(letters))
        assert fed == ([START, *backwards] + [PADDING] * 8)[:8]
    assert lengths == set(range(1, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_the_description_is_what_is_made(kind: str) -> None:
    config = SyntheticConfig.model_validate({"kind": kind, "samples": 20, "features": [2, 3], "outputs": 3})
    spec, made = describe_synthetic(config), make_arrays(config, 0)
    assert spec.kind == {"reverse": "pairs"}.get(kind, kind)
    shape = made.inputs[0].shape[1:]
    assert shape == (spec.features if spec.features is not None else (spec.sequence,))
    if spec.outputs is not None:
        assert made.targets.shape[1:] == (spec.outputs,)
