import os
import resource

import pytest

from shoal.doctor import machine as doctor_machine
from shoal.doctor.check import State
from shoal.doctor.machine import (
    check_cores,
    check_disk,
    check_memory,
    check_open_files,
    check_shared_memory,
    cpu_quota,
    memory_limit,
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
    monkeypatch.setattr(doctor_machine, "LEAST_DISK", free * 2)
    check = check_disk(tmp_path)
    assert check.state is State.WRONG and "below" in check.advice
    monkeypatch.setattr(doctor_machine, "LEAST_DISK", 0)
    monkeypatch.setattr(doctor_machine, "SCARCE_DISK", free * 2)
    assert check_disk(tmp_path).state is State.NOTE


def test_no_shared_memory_is_a_note(tmp_path):
    assert check_shared_memory(tmp_path / "none").state is State.NOTE


def test_little_shared_memory_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_machine, "SCARCE_SHARED_MEMORY", 1 << 60)
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
