"""Questions to a run that has ended: how good is it on a split, and what does it write."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.comm.mesh import pretend_mesh
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.engine.evaluate import evaluate
from shoal.models.generate import generate
from shoal.trainer.build import load_run

_BYTES = 256


def evaluate_run(
    run_dir: Path, *, split: str, limit: int | None = None, on_progress: Callable[[int, int], None] = lambda *_: None
) -> dict[str, Any]:
    """Loss and accuracy of a run's newest whole checkpoint on a split, in this process.

    Args:
        run_dir: the run directory.
        split: the name of the split.
        limit: samples to use, the split's first ones; 0 uses all of them, None as many as the recipe's ``eval.samples``.
        on_progress: is called before each forward pass with how many samples are done, and of how many.

    Raises:
        RequestError: not a run directory, or the data has no such split.
    """
    run = load_run(run_dir)
    source = getattr(run.data, split)
    if source is None or len(source) == 0:
        raise RequestError(f"the data of {run_dir} has no {split} split; set data.{split} in the recipe")
    mesh = pretend_mesh(Plan(dp=1))
    batch = run.recipe.eval.batch or min(run.recipe.train.global_batch, 64)
    limit = run.recipe.eval.samples if limit is None else limit
    count = min(len(source), limit or len(source))
    starts = iter(range(0, count, batch))
    found = evaluate(
        run.objective,
        source,
        split=split,
        mesh=mesh,
        batch=batch,
        limit=limit,
        before_batch=lambda: on_progress(next(starts), count),
    )
    return {
        "split": split,
        "loss": found.loss,
        "accuracy": found.accuracy,
        "samples": found.samples,
        "split_samples": len(source),
        "baseline_loss": run.data.spec.baseline_loss,
        "step": run.step,
        "checkpoint": str(run.checkpoint),
    }


def sample_run(
    run_dir: Path, *, prompt: str, num_tokens: int, temperature: float, top_k: int, seed: int
) -> dict[str, Any]:
    """Text that a run's newest whole checkpoint writes after a prompt.

    Raises:
        RequestError: the run is not of a language model over bytes, or the prompt is empty.
    """
    run = load_run(run_dir)
    if run.data.spec.kind != "tokens" or run.data.spec.vocab != _BYTES:
        raise RequestError(f"{run_dir} is not a run on text bytes; only such a model can continue a prompt")
    if not prompt:
        raise RequestError("the prompt is empty; give at least one character, such as --prompt 'def '")
    generator = torch.Generator().manual_seed(seed)
    written = generate(
        run.model,
        list(prompt.encode()),
        num_tokens,
        temperature=temperature,
        top_k=top_k or None,
        generator=generator,
    )
    text = prompt + bytes(written).decode(errors="replace")
    return {"prompt": prompt, "text": text, "tokens": num_tokens, "step": run.step, "checkpoint": str(run.checkpoint)}
