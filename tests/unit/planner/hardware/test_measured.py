"""A machine file as a cluster: what is planned on it takes what was measured."""

import json
from dataclasses import replace

import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.costs.layers import Layer, LayerKind, Op, OpKind
from shoal.planner.hardware.clusters import BETWEEN, measured_cluster, read_cluster
from shoal.planner.hardware.machine import CoreSharing, Fit, Meeting, write_machine
from shoal.planner.hardware.presets import LINKS
from shoal.planner.hardware.software import SOFTWARE, Stack
from shoal.planner.pricing.collectives import Group, all_reduce, wire_of
from shoal.planner.pricing.kernels import Slice, time_layer
from shoal.planner.search.estimate import estimate
from support.planner.jobs import job_of, shape_of
from support.planner.machines import GIB, LARGE, SLOW, SMALL, measured, product_seconds


def write(tmp_path, **changes):
    path = tmp_path / "machine.json"
    write_machine(path, measured(**changes))
    return path


def product(rows, inner, outer):
    op = Op(kind=OpKind.MATMUL, rows=rows, inner=inner, outer=outer)
    return Layer(name="product", kind=LayerKind.BLOCK, ops=(op,))


@pytest.mark.parametrize("count", SLOW)
def test_what_was_measured_comes_out(count):
    cluster = measured_cluster(measured(), path="m", num_processes=count)
    assert cluster.num_devices == count and cluster.device.memory_bytes == 8 * GIB / count
    assert cluster.device.free_bytes == 8 * GIB / count - GIB // 4
    for sizes in (SMALL, LARGE):
        found = time_layer(
            product(*sizes), Slice(samples=1), device=cluster.device, precision="float32", item_bytes=4,
            software=SOFTWARE["fsdp"], constants=cluster.reached,
        )  # fmt: skip
        assert found.forward + found.kernels * cluster.reached.launch == pytest.approx(
            product_seconds(*sizes, SLOW[count]), rel=1e-3
        )
    if count > 1:
        wire = wire_of(Group(count, 1), cluster, cluster.reached)
        for size in (4096, 1 << 20, 4 << 20):
            # Of more than two a small sum goes by a tree and a large one around a ring, and one latency stands for both.
            assert all_reduce(size, wire) == pytest.approx(1e-4 * count + size / 1e9, rel=1e-6 if count == 2 else 0.2)


def flattered():
    """A file of before: four processes on two cores, each as fast as one that has a core for itself."""
    two = [time for time in measured().matmuls if time.processes == 2]
    copy = next(time for time in measured().copies if time.processes == 2)
    return measured(
        matmuls=[*measured().matmuls[:-2], *(time.model_copy(update={"processes": 4}) for time in two)],
        copies=[*measured().copies[:-1], copy.model_copy(update={"processes": 4})],
        sharing=[
            CoreSharing(processes=2, threads=1, slow_down=1.5),
            CoreSharing(processes=4, threads=1, slow_down=3.2),
        ],
    )


def test_more_processes_than_cores_are_not_faster():
    """``machine.json:4`` of two cores was predicted to be faster than two processes, against the file's own ``sharing``."""
    two, four = (measured_cluster(flattered(), path="m", num_processes=count) for count in (2, 4))
    assert four.device.flops("float32") == pytest.approx(two.device.flops("float32") * 1.5 / 3.2)
    assert four.device.memory_bandwidth == pytest.approx(two.device.memory_bandwidth * 1.5 / 3.2)
    seconds = {}
    for plan, cluster in (("dp=2 microbatches=4", two), ("dp=4 microbatches=2", four)):
        stack = Stack(software=SOFTWARE["shoal"], constants=cluster.reached, is_fitted=False)
        job = replace(job_of(shape_of(layers=2), precision="float32", weight_bytes=4.0), cluster=cluster, stack=stack)
        seconds[plan[:4]] = estimate(job, Plan.parse(plan)).seconds
    assert seconds["dp=4"] > seconds["dp=2"]


def test_cores_that_are_missing_count_where_sharing_was_noise():
    machine = flattered()
    noise = [point.model_copy(update={"slow_down": 2.0}) for point in machine.sharing]
    machine = machine.model_copy(update={"sharing": noise})
    two, four = (measured_cluster(machine, path="m", num_processes=count) for count in (2, 4))
    assert four.device.flops("float32") == pytest.approx(two.device.flops("float32") / 2)


def test_what_speaks_against_a_file_is_said(tmp_path):
    """A file of a busy machine was used without a word; an outlier in it made a plan 72 times too slow."""
    assert measured_cluster(measured(), path="m").warnings == ()
    busy = measured().provenance.model_copy(update={"load": 5.6})
    (told,) = measured_cluster(measured(provenance=busy), path="m").warnings
    assert "m was measured on a busy machine (load 5.6)" in told and "`shoal calibrate m`" in told
    first, *rest = measured().matmuls
    outlier = first.model_copy(update={"seconds": 11.9e-3, "threads": 2})
    (told,) = measured_cluster(measured(matmuls=[outlier, *rest]), path="m").warnings
    assert "1.19e+04 us for a product of 64 x 64 x 256 in 1 process(es) of 2 thread(s)" in told and "again" in told


