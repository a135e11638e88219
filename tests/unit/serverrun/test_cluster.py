"""Where the processes of a run on several machines meet: what is refused before anything listens."""

import pytest

from shoal.comm.wire.keys import make_keys
from shoal.core.errors import RequestError
from shoal.serverrun.cluster import check_candidate, find_candidate, read_cluster
from shoal.serverrun.process import shared_settings
from shoal.trainer.config import load_recipe

THREE = "tcp://10.0.0.1:7000,tcp://10.0.0.2:7000,tcp://10.0.0.3:7000"


@pytest.fixture
def key(tmp_path):
    make_keys(tmp_path / "key")
    return tmp_path / "key"


def test_every_candidate_finds_its_seat(key):
    cluster = read_cluster(centers=THREE, listen="tcp://10.0.0.2:7000", keys=key)
    check_candidate(cluster)
    assert cluster.index == 1 and cluster.names == ("center-0", "center-1", "center-2")


def test_only_what_other_users_cannot_open_needs_no_key(key):
    with pytest.raises(RequestError, match=r"tcp://127\.0\.0\.1:7000 needs a key: every user of this machine"):
        read_cluster(centers="tcp://127.0.0.1:7000")
    assert read_cluster(centers="tcp://127.0.0.1:7000", keys=key).centers == ("tcp://127.0.0.1:7000",)
    assert len(read_cluster(centers="ipc:///tmp/a,ipc:///tmp/b,ipc:///tmp/c").centers) == 3


@pytest.mark.parametrize(
    ("centers", "listen", "says"),
    [
        ("", "", "--centers is empty"),
        (THREE, "", "shoal keys new"),
        ("ipc:///tmp/a,ipc:///tmp/b,ipc:///tmp/a", "", "names an address twice"),
        ("ipc:///tmp/a", "tcp://127.0.0.1:0", "--listen: tcp://127.0.0.1:0 needs a key"),
        ("ipc:///tmp/a", "tcp://10.0.0.9:7001", "--listen: tcp://10.0.0.9:7001 leaves this machine"),
        ("udp://10.0.0.1:7000", "", "--centers: 'udp://10.0.0.1:7000' is no address"),
        ("inproc://a", "", "inside one process"),
        (f"tcp://127.0.0.1:1#{'ab' * 32}", "", "this process has none"),
    ],
)
def test_what_is_refused_without_a_key(centers, listen, says):
    with pytest.raises(RequestError, match=says):
        read_cluster(centers=centers, listen=listen)


@pytest.mark.parametrize(
    ("listen", "says"),
    [("tcp://0.0.0.0:7000", "no address that others can reach"), (f"tcp://10.0.0.1:7000#{'ab' * 32}", "has a key")],
)
def test_what_is_refused_with_a_key(key, listen, says):
    with pytest.raises(RequestError, match=says):
        read_cluster(centers=THREE, listen=listen, keys=key)


def test_a_candidate_needs_a_port(key):
    with pytest.raises(RequestError, match="has no port"):
        read_cluster(centers="tcp://127.0.0.1:0", keys=key)
    with pytest.raises(RequestError, match="names an address twice"):
        read_cluster(centers="tcp://127.0.0.1:1,tcp://localhost:1,tcp://127.0.0.1:2", keys=key)


def test_two_candidates_need_somebody_to_decide_between_them(key):
    two = {"centers": "tcp://127.0.0.1:1,tcp://127.0.0.1:2", "listen": "tcp://127.0.0.1:2", "keys": key}
    with pytest.raises(RequestError, match=r"a majority needs 3; add one, elect by --etcd"):
        check_candidate(read_cluster(**two))
    check_candidate(read_cluster(**two, etcd="http://127.0.0.1:2379/run"))
    with pytest.raises(RequestError, match=r"--etcd http://127.0.0.1:2379 names no key; write https://HOST:2379/KEY"):
        check_candidate(read_cluster(**two, etcd="http://127.0.0.1:2379"))


def test_a_candidate_that_the_others_do_not_know_is_refused(key):
    with pytest.raises(
        RequestError, match=r"does not contain --listen tcp://10\.0\.0\.9:7000: it has tcp://10\.0\.0\.1"
    ):
        find_candidate(tuple(THREE.split(",")), "tcp://10.0.0.9:7000")
    others = THREE.replace(":7000", f":7000#{'ab' * 32}", 1)
    with pytest.raises(RequestError, match="has the key abababababababab"):
        check_candidate(read_cluster(centers=others, listen="tcp://10.0.0.1:7000", keys=key))


def test_a_key_that_others_can_read_and_a_list_without_a_key_are_refused(key):
    with pytest.raises(RequestError, match="--allow"):
        read_cluster(centers="tcp://127.0.0.1:1", allow=key.parent)
    key.chmod(0o640)
    with pytest.raises(RequestError, match="others can read it"):
        read_cluster(centers=THREE, keys=key)


def test_settings_that_concern_a_process_alone_are_not_compared(tiny):
    ours = shared_settings(load_recipe(tiny))
    own = ("train.threads=2", "telemetry.tensorboard=true", "eval.samples=8", "elastic.stop_grace=5", "data.prefetch=1")
    assert shared_settings(load_recipe(tiny, own)) == ours
    for change in ("train.seed=2", "optim.lr=0.5", "paramserver.aggregate='adasum'", "train.steps=9", "plan='dp=2'"):
        assert shared_settings(load_recipe(tiny, (change,))) != ours, change
