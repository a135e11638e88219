"""Small cases for the one-process side of a proof."""

import pytest

from shoal.verify.reference.case import Case

GPT = {"name": "gpt", "layers": 1, "hidden": 16, "heads": 2, "dropout": 0.1}
TOKENS = {"source": "synthetic", "kind": "tokens", "samples": 64, "sequence": 8, "vocab": 16}
SEQ2SEQ = {"name": "seq2seq", "layers": 1, "hidden": 16, "heads": 2}
REVERSE = {"source": "synthetic", "kind": "reverse", "samples": 64, "sequence": 8, "vocab": 16}
"""Its samples have several lengths, so microbatches weigh differently."""


def case_of(**changes):
    values = {
        "model": GPT,
        "data": TOKENS,
        "optim": {"name": "adamw", "lr": 1e-2},
        "seed": 1,
        "global_batch": 8,
        "precision": "float32",
        "batch_norm": "local",
        "total_steps": 8,
        "steps": 2,
    }
    return Case(**{**values, **changes})


def run_here(run, case, tree, folder):
    """In this process, where other tests have imported ``parallel``: all but the last assertion."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{run.__module__}.assert_alone", lambda: None)
        return run(case, tree, folder)
