"""What all ranks do together, called by one of them alone, ends within the deadline, and both sides are named."""

import pytest

SCRIPT = """
import sys, threading
import torch
from torch import nn
import shoal

torch.manual_seed(0)
data = [(torch.randn(8), index % 3) for index in range(64)]
with shoal.Run(seed=1, deadline=3.0) as run:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = run.loader(data, global_batch=16)
    model, optimizer = run.setup(model, optimizer, loss=nn.CrossEntropyLoss())
    for batch in loader:
        run.step(batch)
        if run.step_count == 2 and run.rank == 0:
            {"state": lambda: run.state_dict(whole=True), "save": run.save, "evaluate": lambda: run.evaluate(data)}[sys.argv[1]]()
        if run.step_count == 2 and run.rank == 1 and "stay" in sys.argv:
            threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("words", "phase"),
    [
        (("state", "goes-on"), "wait: run.state_dict(whole=True)"),
        (("save", "goes-on"), "wait: run.save()"),
        pytest.param(("save", "stay"), "wait: run.save()", marks=pytest.mark.soak),
        pytest.param(("evaluate", "goes-on"), "evaluate", marks=pytest.mark.soak),
        pytest.param(("state", "stay"), "wait: run.state_dict(whole=True)", marks=pytest.mark.soak),
    ],
)
def test_a_call_of_one_rank_alone_names_who_waits_in_what_and_who_is_elsewhere(shoal, tmp_path, words, phase):
    (tmp_path / "alone.py").write_text(SCRIPT)
    said = shoal.run("run", "alone.py", "--plan", "dp=2 zero=3", "--run-dir", "run", *words, expect=1).stderr
    if "stay" in words:
        assert "error: rank 1 " in said and "phase 'script'" in said, said
        assert f"rank 0 was at step 2 in phase '{phase}'" in said, said
        assert "did not arrive within the deadline of 3 s" in said and "in wait" in said, (
            "the stack of who is elsewhere"
        )
    else:  # each sees the other's operation at once, and either may be the first to say so
        assert "error: rank " in said and f"step 2 in phase '{phase}'" in said and "step 2 in phase 'script'" in said, (
            said
        )
        assert "does 'all_reduce' of" in said and "the model or the script that differs from rank to rank" in said
