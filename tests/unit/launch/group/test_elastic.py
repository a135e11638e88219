"""The supervisor's part in an elastic run on one host: the real decisions, and a control board on which this test writes."""

import contextlib
import json
import os

import pytest

from shoal.comm.store.recordfile import RecordFileStore
from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.elastic.config import GroupConfig
from shoal.launch.config import ProcessConfig
from shoal.launch.group.elastic import ElasticGroup
from shoal.trainer.elastic.membership import build_membership


@pytest.fixture
def group():
    config = GroupConfig(mode="shrink", rejoin=True, max_failures=1000)
    policy = build_membership(config, ProcessConfig(), Plan(dp=2))
    made = ElasticGroup(policy, report=lambda event: None, tell=lambda text: None, host="here")
    for slot in range(2):
        made.control.say_ready(slot)
    made.look()
    yield made
    made.close()


def replace_rank(group, slot):
    """A rank dies, and another one comes in its place."""
    group.take_starts()
    group.lost(slot, "killed")
    (start,) = group.take_starts()
    group.control.say_ready(start.slot)
    group.look()


def test_a_run_of_many_views_does_not_use_up_the_open_files(group):
    first = json.loads(group.control.read()[1])["store"]
    RecordFileStore(first).set("key", "value")
    for _ in range(35):
        replace_rank(group, 1)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(35):
        replace_rank(group, 1)
    assert group.control.epoch == 141 and len(os.listdir("/proc/self/fd")) == before
    # Its number is that of a newer store, or nobody's.
    with contextlib.suppress(OSError):
        assert not RecordFileStore(first).check(["key"])


def test_the_number_of_a_store_that_another_file_has_by_now_is_not_written_to(tmp_path):
    path = tmp_path / "of somebody else"
    path.write_text("content")
    with path.open("r+") as other, pytest.raises(RunError, match="of somebody else by now"):
        RecordFileStore(f"/proc/self/fd/{other.fileno()}")
    assert path.read_text() == "content"
