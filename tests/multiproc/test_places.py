"""Ranks that share no folder: real processes, each with a run directory of its own, save and go on to the same bits."""

import shutil
from pathlib import Path

import pytest

from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.files import MANIFEST
from shoal.checkpoint.whole import newest_whole, verify
from shoal.core.errors import AgreedError, RequestError, RunError
from shoal.core.plan import Plan
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer

RECIPE = {
    "model": {"name": "gpt", "layers": 1, "hidden": 16, "heads": 2, "dropout": 0.1},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 64, "sequence": 8, "vocab": 33},
    "train": {"steps": 4, "global_batch": 8, "seed": 3},
    "optim": {"name": "adamw", "lr": 1e-2, "clip": 0.5},
}
SHARDS = ["rank-000.safetensors", "rank-001.safetensors"]


def build(world, run_dir, place, steps, *, resume=False, plan="dp=2 zero=3", every=2):
    recipe = Recipe.model_validate({**RECIPE, "train": {**RECIPE["train"], "steps": steps}})
    model, loss, data = build_parts(recipe)
    return Trainer(
        model,
        data,
        loss=loss,
        train=recipe.train,
        optim=recipe.optim,
        checkpoint=CheckpointConfig(every=every, place=place),
        plan=Plan.parse(plan),
        run_dir=run_dir,
        resume=resume,
        world=world,
    )


def train(world, run_dir, place, steps, **options):
    trainer = build(world, run_dir, place, steps, **options)
    started = trainer.progress.step
    trainer.train()
    ended = trainer.hash_weights()
    trainer.persistence.close()
    trainer.reporter.close()
    trainer.mesh.close()
    assert trainer.persistence.failure is None, trainer.persistence.failure
    return started, ended


def host_of(folder, rank):
    """What stands for the disk of a rank's host."""
    return Path(folder) / f"h{rank + 1}"


def save_and_resume(world, folder, places, plan):
    """Each place: 2 steps, then resumed to 4; the hash of the run that was left alone comes first."""
    own = host_of(folder, world.rank)
    own.mkdir(exist_ok=True)
    _, alone = train(world, Path(folder) / "alone", "shared", 4, plan=plan)
    found = [alone]
    for name, place in places:
        train(world, own / name, place, 2, plan=plan)
        started, ended = train(world, own / name, place, 4, resume=True, plan=plan)
        assert started == 2, f"{place}: went on from step {started}"
        found.append(ended)
    return found


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name not in ("good", "hosts.json"))


def test_checkpoints_of_hosts_without_a_common_folder_resume_to_the_same_bits(tmp_path):
    address = f"file://{tmp_path}/bucket/run"
    places = [["first", "auto"], ["hosts", "hosts"], ["address", address]]
    for hashes in run_on_ranks(save_and_resume, 2, str(tmp_path), places, "dp=2 zero=3", deadline_seconds=110.0):
        assert len(set(hashes)) == 1, hashes
    step = "checkpoints/step-00000004"
    first, second = tmp_path / "h1", tmp_path / "h2"
    # Gathered to the first host, whole there, and nothing is left on the second.
    assert verify(first / "first" / step) == []
    assert files(first / "first" / step) == [MANIFEST, *SHARDS] and files(second / "first" / "checkpoints") == []
    # Each its part, with the same manifest; each says where the rest is.
    for own, other in ((first, second), (second, first)):
        mine, theirs = SHARDS if own == first else SHARDS[::-1]
        assert files(own / "hosts" / step) == [MANIFEST, mine]
        assert (
            len(verify(own / "hosts" / step)) == 1
            and f"{theirs} is missing here: host" in verify(own / "hosts" / step)[0]
        )
        assert (own / "hosts" / step / MANIFEST).read_bytes() == (other / "hosts" / step / MANIFEST).read_bytes()
    shutil.copy(second / "hosts" / step / SHARDS[1], first / "hosts" / step)
    assert verify(first / "hosts" / step) == []
    # At the address, and nowhere else.
    stored = sorted(path.name[:13] for path in (tmp_path / "bucket" / "run").iterdir())
    assert stored == ["step-00000002", "step-00000004"]
    assert newest_whole(first / "address" / "checkpoints").path is None
    for own in (first, second):
        left = [path.name for path in own.rglob(".*")]
        assert left == [], left


def two_hosts_of_two(world, folder):
    """Ranks 0 and 1 on one host, 2 and 3 on another: saved so, resumed so, under another plan, and after a fall back."""
    own = host_of(folder, world.rank // 2)
    own.mkdir(exist_ok=True)
    _, alone = train(world, Path(folder) / "alone", "shared", 4, plan="dp=4 zero=3")
    found = []
    for place in ("first", "hosts"):
        train(world, own / place, place, 2, plan="dp=4 zero=3")
        found.append(train(world, own / place, place, 4, plan="dp=4 zero=1", resume=True))
        # Step 4 turns out to be useless: it is set aside on both hosts, and step 2 is what there is.
        trainer = build(world, own / place, place, 6, plan="dp=4 zero=3", resume=True)
        trainer.persistence.saver.proven.begin(4, good=2)
        said = trainer.persistence.fall_back()
        restored = trainer.persistence.restore(trainer._state_at, trainer.engine.state_to_load)
        found.append([said.partition(" (")[0].rpartition("/")[2].partition(" ")[0], restored.progress.step])
        trainer.persistence.close()
        trainer.reporter.close()
        trainer.mesh.close()
    return [alone, found]


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_ranks_that_share_a_folder_by_two_save_load_and_fall_back_together(tmp_path):
    for alone, found in run_on_ranks(two_hosts_of_two, 4, str(tmp_path), deadline_seconds=250.0):
        for started, ended in found[::2]:
            assert (started, ended) == (2, alone)
        assert [step for _, step in found[1::2]] == [2, 2], found
    for host in ("h1", "h2"):
        names = sorted(path.name[:20] for path in (tmp_path / host / "hosts" / "checkpoints").iterdir())
        assert names == [".aside-step-00000004", "step-00000002"], names


def refused(world, folder):
    """One message before the first step, the same on both ranks."""
    own = host_of(folder, world.rank)
    said = []
    for name, place in (("a", "shared"), ("b", f"file://{own}/bucket")):
        own.mkdir(exist_ok=True)
        try:
            build(world, own / name, place, 2)
        except (AgreedError, RunError) as error:
            said.append(str(error))
    # What another run left on one of the hosts: no rank begins.
    (own / "c" / "checkpoints").mkdir(parents=True)
    if world.rank == 1:
        (own / "c" / "checkpoints" / "step-00000002").mkdir()
    try:
        build(world, own / "c", "first", 2)
    except RequestError as error:
        said.append(str(error))
    return said


def test_what_cannot_be_saved_is_found_before_the_first_step(tmp_path):
    for shared, address, taken in run_on_ranks(refused, 2, str(tmp_path)):
        assert (
            "2 folders that do not share their files (rank 0 on " in shared
            and 'set checkpoint.place to "first"' in shared
        )
        assert "what rank 1 (" in address and "it is another place on each host" in address
        assert "holds the checkpoints of a run" in taken
    assert not list(tmp_path.rglob(".seen-*"))
