"""A machine file: written, read back, refused when it is edited, foreign or something else; and what its numbers say between."""

import json

import pytest

from shoal.core.errors import RequestError
from shoal.planner.hardware import machine as module
from shoal.planner.hardware.machine import Fit, Meeting, default_path, read_machine, write_machine
from support.planner.machines import build


def test_a_machine_comes_back_as_it_was(tmp_path):
    path = tmp_path / "new" / "machine.json"
    machine = build(fit=Fit(compute=1.1, runs=["a"]))
    write_machine(path, machine)
    assert read_machine(path) == machine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda page: page["sharing"][1].update(slow_down=1.0), "changed after it was measured"),
        (lambda page: page.pop("sha256"), "changed after it was measured"),
        (lambda page: page.update(format="something"), "no machine file of this version"),
        (lambda page: page.update(speed=3), "speed"),
        (lambda page: page.pop("collectives"), "collectives"),
    ],
)
def test_an_edited_file_is_refused(tmp_path, change, message):
    path = tmp_path / "machine.json"
    write_machine(path, build())
    page = json.loads(path.read_text())
    change(page)
    path.write_text(json.dumps(page))
    with pytest.raises(RequestError, match=message):
        read_machine(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '"machine"', '{"format": 3}'])
def test_what_is_no_machine_file_is_refused(tmp_path, text):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(RequestError, match="machine"):
        read_machine(path)


def test_a_missing_file_says_how_it_is_made(tmp_path):
    with pytest.raises(RequestError, match="shoal calibrate"):
        read_machine(tmp_path / "machine.json")


@pytest.mark.parametrize(("what", "value"), [("cpu", "abacus"), ("cores", 4096), ("torch", "0.1")])
def test_another_machines_file_is_refused_and_says_both(tmp_path, what, value):
    path = tmp_path / "machine.json"
    provenance = build().provenance.model_copy(update={what: value})
    write_machine(path, build(provenance=provenance))
    with pytest.raises(RequestError, match=f"another machine.*{value}"):
        read_machine(path)
    assert read_machine(path, is_here=False).provenance == provenance


def test_the_default_path_honours_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "shoal" / "machine.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(module.Path, "home", classmethod(lambda cls: tmp_path))
    assert default_path() == tmp_path / ".cache" / "shoal" / "machine.json"


def test_sharing_is_a_line_between_what_was_measured():
    machine = build()
    assert [machine.slow_down(count) for count in (0, 1, 2, 3, 4)] == pytest.approx([1.0, 1.0, 1.2, 1.7, 2.2])
    # Beyond: as it went on from two to four.
    assert machine.slow_down(8) == pytest.approx(4.2)


@pytest.mark.parametrize(
    ("num_bytes", "ranks", "processes", "seconds"),
    [
        (1000, 2, 2, 1e-3),
        (2000, 2, 2, 1.5e-3),
        (2000, 4, 4, 7e-3),
        (2000, 2, 4, 2.25e-3),
        # Beyond the largest on the same line; below the smallest never less than half of it.
        (5000, 2, 2, 3e-3),
        (1, 2, 2, 0.5005e-3),
        # No channel of eight: that of four is nearest.
        (2000, 8, 8, 7e-3),
        (0, 2, 2, 0.0),
        (2000, 1, 2, 0.0),
    ],
)
def test_a_collective_is_a_line_between_sizes(num_bytes, ranks, processes, seconds):
    assert build().collective_seconds("all_reduce", num_bytes, ranks=ranks, processes=processes) == pytest.approx(
        seconds
    )


def test_an_operation_that_was_not_timed_is_taken_for_a_sum():
    machine = build()
    assert machine.collective_seconds("all_reduce_max", 2000, ranks=2, processes=2) == pytest.approx(1.5e-3)


def roomy(machine, *, cores):
    return machine.model_copy(update={"provenance": machine.provenance.model_copy(update={"cores": cores})})


def test_ranks_that_outnumber_the_cores_compute_while_others_wait():
    """What a rank computes was timed in their company; only a message, whose wait is played, takes longer."""
    meetings = [
        Meeting(operation=word, ranks=2, processes=4, seconds=0.05, factor=2.0) for word in ("all_reduce", "send")
    ]
    bare, met = roomy(build(), cores=2), roomy(build(meetings=meetings), cores=2)
    for operation in ("all_reduce", "all_gather"):
        alone = bare.collective_seconds(operation, 2000, ranks=2, processes=4)
        assert met.collective_seconds(operation, 2000, ranks=2, processes=4) == alone > 0
    message = bare.collective_seconds("send", 2000, ranks=2, processes=4)
    assert met.collective_seconds("send", 2000, ranks=2, processes=4) == pytest.approx(0.05 + 2 * message)


def test_ranks_that_compute_take_longer_to_meet():
    late = Meeting(operation="all_reduce", ranks=2, processes=2, seconds=0.01, factor=2.0)
    crowded = Meeting(operation="all_reduce", ranks=2, processes=4, seconds=0.05, factor=1.0)
    bare, met = roomy(build(), cores=4), roomy(build(meetings=[late, crowded]), cores=4)
    alone = bare.collective_seconds("all_reduce", 2000, ranks=2, processes=2)
    assert met.collective_seconds("all_reduce", 2000, ranks=2, processes=2) == pytest.approx(0.01 + 2 * alone)
    in_four = bare.collective_seconds("all_reduce", 2000, ranks=2, processes=4)
    assert met.collective_seconds("all_reduce", 2000, ranks=2, processes=4) == pytest.approx(0.05 + in_four)
    # A message has a meeting of its own, or none; one rank alone meets nobody.
    message = bare.collective_seconds("send", 2000, ranks=2, processes=2)
    assert met.collective_seconds("send", 2000, ranks=2, processes=2) == message
    assert met.collective_seconds("all_reduce", 2000, ranks=1, processes=2) == 0.0


def test_a_file_with_the_old_names_of_collectives_is_read(tmp_path):
    machine, path = build(), tmp_path / "machine.json"
    old = json.loads(machine.model_dump_json().replace('"all_reduce"', '"sum"'))
    assert old["collectives"][0]["operation"] == "sum"
    path.write_text(json.dumps({**old, "sha256": module._checksum(old)}))
    assert read_machine(path).collectives == machine.collectives
