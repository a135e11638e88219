"""What a script gives ``shoal.Run`` beside its own objects, checked where it is given: a wrong type is one message."""

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from shoal.core.config import Config, validate
from shoal.core.errors import RequestError

ConfigType = TypeVar("ConfigType", bound=Config)

_ELSEWHERE = {
    "backward": "run.forward_backward(batch) runs the forward pass too, and leaves the gradient in the optimizer's tensors",
    "prepare": "run.loader(dataset, global_batch=...) makes the loader, and run.setup(model, optimizer, loss=...) takes the rest",
    "clip_grad_norm_": "run.clip(max_norm) clips by the norm of the whole gradient",
    "clip_gradients": "run.clip(max_norm) clips by the norm of the whole gradient",
    "accumulate": "microbatches=4 in the plan, or run.loader(..., micro_batch=), adds gradients up",
    "no_sync": "microbatches=4 in the plan, or run.loader(..., micro_batch=), adds gradients up",
    "gather": "run.evaluate(dataset, metrics=[...]) counts each sample once, and shoal.all_gather is for losses",
    "gather_for_metrics": "run.evaluate(dataset, metrics=[...]) counts each sample once",
    "unwrap_model": "run.state_dict(whole=True) has the whole weights",
    "wait_for_everyone": "run.world.barrier() waits for all ranks",
    "barrier": "run.world.barrier() waits for all ranks",
    "is_main_process": "run.is_main is True on the rank that prints",
    "global_rank": "run.rank is this process's number",
    "num_processes": "run.world_size is how many there are",
    "save_state": "run.save() writes a checkpoint of all that was set up",
    "load_state": "run.load() goes on from the newest checkpoint",
    "setup_dataloaders": "run.loader(dataset, global_batch=...) makes the loader",
    "train": "iterate over run.loader(...) and call run.step(batch)",
    "fit": "iterate over run.loader(...) and call run.step(batch)",
}
"""Names of accelerate's ``Accelerator`` and Lightning's ``Fabric`` and ``Trainer``, and what does the same here."""


def explain_missing(name: str, known: Sequence[str]) -> str:
    """What to say of an attribute that a run does not have: what does the same, or the nearest name."""
    if name in _ELSEWHERE:
        return f"; {_ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, [one for one in known if not one.startswith("_")], n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


def as_section(config: type[ConfigType], given: object, name: str) -> ConfigType:
    """A section of settings: its ``Config``, a dict of its keys, or None for all that is left out.

    Args:
        config: the class of the section.
        given: by the script.
        name: of the argument.

    Raises:
        RequestError: it is something else, or a key or a value in it is wrong.
    """
    if isinstance(given, config):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(f"shoal.Run({name}=) is a dict of settings or a {config.__name__}, and was given {given!r}")
    return validate(config, dict(given or {}), origin=f"shoal.Run({name}=)")


def as_folder(given: object) -> Path | None:
    """The run directory that was asked for, if any.

    Raises:
        RequestError: it is no path.
    """
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise RequestError(f'run_dir={given!r} is no path of a folder; give one, such as run_dir="runs/mine"')
    return Path(given)


def as_loggers(given: Any) -> tuple[Any, ...]:
    """Names of loggers and objects, of which the latter are looked at when they are opened.

    Raises:
        RequestError: it is one logger and no list of them.
    """
    if isinstance(given, list | tuple):
        return tuple(given)
    shown = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
    raise RequestError(f"loggers= is a list, and was given {shown}; write loggers=[...] around it")


def check_processor(threads: object, deadline: object) -> None:
    """Refuse a number of compute threads and a deadline that are none.

    Raises:
        RequestError: names the argument.
    """
    if threads is not None and not _is_whole(threads, least=1):
        raise RequestError(f"threads={threads!r} is no number of compute threads; give 1 or more, or leave it out")
    if deadline is None:
        return
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline < math.inf:
        raise RequestError(f"deadline={deadline!r} is no number of seconds; give one above 0, such as 60.0")


def check_evaluation(data: Any, *, batch: object, limit: object) -> None:
    """Refuse what no evaluation can go through.

    Raises:
        RequestError: names the argument.
    """
    if isinstance(data, DataLoader):
        raise RequestError("run.evaluate takes a dataset or a loader of the run, not a DataLoader; give loader.dataset")
    if batch is not None and not _is_whole(batch, least=1):
        raise RequestError(f"run.evaluate(batch={batch!r}) is no number of samples; give 1 or more, or leave it out")
    if not _is_whole(limit, least=0):
        raise RequestError(f"run.evaluate(limit={limit!r}) is no number of samples; give 1 or more, or 0 for all")


def _is_whole(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
