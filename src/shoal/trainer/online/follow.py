"""``shoal train --follow``: what it changes in a recipe, and which recipes cannot go on for ever."""

from collections.abc import Mapping
from typing import Any

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.data.config import AnyDataConfig, StoreConfig
from shoal.data.store.folder import open_folder
from shoal.data.store.splits import read_split
from shoal.trainer.online.config import DEFAULT_MINUTES, NEVER

_BY_LENGTH = ("cosine", "linear")


def follow_overrides(tables: Mapping[str, Any]) -> list[str]:
    """The overrides that make a recipe, with what the command line changed in it, one that never ends and follows its data.

    Raises:
        RequestError: its data does not grow, or its learning rate goes by the length of the run.
    """
    data, train, optim = (_section(tables, name) for name in ("data", "train", "optim"))
    if data.get("source") != "store":
        raise RequestError(
            f"--follow takes in data as it is appended to a store, and data.source is {data.get('source', 'your own')!r}; make "
            'one with `shoal data follow SRC STORE` or `shoal data build SRC STORE`, and set data.source = "store" and data.path'
        )
    if (schedule := optim.get("schedule")) in _BY_LENGTH:
        raise RequestError(
            f"optim.schedule {schedule} goes by the length of the run, and with --follow it has none; set constant, inverse_sqrt "
            "or plateau"
        )
    changes = [f"train.{name}=" for name in ("epochs", "tokens") if train.get(name) is not None]
    changes += [f"train.steps={NEVER}", "data.follow=true"]
    publish = _section(tables, "publish")
    if publish.get("every_steps") is None and publish.get("every_minutes") is None:
        changes.append(f"publish.every_minutes={DEFAULT_MINUTES:g}")
    return changes


def check_follow(data: AnyDataConfig, plan: Plan) -> None:
    """Refuse data that is to grow where nobody takes up its versions.

    Raises:
        RequestError: the plan is that of L-BFGS.
    """
    if plan.ps and plan.update == "lbfgs" and isinstance(data, StoreConfig) and data.follow:
        raise RequestError(
            f"plan {str(plan)!r}: L-BFGS goes down one loss over the same samples, so no newer version of a store is taken up, "
            "and data.follow (--follow) asks for that; leave it out, or take another update rule, such as update=async"
        )


def follow_warnings(data: AnyDataConfig) -> tuple[str, ...]:
    """That a split by time does not hold for rows which come later than those that are held out.

    Raises:
        RequestError: there is no such store or split.
    """
    if not isinstance(data, StoreConfig) or not data.follow or data.split is None:
        return ()
    split = read_split(open_folder(data.path, data.storage), data.split)
    if split.about.get("by") != "time":
        return ()
    return (
        f"data.split {data.split!r} was cut by time, and with data.follow rows that are appended later than those it holds out "
        "are trained on: losses on them are no longer of a future that the model has not seen; make a newer split for those",
    )


def _section(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tables.get(name, {})
    return found if isinstance(found, Mapping) else {}
