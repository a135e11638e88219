"""Which role each process of a launcher becomes, and what it is started with."""

from pathlib import Path

import pytest

from shoal.core.errors import RequestError
from shoal.core.place import Place
from shoal.core.plan import Plan
from shoal.serverrun.launched import asks_servers, check_servers
from shoal.serverrun.roles import Meeting, list_roles
from shoal.trainer.request import TrainRequest

PLAN = Plan.parse("ps=2 workers=2")
MEETING = Meeting(run_dir="/run", key="/run/.roles-1/key", center="tcp://127.0.0.1:7000", threads=3)


def _roles(rank: int, *, generation: int = 0, resume: bool = False):
    place = Place(rank=rank, world_size=4, local_size=4, is_launched=True, address="127.0.0.1", generation=generation)
    request = TrainRequest(recipe=Path("r.toml"), overrides=("train.steps=7",), resume=resume)
    return list_roles(request, place, PLAN, MEETING, address="10.0.0.1")


def test_the_first_ranks_are_servers_and_the_first_of_them_has_the_center():
    assert [[role.name for role in _roles(rank)] for rank in range(4)] == [
        ["center-0", "server-0"],
        ["server-1"],
        ["worker-0"],
        ["worker-1"],
    ]


def test_all_roles_have_the_same_settings_center_and_key():
    for role in (role for rank in range(4) for role in _roles(rank)):
        words = role.arguments
        assert words[:3] == ("role", role.name.partition("-")[0], "r.toml")
        assert words[words.index("--centers") + 1] == MEETING.center
        assert words[words.index("--keys") + 1] == "/run/.roles-1/key"
        assert {"train.steps=7", "train.threads=3"} <= set(words)


def test_a_server_goes_on_when_it_is_started_again_and_when_the_launcher_has_restarted_all():
    (server,) = _roles(1)
    assert "--resume" not in server.arguments and server.again == ("--resume",)
    for found in (_roles(1, generation=1), _roles(1, resume=True)):
        assert found[0].arguments.count("--resume") == 1 and found[0].again == ()
    assert _roles(2)[0].again == ()


def test_servers_of_the_launcher_and_none_in_the_plan_are_refused(tiny):
    request = TrainRequest(recipe=tiny, plan="dp=3")
    assert not asks_servers(request) and asks_servers(TrainRequest(recipe=tiny, plan="ps=1 workers=2"))
    place = Place(world_size=3, num_servers=1, is_launched=True, launcher="tf_config")
    with pytest.raises(RequestError, match=r"tf_config has 1 parameter server\(s\) among its 3 processes"):
        check_servers(place, has_servers=False)
