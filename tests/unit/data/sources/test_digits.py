"""The digits are those of scikit-learn."""

import numpy as np

from shoal.data.sources.digits import DIGITS_SPEC, NUM_DIGITS, read_digits


def test_they_are_scikit_learns_in_another_order() -> None:
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    ours = read_digits()
    assert len(ours.digits) == NUM_DIGITS
    assert ours.images.shape == (NUM_DIGITS, *(DIGITS_SPEC.features or ()))
    assert ours.images.dtype == np.float32
    rows = np.column_stack((ours.images.reshape(-1, 64) * 16, ours.digits))
    assert sorted(map(tuple, rows)) == sorted(map(tuple, np.column_stack((images, digits))))
    assert not np.array_equal(ours.digits, digits)


def test_every_tenth_has_every_digit() -> None:
    digits = read_digits().digits
    for start in range(0, NUM_DIGITS, 180):
        assert len(np.unique(digits[start : start + 180])) == 10
