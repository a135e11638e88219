import numpy as np
import pytest

from shoal.trainer.online.drift import LossWindow, Reference, columns_of, stability, take_reference


def window(rng, shift=0.0, size=1024):
    values = rng.standard_normal((size, 3)).astype(np.float32)
    values[:, 1] += shift
    return columns_of("x", values)


def test_the_same_data_is_stable_and_a_shifted_input_is_named():
    rng = np.random.default_rng(0)
    reference = take_reference(window(rng))
    index, _ = stability(reference, window(rng))
    # By chance it is about 2 (bins - 1) / n = 0.018 for one input, and this is the largest of three.
    assert 0 < index < 0.06
    index, where = stability(reference, window(rng, shift=1.0))
    assert index > 0.5 and where == "x[1]"


def test_the_index_is_the_symmetric_divergence_of_the_shares():
    reference = take_reference({"x": np.arange(100.0)})
    found, where = stability(reference, {"x": np.zeros(100)})
    before = np.full(10, 10.5) / 105
    now = np.array([100.5, *[0.5] * 9]) / 105
    assert found == pytest.approx(float(((now - before) * np.log(now / before)).sum())) and where == "x"


def test_tokens_are_one_column_and_wide_inputs_their_mean():
    assert list(columns_of("t", np.zeros((4, 16), dtype=np.int64))) == ["t"]
    assert columns_of("t", np.zeros((4, 16), dtype=np.int64))["t"].shape == (64,)
    assert list(columns_of("x", np.zeros((4, 1, 28, 28), dtype=np.float32))) == ["x (mean)"]
    assert columns_of("x", np.zeros((0, 3))) == {}


def test_a_first_window_is_read_as_it_was_written():
    reference = take_reference(window(np.random.default_rng(1)))
    again = Reference.from_text(reference.as_text())
    assert again.names == reference.names and np.array_equal(again.edges, reference.edges)
    with pytest.raises(ValueError, match="edges"):
        Reference.from_text('{"names": ["x"], "edges": [[1]], "shares": [[1]]}')


def test_the_loss_is_compared_with_the_marked_one():
    losses = LossWindow(8)
    for value in (1.0, 3.0) * 4:
        losses.add(value)
    assert losses.shift() == 0.0
    losses.mark()
    for value in (4.0, float("nan"), *[4.0] * 7):
        losses.add(value)
    assert losses.shift() == pytest.approx(2.0)
