"""Places from the environments of launchers, as they were captured, and from those that make no sense."""

import json
from pathlib import Path

import pytest

from shoal.core.errors import RequestError
from shoal.core.place import Place
from shoal.launch.environments import read_place, refuse_launcher

_CAPTURED = Path(__file__).parent / "captured"


def _captured(name: str) -> dict[str, str]:
    lines = (_CAPTURED / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def _numbers(place: Place) -> tuple[str, int, int, int, int | None]:
    return place.launcher, place.rank, place.world_size, place.local_rank, place.local_size


def test_a_step_of_slurm_on_four_hosts() -> None:
    place = read_place(_captured("slurm-22.05-step"))
    assert _numbers(place) == ("slurm", 3, 8, 1, 2)
    assert place.hosts == ("rack0n01", "rack0n02", "rack1n01", "rack1n02")
    assert place.address == "rack0n01" and 20000 <= place.port < 30000


def test_a_step_of_slurm_with_unequal_hosts() -> None:
    assert _numbers(read_place(_captured("slurm-22.05-uneven"))) == ("slurm", 4, 5, 0, 1)


def test_all_tasks_of_a_step_come_to_one_port_and_other_steps_to_another() -> None:
    given = _captured("slurm-22.05-step")
    ports = {read_place({**given, "SLURM_PROCID": str(rank)}).port for rank in range(8)}
    assert len(ports) == 1
    assert read_place({**given, "SLURM_STEP_ID": "1"}).port not in ports


def test_a_batch_script_is_no_rank_though_it_has_the_number_0() -> None:
    """``SLURM_PROCID=0`` stands in a batch script too: taken for a rank it would wait for others for ever."""
    with pytest.raises(RequestError, match="the script of SLURM job 2 and not one of its 3 tasks; write `srun shoal"):
        read_place(_captured("slurm-22.05-batch"))
    assert not read_place({**_captured("slurm-22.05-batch"), "SLURM_NTASKS": "1"}).is_launched


def test_a_step_of_one_task_may_start_ranks_of_its_own() -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert not read_place(given).is_launched


def test_a_rank_of_torchrun_on_the_second_of_two_hosts() -> None:
    given = _captured("torchrun-2.13")
    place = read_place(given)
    assert _numbers(place) == ("torchrun", 3, 4, 1, 2) and (place.address, place.port) == ("localhost", 41977)
    assert place.generation == 0 and read_place({**given, "TORCHELASTIC_RESTART_COUNT": "2"}).generation == 2
    inside = read_place({**_captured("slurm-22.05-step"), **given})
    assert _numbers(inside) == _numbers(place), "as the task of a step it has ranks of its own"


def test_open_mpi_and_mpich_on_one_host() -> None:
    place = read_place(_captured("openmpi-4.1.4"))
    assert _numbers(place) == ("openmpi", 1, 2, 1, 2) and place.address == "127.0.0.1"
    place = read_place(_captured("mpich-4.0.2"))
    assert _numbers(place) == ("mpich", 1, 2, 1, 2) and place.address == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "local", "flag"),
    [
        ("openmpi-4.1.4", "OMPI_COMM_WORLD_LOCAL_SIZE", "-x MASTER_ADDR"),
        ("mpich-4.0.2", "MPI_LOCALNRANKS", "-genv MASTER_ADDR"),
    ],
)
def test_mpi_on_several_hosts_does_not_say_where_rank_0_is(name: str, local: str, flag: str) -> None:
    """The address that Open MPI shows is its launcher's, on another host."""
    given = {**_captured(name), local: "1"} | ({} if "open" in name else {"MPI_LOCALRANKID": "0"})
    given |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0"} if "open" in name else {}
    with pytest.raises(RequestError, match=f"2 processes, 1 of them on this host.*{flag}"):
        read_place(given)
    assert read_place({**given, "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}).address == "h1"


def _tf(kind: str, index: int, **cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_tf_config_counts_the_chief_first() -> None:
    given = {"chief": ["a:2222"], "worker": ["b:2222", "a:2223"]}
    assert _numbers(read_place(_tf("chief", 0, **given))) == ("tf_config", 0, 3, 0, 2)
    place = read_place(_tf("worker", 1, **given))
    assert _numbers(place) == ("tf_config", 2, 3, 1, 2)
    assert (place.address, place.port, place.hosts) == ("a", 2222, ("a", "b"))
    assert read_place(_tf("worker", 0, worker=["x:1", "y:1"])).address == "x"


def test_parameter_servers_of_tf_config_are_the_first_ranks() -> None:
    given = {"chief": ["a:2222"], "worker": ["b:2222", "a:2223"], "ps": ["c:2222", "a:2224"]}
    tasks = [("ps", 0), ("ps", 1), ("chief", 0), ("worker", 0), ("worker", 1)]
    places = [read_place(_tf(kind, index, **given)) for kind, index in tasks]
    assert [place.rank for place in places] == [0, 1, 2, 3, 4]
    assert {(place.world_size, place.num_servers, place.address, place.port) for place in places} == {(5, 2, "c", 2222)}
    assert _numbers(places[4]) == ("tf_config", 4, 5, 2, 3)


def test_an_index_is_that_of_a_node_where_a_node_has_several_ranks() -> None:
    given = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "6", "MASTER_ADDR": "job-0.job", "LOCAL_WORLD_SIZE": "3"}
    assert _numbers(read_place({**given, "LOCAL_RANK": "2"})) == ("indexed", 5, 6, 2, 3)


def test_a_node_of_kubeflow_and_its_ranks() -> None:
    given = {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400"}
    place = read_place(given)
    assert (_numbers(place), place.address, place.port) == (("kubeflow", 2, 3, 0, 1), "job-node-0-0.job", 29400)
    several = {**given, "PET_NPROC_PER_NODE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert _numbers(read_place(several)) == ("kubeflow", 9, 12, 1, 4)
    of_torchrun = {**several, "RANK": "9", "WORLD_SIZE": "12", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    of_torchrun["TORCHELASTIC_RUN_ID"] = "none"
    assert read_place(of_torchrun).launcher == "torchrun", "its command may be torchrun's, as Kubeflow means it"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (_tf("evaluator", 0, worker=["b:1"]), "evaluator 0, which is no rank; evaluate a run with `shoal eval`"),
        (_tf("ps", 1, ps=["a:1"], worker=["b:1"]), "ps 1 of a cluster with 1 of that kind"),
        (
            {"WORKER_INDEX": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            "WORKER_INDEX=1 makes this process a node with 2 ranks",
        ),
        (_tf("worker", 2, worker=["a:1", "b:1"]), "worker 2 of a cluster with 2 of that kind"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not a cluster with a task"),
        (_tf("worker", 0, worker=["a", "b"]), "'a', which is not host:port"),
        ({"PET_NNODES": "2:4"}, "PET_NNODES=2:4: the number of nodes has to be fixed"),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto: write the number of processes"),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1"}, "a node with 4 ranks .*--per-node 4"),
        ({"PET_NNODES": "2"}, "PET_NNODES=2 without PET_NODE_RANK and PET_MASTER_ADDR"),
        ({"JSM_NAMESPACE_RANK": "1"}, "LSF's jsrun"),
        ({"PALS_RANKID": "1"}, "PALS"),
        ({"JOB_COMPLETION_INDEX": "1"}, "indexed job of Kubernetes"),
        ({"WORKER_INDEX": "1"}, "set WORLD_SIZE, MASTER_ADDR and MASTER_PORT beside it"),
        ({"PMI_RANK": "1"}, "it set no PMI_SIZE"),
        ({"SKYPILOT_NODE_RANK": "0"}, "SkyPilot"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE='x', which is no whole"),
        ({"RANK": "1"}, "RANK=1 but not a whole WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, "local rank 3 of 2"),
        ({"SLURM_STEP_ID": "0"}, "no SLURM_PROCID"),
    ],
)
def test_what_is_seen_and_not_understood_is_refused_by_name(given: dict[str, str], message: str) -> None:
    """Each of these once made every host train a whole run of its own."""
    with pytest.raises(RequestError, match=message):
        read_place(given)


def test_an_index_with_size_and_address_is_a_rank() -> None:
    given = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0.svc"}
    assert _numbers(read_place(given)) == ("indexed", 1, 3, 0, 1)


def test_two_launchers_that_disagree_are_both_shown() -> None:
    slurm = _captured("slurm-22.05-step")
    with pytest.raises(RequestError, match=r"torchrun makes this process rank 0 of 2 .*slurm rank 3 of 8 .*unset"):
        read_place({**slurm, "RANK": "0", "WORLD_SIZE": "2"})
    assert read_place({**slurm, "RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "h"}).launcher == "torchrun"


def test_two_launchers_that_name_other_hosts_of_rank_0_are_both_shown() -> None:
    """Rank and size were compared alone: each rank went where the first launcher sent it."""
    ranked = {"RANK": "0", "WORLD_SIZE": "2"}
    tf, slurm = _tf("worker", 0, worker=["p:1", "b:1"]), _captured("slurm-22.05-step")
    message = (
        r"torchrun says that rank 0 is at q \(.*MASTER_ADDR=q\), and tf_config that it is at p \(TF_CONFIG=.*unset"
    )
    with pytest.raises(RequestError, match=message):
        read_place({**tf, **ranked, "MASTER_ADDR": "q"})
    numbers = _tf("worker", 0, worker=["10.0.0.1:1", "10.0.0.2:1"])
    with pytest.raises(RequestError, match=r"rank 0 is at 10\.0\.0\.9 .*tf_config that it is at 10\.0\.0\.1"):
        read_place({**numbers, **ranked, "MASTER_ADDR": "10.0.0.9"})
    with pytest.raises(RequestError, match=r"tf_config says that rank 0 is at p .*slurm that it is at rack0n01"):
        eight = [f"{name}:1" for name in "pabcdefg"]
        read_place({**slurm, "SLURM_PROCID": "0", **_tf("worker", 0, worker=eight)})
    # One host by a shorter and a longer name; by a number, of which a text does not tell; and not named at all.
    for address in ("p", "P.cluster.local", "10.0.0.1", ""):
        assert read_place({**tf, **ranked, "MASTER_ADDR": address}).address == address
    openmpi = {**_captured("openmpi-4.1.4"), **_tf("worker", 1, worker=["10.0.0.1:1", "10.0.0.1:2"])}
    assert read_place(openmpi).launcher == "tf_config", "loopback is what is left where MPI says nothing"


def test_a_launcher_inside_another_has_ranks_of_its_own() -> None:
    """torchrun as the task of a SLURM step on each host, mpirun in a SLURM job, and our supervisor under any of them."""
    slurm = _captured("slurm-22.05-step")
    assert _numbers(read_place({**slurm, **_captured("openmpi-4.1.4")}))[:3] == ("openmpi", 1, 2)
    elastic = {"RANK": "5", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "x"}
    assert read_place({**slurm, **elastic}).rank == 5
    assert read_place({**slurm, "RANK": "0", "WORLD_SIZE": "2", "SHOAL_STORE": "/x"}).launcher == "supervisor"


def test_detection_can_be_turned_off() -> None:
    assert read_place({**_captured("slurm-22.05-step"), "SHOAL_LAUNCHER": "off"}) == Place()


def test_verbs_that_start_processes_refuse_to_be_ranks() -> None:
    """``verify`` under a launcher proved every host's own local run, and said bit for bit."""
    with pytest.raises(RequestError, match=r"shoal verify starts its own processes.*rank 3 of 8 of slurm"):
        refuse_launcher(_captured("slurm-22.05-step"), "shoal verify")
    refuse_launcher({}, "shoal verify")
    refuse_launcher({"RANK": "0", "WORLD_SIZE": "2", "SHOAL_STORE": "/x"}, "shoal verify")
