"""The comparison names what differs, and a bound is a bound."""

import pytest
import torch

from shoal.testing.golden import check_golden
from shoal.testing.parity import assert_close, compare


def pair():
    reference = {"a": torch.ones(4), "b": torch.full((2, 2), 2.0)}
    return reference, {name: tensor.clone() for name, tensor in reference.items()}


def test_equal_tensors_are_bitwise():
    reference, found = pair()
    assert compare(reference, found).is_bitwise
    assert_close(reference, found, bound=0.0)


def test_one_bit_is_seen_and_named():
    reference, found = pair()
    found["b"][0, 0] = torch.nextafter(found["b"][0, 0], torch.tensor(9.0))
    comparison = compare(reference, found)
    assert not comparison.is_bitwise and comparison.first_difference == "b"
    with pytest.raises(AssertionError, match="b differs"):
        assert_close(reference, found, bound=0.0)
    assert_close(reference, found, bound=1e-6)


def test_a_factor_is_measured_relative_to_the_reference():
    reference, found = pair()
    found["a"] *= 2
    assert compare(reference, found).worst == pytest.approx(1.0)
    with pytest.raises(AssertionError, match="a is off by 1"):
        assert_close(reference, found, bound=0.5)


def test_nan_is_the_worst_error():
    reference, found = pair()
    found["a"][0] = torch.nan
    found["b"] *= 1 + 1e-6  # a small error in a later tensor must not hide it
    with pytest.raises(AssertionError):
        assert_close(reference, found, bound=1.0)


def test_noise_is_bounded_absolutely():
    reference, found = pair()
    reference["n"], found["n"] = torch.full((2,), 1e-9), torch.full((2,), 3e-9)
    assert compare(reference, found).noise == ("n",)
    found["n"] = torch.full((2,), 1e-2)
    assert compare(reference, found).worst_name == "n"


def test_missing_and_misshapen_tensors_are_differences():
    reference, found = pair()
    del found["a"]
    with pytest.raises(AssertionError, match="only one side has"):
        compare(reference, found)
    reference, found = pair()
    found["a"] = torch.ones(5)
    with pytest.raises(AssertionError, match=r"a is \(5,\)"):
        compare(reference, found)


def test_golden_values_fail_when_they_change(tmp_path, monkeypatch):
    path = tmp_path / "losses.json"
    with pytest.raises(AssertionError, match="no golden file"):
        check_golden(path, [1.0], relative=1e-6)
    monkeypatch.setenv("SHOAL_WRITE_GOLDEN", "1")
    check_golden(path, [1.0, 2.0], relative=1e-6)
    monkeypatch.delenv("SHOAL_WRITE_GOLDEN")
    check_golden(path, [1.0, 2.0], relative=1e-6)
    with pytest.raises(AssertionError, match=r"losses.json\[1\]"):
        check_golden(path, [1.0, 2.1], relative=1e-6)
    with pytest.raises(AssertionError, match="has 2 values"):
        check_golden(path, [1.0], relative=1e-6)
