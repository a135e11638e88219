"""Two ranks save together while their loops go on."""

import torch

from shoal.checkpoint.reader import newest_whole, read
from support.checkpoint.saving_ranks import Ranks

WEIGHTS = [f"weights/{index}" for index in range(4)]


def test_the_loop_goes_on_while_the_save_cannot_end(tmp_path):
    """Rank 1 is held back, so rank 0's save cannot be over; yet it returns, and the state changes before a commit."""
    root = tmp_path / "checkpoints"
    with Ranks(tmp_path) as ranks:
        ranks.ask("fill", 1)
        assert ranks[0].ask("save", 10) == "returned"
        assert ranks[0].ask("fill", 2) == "filled"
        assert newest_whole(root).path is None and ranks[0].ask("events") == []
        assert ranks[1].ask("save", 10) == "returned"
        assert ranks[1].ask("fill", 3) == "filled"
        outcomes = ranks.ask("wait")
        assert [outcome["kind"] for outcome in outcomes] == ["checkpoint_saved"] * 2
        assert outcomes[0]["num_bytes"] == outcomes[1]["num_bytes"] and outcomes[0]["path"] == str(
            root / "step-00000010"
        )

        checkpoint = read(newest_whole(root).path)
        assert all(torch.equal(checkpoint.tensors[name], torch.ones(2000)) for name in WEIGHTS)
        assert set(checkpoint.tensors) == {*WEIGHTS, "rng/rank-000/torch", "rng/rank-001/torch"}
        assert [checkpoint.tensors[f"rng/rank-00{rank}/torch"].unique().tolist() for rank in range(2)] == [[0], [1]]
        # Each rank wrote half.
        files = [{piece.file for piece in checkpoint.manifest.tensors[name].pieces} for name in WEIGHTS]
        assert sorted(file for [file] in files) == ["rank-000.safetensors"] * 2 + ["rank-001.safetensors"] * 2
        sizes = [entry.size for entry in checkpoint.manifest.files.values()]
        assert sizes[0] == sizes[1]

        # Back to back, each waits for the one before; the newest three stay, and the oldest, as none is known to be good.
        for step in (20, 30, 40, 50):
            ranks.ask("fill", step)
            assert ranks.ask("save", step) == ["returned"] * 2
        assert ranks.ask("close") == ["closed"] * 2
        assert sorted(path.name for path in root.iterdir()) == [f"step-000000{step}" for step in (10, 30, 40, 50)]
        for step in (30, 40, 50):
            loaded = read(root / f"step-000000{step}")
            assert all(loaded.tensors[name].unique().tolist() == [float(step)] for name in WEIGHTS)
