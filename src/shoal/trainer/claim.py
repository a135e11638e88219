"""Taking possession of a run directory: which one, whether it may be used, and that nobody else uses it at the same time."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.config import read_toml, validate
from shoal.core.errors import RequestError, offer
from shoal.core.plan import Plan
from shoal.core.rundir import Readers, RunDir, make_run_dir, replace_text
from shoal.data.config import StoreConfig
from shoal.data.fitted import keep_fitted
from shoal.data.sources.storefile import pin_version
from shoal.engine.resolve import RunSetup
from shoal.launch.runlock import read_holder, release_lock, take_lock
from shoal.trainer.config import Recipe, dump_recipe

# What may change when a run is taken up again: how long it lasts, how it is laid out, what it records. The rest decides the
# weights.
_MAY_CHANGE = (
    "plan",
    "parallel",
    "pipeline",
    "paramserver",
    "train.steps",
    "train.epochs",
    "train.tokens",
    "train.time_limit",
    "train.threads",
    "train.micro_batch",
    "train.nonfinite",
    "train.spike",
    "train.rollback_after",
    "train.rollback_rate",
    "train.watch_every",
    "run",
    "eval",
    "checkpoint",
    "publish",
    "telemetry",
    "log",
    "callbacks",
    "train.early_stop",
    "elastic",
    "data.follow",
    "data.load",
    "data.prefetch",
    "data.workers",
    "data.fitted",
    "data.fitted_digest",
)


def choose_run_dir(stem: str, *, given: Path | None, resume: bool, parent: Path = Path("runs")) -> Path:
    """The run directory: the one given, else ``runs/<stem>``, numbered when that is taken; ``resume`` takes the newest."""
    if given is not None:
        return given
    newest, number = parent / stem, 1
    pattern = re.compile(re.escape(stem) + r"-(\d+)")
    for entry in parent.glob(f"{stem}-*") if parent.is_dir() else ():
        match = pattern.fullmatch(entry.name)
        if match and int(match.group(1)) > number:
            newest, number = entry, int(match.group(1))
    if resume or RunDir(newest).is_empty:
        return newest
    return parent / f"{stem}-{number + 1}"


def check_claim(run_dir: Path, recipe: Recipe, *, resume: bool) -> None:
    """Refuse a directory that holds something else.

    Raises:
        RequestError: it is a file, holds a run and ``--resume`` was not given, or holds another recipe.
    """
    run = RunDir(run_dir)
    for path in (run_dir, *run_dir.parents):
        if path.is_symlink() and not path.exists():
            raise RequestError(f"{path} is a link to {os.readlink(path)}, which does not exist; use another --run-dir")
        if path.exists():
            if not path.is_dir():
                raise RequestError(
                    f"{path} is a file, not a {'run directory' if path == run_dir else 'folder'}; use another --run-dir"
                )
            break
    check_inside(run)
    if run.is_empty:
        return
    differences = list_differences(run, recipe)
    if differences:
        shown = "; ".join(differences[:5]) + ("; ..." if len(differences) > 5 else "")
        is_of_data = all(difference.startswith("data.") for difference in differences)
        accept = ", or checkpoint.other_data=true to go on with other data" if is_of_data else ""
        raise RequestError(
            f"{run_dir} holds a run of another recipe: {shown}. Use another --run-dir, or the same recipe (a lower optim.lr and "
            f"a lower optim.clip may be gone on with){accept}"
        )
    if not resume:
        raise RequestError(
            f"{run_dir} already holds a run of this recipe; add --resume to go on, or use another --run-dir"
        )


def require_run_dir(run_dir: Path) -> None:
    """Refuse to go on in a directory that does not exist: most likely its name is misspelt.

    Raises:
        RequestError: names the directories beside it that are nearest.
    """
    if run_dir.exists():
        return
    beside = [str(path) for path in run_dir.parent.glob("*") if path.is_dir()] if run_dir.parent.is_dir() else []
    raise RequestError(
        f"--resume: {run_dir} does not exist; {offer(str(run_dir), beside)}to start a run there, leave out --resume, or give "
        "--resume=auto, which goes on where there is a run and starts one where there is none"
    )


def check_inside(run: RunDir) -> None:
    """Refuse what is not a plain file or folder where a run has one: written through a link, a run would end up elsewhere.

    Raises:
        RequestError: names it.
    """
    folders = (
        run.checkpoints,
        run.supervisor_events.parent,
        run.log(0).parent,
        run.errors,
        run.traces,
        run.tensorboard,
    )
    files = (run.recipe, run.plan, run.summary, run.forecast)
    for path in (*folders, *files):
        if path.is_symlink():
            raise RequestError(
                f"{path} is a link, to {os.readlink(path)}; Shoal follows no link inside a run directory: move what it leads to "
                "into its place, or use another --run-dir"
            )
        is_right = path.is_dir() if path in folders else path.is_file()
        if path.exists() and not is_right:
            kind = "folder" if path in folders else "file"
            raise RequestError(f"{path} is not a {kind}; remove it, or use another --run-dir")


def pin_data(recipe: Recipe, run: RunDir | None) -> Recipe:
    """The recipe with the version that its store has for this run, as the run's own recipe will name it.

    A run reads the version that was the newest when it began, for as long as it goes on.

    Args:
        recipe: as it was asked for.
        run: the run that goes on; None for one that begins.

    Raises:
        RequestError: there is no store.
    """
    if not isinstance(recipe.data, StoreConfig) or recipe.data.version is not None:
        return recipe
    before = None if run is None or not run.recipe.exists() else _read_recipe(run).data
    data = recipe.data
    if isinstance(before, StoreConfig) and before.path == data.path and not recipe.checkpoint.other_data:
        data = data.model_copy(update={"version": before.version})
    return recipe.model_copy(update={"data": pin_version(data)})


def list_differences(run: RunDir, recipe: Recipe) -> list[str]:
    """Settings that decide the weights and are not those of the run in the directory, as ``key: there, here``."""
    if not run.recipe.exists():
        return []
    before = _read_recipe(run)
    theirs, ours = flatten(before.model_dump(mode="json")), flatten(recipe.model_dump(mode="json"))
    found = []
    for key in sorted(theirs.keys() | ours.keys()):
        may_change = any(key == name or key.startswith(f"{name}.") for name in _MAY_CHANGE)
        if key.startswith("eval.") and recipe.optim.schedule == "plateau":
            may_change = False  # evaluations decide the rate there
        may_change = may_change or (key.startswith("data.") and recipe.checkpoint.other_data)
        if not may_change and theirs.get(key) != ours.get(key) and not _is_gentler(key, theirs.get(key), ours.get(key)):
            found.append(f"{key} is {_say(theirs.get(key))} there and {_say(ours.get(key))} here")
    return found


def _read_recipe(run: RunDir) -> Recipe:
    """The recipe of the run in a directory."""
    try:
        return validate(Recipe, read_toml(run.recipe), origin=str(run.recipe))
    except RequestError as error:
        raise RequestError(f"{error}; the run directory's own recipe cannot be read: use another --run-dir") from error


def ends_alike(run: RunDir, recipe: Recipe) -> bool:
    """True where a recipe stops early by the same rules as the run that was started there."""
    before = _read_recipe(run)
    return (before.train.early_stop, before.callbacks) == (recipe.train.early_stop, recipe.callbacks)


def list_gentler(run: RunDir, recipe: Recipe) -> list[str]:
    """Settings that decide the weights and may yet be changed, because a run that blew up needs it, as ``key: there, here``."""
    if not run.recipe.exists():
        return []
    before = _read_recipe(run)
    theirs, ours = flatten(before.model_dump(mode="json")), flatten(recipe.model_dump(mode="json"))
    return [
        f"{key} was {_say(theirs.get(key))} and is {_say(ours.get(key))} from here on"
        for key in ("optim.lr", "optim.clip")
        if theirs.get(key) != ours.get(key) and _is_gentler(key, theirs.get(key), ours.get(key))
    ]


def _say(value: Any) -> str:
    return "unset" if value is None else repr(value)


def _is_gentler(key: str, before: Any, now: Any) -> bool:
    """True for a lower rate, and for a clip that is lower or new: what a run that blew up is advised to go on with."""
    if key == "optim.lr":
        return bool(now < before)
    return key == "optim.clip" and now is not None and (before is None or now < before)


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables inside tables as one, by ``section.key``."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class Claim:
    """A run directory held by this process until ``release``; the operating system lets go when the process dies."""

    def __init__(self, run_dir: Path, *, readers: Readers = "owner") -> None:
        """Take the directory, which is made for these readers where there is none.

        Raises:
            RequestError: another process holds it, or it cannot be made.
        """
        self.run = RunDir(run_dir)
        try:
            make_run_dir(run_dir, readers)
            held = take_lock(self.run.lock)
        except OSError as error:
            reason = error.strerror or str(error)
            raise RequestError(
                f"{run_dir} cannot be made or written to as a run directory ({reason}); use another --run-dir"
            ) from error
        if held is None:
            holder = read_holder(self.run.lock)
            raise RequestError(f"{run_dir} is in use by process {holder}; wait for it, or use another --run-dir")
        self._fd = held
        self._before: dict[Path, bytes] = {}

    def write(self, recipe: Recipe, plan: Plan, setup: RunSetup | None = None) -> None:
        """Put down the resolved recipe, the plan and setup that run, and take away the summary of what ran here before."""
        written = (self.run.recipe, self.run.plan, self.run.summary)
        self._before = {path: path.read_bytes() for path in written if path.exists()}
        values = {"plan": str(plan), **plan.as_dict(), **(setup.as_dict() if setup is not None else {})}
        replace_text(
            self.run.recipe, dump_recipe(recipe.model_copy(update={"data": keep_fitted(recipe.data, self.run.root)}))
        )
        replace_text(self.run.plan, json.dumps(values, indent=2) + "\n")
        self.run.summary.unlink(missing_ok=True)

    def put_back(self) -> None:
        """Undo ``write``: nothing ran, and what the run before put down here is still what is known of it."""
        self.run.summary.unlink(missing_ok=True)
        for path, text in self._before.items():
            replace_text(path, text.decode(errors="surrogateescape"))

    def release(self) -> None:
        """Let go."""
        release_lock(self._fd, self.run.lock)


def read_plan(run_dir: Path) -> str:
    """The line of the plan that a run directory holds.

    Raises:
        RequestError: it holds none.
    """
    return str(_read_plan_file(run_dir, {"plan": str})["plan"])


def read_setup(run_dir: Path) -> RunSetup:
    """What was decided of the run in a directory before its processes started.

    Raises:
        RequestError: it does not say.
    """
    found = _read_plan_file(run_dir, {"plan": str, "micro_batch": int, "train_samples": int, "total_steps": int})
    return RunSetup(
        plan=Plan.parse(found["plan"]),
        micro_batch=found["micro_batch"],
        train_samples=found["train_samples"],
        total_steps=found["total_steps"],
    )


def _read_plan_file(run_dir: Path, wanted: Mapping[str, type]) -> dict[str, Any]:
    path = RunDir(run_dir).plan
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        if not isinstance(found, dict) or any(type(found.get(key)) is not kind for key, kind in wanted.items()):
            raise ValueError(f"it is not an object with {', '.join(wanted)}")
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            f"{path} does not hold a plan ({error}); remove it, and name the plan with --plan"
        ) from error
    return found
