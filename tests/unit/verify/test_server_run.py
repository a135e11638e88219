"""What servers and workers put down, read back: updates from replicas that came and went, and what must not be."""

import json

import pytest
import torch
from safetensors.torch import save_file

from shoal.core.errors import RunError
from shoal.core.placement import place_whole
from shoal.core.plan import Plan
from shoal.verify.mutants.mutant import Death
from shoal.verify.reference.recording import placement_values
from shoal.verify.servers.roles import ServerJob
from shoal.verify.servers.run import read_run

WHOLE = torch.arange(12.0).reshape(4, 3)
ROWS = {0: (0, 1), 1: (1, 4)}


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def put_update(folder, *, server="server-0", instance_id="a", shard=0, number=0, change=0.0, loss=2.0, entries=None):
    """One update of a replica that holds some rows of one weight."""
    first, last = ROWS[shard]
    rows = WHOLE[first:last] + number + change
    stem = folder / f"update-{server}-{instance_id}-{shard}-{number}"
    tensors = {"grad/a": rows, "weight/a": rows * 2, "optimizer/a/step": torch.tensor(float(number))}
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, f"{stem}.safetensors")
    page = {
        "server": server,
        "instance_id": instance_id,
        "shard": shard,
        "update": {"number": number, "entries": entries or [["w", number, 1.0]], "loss": loss},
        "pieces": [["a", first * 3, last * 3, shard]],
        "placements": {"a": placement_values(place_whole((4, 3)).rows(first, last))},
    }
    stem.with_suffix(".json").write_text(json.dumps(page))


def put_read(folder, number, versions=(0, 0)):
    page = {"worker": "w", "number": number, "units": [number], "versions": versions, "version": min(versions)}
    page |= {"index": 0, "works": [{"unit": number, "read": versions}], "samples": 4}
    (folder / f"read-w-{number}.json").write_text(json.dumps(page))


def put_run(folder, updates=2):
    for number in range(updates):
        put_read(folder, number, versions=(number, max(0, number - 1)))
        for shard in (0, 1):
            put_update(folder, server=f"server-{shard}", shard=shard, number=number)


def test_an_update_is_put_together_from_its_shards(folder):
    put_run(folder)
    run = read_run(folder, num_shards=2)
    assert [part.versions for update in run.updates for part in update.parts] == [(0, 0), (1, 0)]
    assert run.pieces == (("a", 0, 3, 0), ("a", 3, 12, 1))
    step = run.gather(1).step
    assert torch.equal(step.tensors["grad/a"], WHOLE + 1) and torch.equal(step.tensors["weight/a"], 2 * WHOLE + 2)
    assert step.loss == 2.0 and step.norm == pytest.approx(float((WHOLE + 1).norm()))
    assert run.gather(1).disagreeing == {} and run.describe().startswith("a log of 2 updates, 1 of 2 gradients late")


def test_a_backup_that_drifts_is_seen(folder):
    put_run(folder)
    for number in range(2):
        put_update(folder, server="server-1", instance_id="b", shard=0, number=number, change=1e-6 * number)
    run = read_run(folder, num_shards=2)
    assert run.gather(0).disagreeing == {}
    (wrong,) = set(run.gather(1).disagreeing.values())
    layout = run.layout(Plan.parse("ps=2 workers=2"))
    assert layout.describe_ranks(wrong) == "shard 0 on server-1"


def test_a_replica_may_die_and_another_come_later(folder):
    put_run(folder, updates=3)
    for suffix in ("json", "safetensors"):
        (folder / f"update-server-0-a-0-2.{suffix}").unlink()
    for number in (1, 2):
        put_update(folder, server="server-0", instance_id="b", shard=0, number=number)
    run = read_run(folder, num_shards=2)
    assert [len(run.gather(number).pieces["grad/a"]) for number in range(3)] == [2, 3, 2]
    assert all(torch.equal(run.gather(number).step.tensors["grad/a"], WHOLE + number) for number in range(3))


def test_servers_that_apply_different_updates_are_refused(folder):
    put_run(folder)
    put_update(folder, server="server-1", shard=1, number=1, loss=3.0)
    with pytest.raises(RunError, match="update 2 is not the same in shard 0 on server-0 and in shard 1 on server-1"):
        read_run(folder, num_shards=2)


def test_an_update_that_a_shard_lacks_is_refused(folder):
    put_run(folder)
    (folder / "update-server-1-a-1-1.json").unlink()
    with pytest.raises(RunError, match="no server recorded update 2 of shard 1"):
        read_run(folder, num_shards=2)


def test_a_gradient_of_nobody_is_refused(folder):
    put_run(folder)
    (folder / "read-w-1.json").unlink()
    with pytest.raises(RunError, match="update 2 has gradient 1 of w, which no worker computed"):
        read_run(folder, num_shards=2)


def test_a_run_without_an_update_is_refused(folder):
    with pytest.raises(RunError, match="no server recorded update 1 of shard 0"):
        read_run(folder, num_shards=1)


def test_a_job_survives_its_file(tmp_path):
    job = ServerJob(folder=tmp_path, steps=3, mutant=None, deaths=[Death("server-0", 1)])
    job.write(tmp_path)
    assert ServerJob.read(tmp_path) == job