def test_meetings_and_past_runs_count():
    meeting = Meeting(operation="all_reduce", ranks=2, processes=2, seconds=1e-3, factor=2.0)
    plain, met = (measured_cluster(measured(meetings=each), path="m") for each in ([], [meeting]))
    assert met.tiers[0].bandwidth == pytest.approx(plain.tiers[0].bandwidth / 2)
    assert met.tiers[0].latency == pytest.approx(2 * plain.tiers[0].latency + 1e-3 / 2)
    fitted = measured_cluster(measured(fit=Fit(compute=2.0, communication=3.0, runs=["a"])), path="m")
    assert fitted.device.flops("float32") == pytest.approx(plain.device.flops("float32") / 2)
    assert fitted.device.memory_bandwidth == pytest.approx(plain.device.memory_bandwidth / 2)
    assert fitted.tiers[0].bandwidth == pytest.approx(plain.tiers[0].bandwidth / 3)


@pytest.mark.parametrize(
    ("size", "tiers"), [("", [2]), (":1", [1]), (":4", [4]), (":3x2", [2, 6]), (":3x2@ethernet-1g", [2, 6])]
)
def test_a_file_is_a_cluster(tmp_path, size, tiers):
    path = write(tmp_path)
    cluster = read_cluster(f"{path}{size}")
    assert [tier.devices for tier in cluster.tiers] == tiers
    link = LINKS["ethernet-1g" if "@" in size else BETWEEN]
    if len(tiers) > 1:
        assert cluster.tiers[-1].bandwidth == link.bandwidth / tiers[0], "one port for all processes of a machine"
    else:
        assert [tier.devices for tier in cluster.resized(8).tiers] == [*tiers, 8]


def test_an_at_in_the_folder_of_a_file_is_no_link(tmp_path):
    folder = tmp_path / "me@home"
    folder.mkdir()
    assert read_cluster(f"{write(folder)}:3x2@ethernet-1g").tiers[-1].name == "ethernet-1g"


def test_a_file_of_another_machine_is_what_one_plans_with(tmp_path):
    origin = measured().provenance.model_copy(update={"cpu": "abacus"})
    assert read_cluster(str(write(tmp_path, provenance=origin))).device.name == "abacus"


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({}, ":3", r"with 1, 2, 4 processes, and 3 are asked for; write .*json:1 or .*json:2 or .*json:4$"),
        ({}, ":6", r"with 1, 2, 4 processes, and 6 are asked for; write .*json:4, or .*json:2x4 for 2 such machines$"),
        ({}, ":0", r"json:0' has no process; write .*json:PROCESSES"),
        ({}, ":0x2", r"json:0x2' has no process; write .*json:PROCESSES"),
        ({"memory_bytes": 0}, "", "does not say how much memory its machine has.*run `shoal calibrate .*json` there"),
        ({}, "@ether", "there is no link 'ether'"),
    ],
)
def test_what_a_file_does_not_know_is_said(tmp_path, change, size, message):
    with pytest.raises(RequestError, match=message):
        read_cluster(f"{write(tmp_path, **change)}{size}")


@pytest.mark.parametrize("text", ["", "[]", "not JSON", '{"format": "other"}', None])
def test_what_is_no_machine_file_is_refused_with_the_fix(tmp_path, text):
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RequestError, match=r"other\.json.*shoal calibrate"):
        read_cluster(f"{path}:2")


def test_a_folder_and_a_text_say_what_to_name_in_their_place(tmp_path):
    with pytest.raises(RequestError, match=r"is a folder; name a machine file.*machine\.json.*or name a device"):
        read_cluster(str(tmp_path))
    (tmp_path / "notes.json").write_text("hello")
    with pytest.raises(RequestError, match=r"notes\.json is no machine file.*shoal calibrate FILE.*or name a device"):
        read_cluster(str(tmp_path / "notes.json"))


def test_a_plan_on_a_machine_is_priced_by_what_it_reached():
    cluster = measured_cluster(measured(), path="m")
    stack = Stack(software=SOFTWARE["shoal"], constants=cluster.reached, is_fitted=False)
    job = replace(job_of(shape_of(layers=2), precision="float32", weight_bytes=4.0), cluster=cluster, stack=stack)
    one = estimate(job, Plan.parse("dp=2 microbatches=8"))
    flops = 3 * job.chain.forward_flops * job.global_batch / 2
    assert one.seconds > flops / (50e9 / 1.5) and one.utilisation < 1
    assert json.dumps(one.as_dict()) and one.limit == cluster.device.free_bytes
