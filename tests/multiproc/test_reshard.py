"""Real ranks save the pieces that they hold; other numbers of ranks, in other layouts, load them: bit for bit."""

from pathlib import Path

import pytest
import torch

from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.reader import read, read_local
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.whole import verify
from shoal.comm.full_tensor import take_local
from shoal.core.placement import Patch, Placement, place_whole
from shoal.testing.ranks import run_on_ranks

ROWS, FUSED = (16, 6), (6, 24)
SHAPES = {"weights/rows": ROWS, "weights/fused": FUSED, "weights/norm": (6,), "optimizer/rows/step": ()}


def whole_state(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def rows(shape, parts, index):
    height = shape[0] // parts
    return place_whole(shape).rows(index * height, (index + 1) * height)


def fused_columns(parts, index):
    width = FUSED[1] // 3 // parts
    patches = tuple(
        Patch(local_start=(0, part * width), whole_start=(0, part * 8 + index * width), shape=(6, width))
        for part in range(3)
    )
    return Placement(whole_shape=FUSED, local_shape=(6, 3 * width), patches=patches)


def placements_of(rank, world_size, tp):
    """Tensor parallel within, ZeRO across: rows of what tensor parallelism left; the step is where the last rows are."""
    dp, inner, outer = world_size // tp, rank % tp, rank // tp
    found = {
        "weights/rows": rows(ROWS, tp, inner).rows(outer * ROWS[0] // tp // dp, (outer + 1) * ROWS[0] // tp // dp),
        "weights/fused": fused_columns(tp, inner).rows(outer * 6 // dp, (outer + 1) * 6 // dp),
        "weights/norm": place_whole((6,)),
    }
    return found | ({"optimizer/rows/step": place_whole(())} if outer == dp - 1 else {})


def local_state(step, placements):
    return {name: take_local(whole_state(step)[name], placement) for name, placement in placements.items()}


def save_pieces(world, root, tp):
    """Three saves; how many elements were copied for each, what came of it, and that a missing piece fails on every rank."""
    events = []
    saver = Saver(
        Path(root),
        rank=world.rank,
        world_size=world.size,
        group=world.save_group,
        config=CheckpointConfig(),
        plan=f"tp={tp}",
        deadline_s=30.0,
        report=lambda event: events.append(event.as_dict()),
    )
    placements = placements_of(world.rank, world.size, tp)
    copied = []
    for step in (1, 2):
        local = {f"rng/rank-{world.rank:03d}": torch.full((3,), world.rank)}
        saver.save(step, local_state(step, placements), {"step": step}, local, placements)
        copied.append(sum(tensor.numel() for tensor in saver._copies._buffers.values()))
        saver.wait()
    # The last rank no longer holds its rows: on every rank the save fails, says so, and the next one is whole again.
    short = {name: at for name, at in placements.items() if world.rank < world.size - 1 or name != "weights/rows"}
    saver.save(3, local_state(3, short), {}, None, short)
    saver.wait()
    # One rank without placements: refused alike on all of them.
    saver.save(4, local_state(4, placements), {}, None, placements if world.rank else None)
    saver.wait()
    saver.save(5, local_state(5, placements), {}, None, placements)
    saver.close()
    return {"copied": copied, "events": events}


def load_pieces(world, path, step, tp):
    placements = placements_of(world.rank, world.size, tp)
    wanted = local_state(step, placements)
    found = read_local(Path(path), placements)
    return {name: torch.equal(found[name], wanted[name]) for name in wanted}


@pytest.fixture(scope="module", params=[(2, 2), (4, 2)], ids=["2 ranks", "4 ranks"])
def saved(request, tmp_path_factory):
    num_ranks, tp = request.param
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    return root, run_on_ranks(save_pieces, num_ranks, str(root), tp, deadline_seconds=90.0)


def test_pieces_become_wholes_and_each_is_written_once(saved):
    root, results = saved
    for step in (1, 2, 5):
        path = root / f"step-{step:08d}"
        assert verify(path) == []
        tensors = read(path).tensors
        assert all(torch.equal(tensors[name], whole) for name, whole in whole_state(step).items())
    manifest = read(root / "step-00000002").manifest
    sizes = sum(entry.num_bytes for entry in manifest.tensors.values())
    headers = sum(len(layout.header) for layout in manifest.layouts().values())
    assert manifest.num_bytes == sizes + headers
    assert len(manifest.tensors["weights/fused"].pieces) == 3 * len(results)


def test_the_first_save_copies_what_a_rank_holds_and_the_next_what_it_writes(saved):
    _, results = saved
    total = sum(whole.numel() for whole in whole_state(1).values()) + 3 * len(results)
    assert sum(result["copied"][1] for result in results) == total
    assert sum(result["copied"][0] for result in results) > total


def test_a_save_that_is_not_whole_fails_alike_on_every_rank(saved):
    root, results = saved
    for result in results:
        kinds = [(event["kind"], event["step"]) for event in result["events"]]
        assert kinds == [
            ("checkpoint_saved", 1),
            ("checkpoint_saved", 2),
            ("checkpoint_failed", 3),
            ("checkpoint_failed", 4),
            ("checkpoint_saved", 5),
        ]
        assert "the pieces of 'weights/rows' leave gaps" in result["events"][2]["reason"]
        assert "rank 1 saves with placements and rank 0 without" in result["events"][3]["reason"]
    assert sorted(path.name for path in root.iterdir()) == [f"step-{step:08d}" for step in (1, 2, 5)]


def test_another_layout_loads_the_same_bits(saved):
    root, results = saved
    num_ranks, tp = (4, 4) if len(results) == 2 else (2, 1)
    loaded = run_on_ranks(load_pieces, num_ranks, str(root / "step-00000005"), 5, tp)
    assert all(all(found.values()) for found in loaded) and sum(map(len, loaded)) >= 3 * num_ranks
