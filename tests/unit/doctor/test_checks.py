import os
import resource
from importlib.metadata import version

import pytest

from shoal.doctor import checks
from shoal.doctor.checks import (
    State,
    check_cores,
    check_disk,
    check_memory,
    check_open_files,
    check_package,
    check_packages,
    check_python,
    check_shared_memory,
    cpu_quota,
    memory_limit,
    release,
    requirements,
)


def test_cores_are_those_this_process_may_use():
    check = check_cores()
    assert check.values["usable"] == len(os.sched_getaffinity(0)) <= check.values["cores"]


def test_memory_is_never_more_than_there_is():
    values = check_memory().values
    assert 0 < values["available_bytes"] <= values["total_bytes"]


@pytest.mark.parametrize(("text", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", None), (None, None)])
def test_a_containers_cores_are_read(text, quota):
    assert cpu_quota(text) == quota


@pytest.mark.parametrize(("text", "limit"), [("1073741824\n", 1 << 30), ("max\n", None), (None, None)])
def test_a_containers_memory_is_read(text, limit):
    assert memory_limit(text) == limit


def test_disk_is_looked_at_where_runs_will_be(tmp_path):
    check = check_disk(tmp_path / "not" / "yet")
    assert check.values["path"] == str(tmp_path)
    assert check.values["free_bytes"] > 0


def test_little_disk_is_wrong_and_not_much_is_a_note(tmp_path, monkeypatch):
    free = check_disk(tmp_path).values["free_bytes"]
    monkeypatch.setattr(checks, "LEAST_DISK", free * 2)
    check = check_disk(tmp_path)
    assert check.state is State.WRONG and "below" in check.advice
    monkeypatch.setattr(checks, "LEAST_DISK", 0)
    monkeypatch.setattr(checks, "SCARCE_DISK", free * 2)
    assert check_disk(tmp_path).state is State.NOTE


def test_no_shared_memory_is_a_note(tmp_path):
    assert check_shared_memory(tmp_path / "none").state is State.NOTE


def test_little_shared_memory_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "SCARCE_SHARED_MEMORY", 1 << 60)
    check = check_shared_memory(tmp_path)
    assert check.state is State.NOTE and "data.workers" in check.advice


def test_few_open_files_are_a_note():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        check = check_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert check.state is State.NOTE and check.values["soft"] == 512
    assert check_open_files().values["soft"] == soft


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
    assert release("2.13.0rc1+cpu") == release("2.13") and release("nonsense") < release("0.0.1")
