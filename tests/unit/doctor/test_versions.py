from importlib.metadata import version

import pytest

from shoal.doctor.check import State
from shoal.doctor.versions import check_package, check_packages, check_python, release, requirements


def test_the_packages_of_this_environment_are_listed_with_their_versions():
    found = {check.name: check for check in check_packages()}
    assert list(found)[:2] == ["shoal", "torch"]
    assert {"numpy", "pydantic", "typer", "rich", "safetensors", "xxhash", "psutil"} <= set(found)
    assert found["torch"].found == version("torch")
    assert all(check.state is State.OK for check in found.values())


def test_python_is_new_enough():
    assert check_python().state is State.OK


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ("2.5.1+cpu", "CVE-2025-32434"),
        ("2.9.0", "CVE-2026-24747"),
        ("2.12.1", "2.12.1 is below 2.13"),
        (None, "torch is missing"),
    ],
)
def test_a_bad_torch_is_wrong(installed, said):
    check = check_package("torch", installed, "2.13")
    assert check.state is State.WRONG and said in check.advice


@pytest.mark.parametrize("installed", ["2.13.0", "2.13", "2.13.0+cpu", "2.100.1", "3.0.0rc1"])
def test_a_new_torch_is_fine(installed):
    assert check_package("torch", installed, "2.13").state is State.OK


def test_a_release_that_stole_credentials_is_wrong_and_its_neighbours_are_not():
    assert check_package("lightning", "2.6.3", None).state is State.WRONG
    assert check_package("lightning", "2.6.4", None).state is State.OK
    assert check_package("torch", "2.6.3", None).advice.startswith("CVE-2026-24747")


def test_requirements_of_extras_are_left_out():
    lines = ["torch>=2.13", "numpy >= 2.0", 'scikit-learn>=1.5; extra == "digits"', "odd[extra]"]
    assert requirements(lines) == {"torch": "2.13", "numpy": "2.0"}


def test_releases_compare_as_numbers():
    assert release("2.13.0") == release("2.13") < release("2.13.1") < release("2.100")
    assert release("nonsense") == ()
