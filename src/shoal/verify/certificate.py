"""The certificate: what was proved, of what, with which versions, as JSON for programs and as a page for a pull request."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from shoal.verify.compare.judge import Difference
from shoal.verify.reference.recording import KINDS
from shoal.verify.result import PlanResult


@dataclass(frozen=True, kw_only=True)
class MutantResult:
    """One planted bug."""

    name: str
    """Of the bug, as the catalogue has it."""
    plan: str
    """Under which it was planted."""
    dtype: str
    """The arithmetic."""
    caught: bool
    """Caught, and by the comparison that should catch it."""
    by: str | None
    """The comparison that saw it first; None when none did."""
    expected: str
    """The comparison that should see it."""
    control_ok: bool
    """The same plan and recipe without the bug passes."""
    detail: str = ""
    """What was seen."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Everything that a proof found."""

    plans: tuple[PlanResult, ...] = ()
    """What was found of each plan, in each arithmetic."""
    mutants: tuple[MutantResult, ...] = ()
    """What was found of each planted bug."""
    recipe: str = ""
    """The path of the recipe."""
    recipe_hash: str = ""
    """SHA-256 of what it resolves to."""
    settings: tuple[str, ...] = ()
    """What ``--set`` changed in the recipe; its hash is of the recipe as changed."""
    pending: tuple[str, ...] = ()
    """What is still to be proved: a certificate is kept after every plan, so that an interruption loses none."""
    takes_all: bool = False
    """Plans were not asked for by name, so that one which this recipe cannot run is no failure."""
    steps: int = 0
    """That were compared."""
    model_hash: str = ""
    """SHA-256 of the initial weights."""
    seed: int = 0
    """Of weights, data and dropout."""
    threads: int = 1
    """Of each process, the reference among them."""
    wall_s: float = 0.0
    """Seconds that everything took."""
    warnings: tuple[str, ...] = ()
    """What to know of these proofs."""

    @property
    def ok(self) -> bool:
        """Everything that was asked is proved: every plan that was named, or every one that fits; every mutant was caught by
        the right comparison, and its control passed."""
        if self.pending or any(not (one.caught and one.control_ok) for one in self.mutants):
            return False
        if not self.takes_all:
            return all(plan.ok for plan in self.plans)
        return not self.failures and any(plan.ok for plan in self.plans)

    @property
    def failures(self) -> list[PlanResult]:
        """Plans that differ, or that did not run to their end."""
        return [plan for plan in self.plans if plan.status in ("differs", "crashed")]

    @property
    def refused(self) -> list[PlanResult]:
        """Plans that this recipe cannot run."""
        return [plan for plan in self.plans if plan.status == "refused"]

    @property
    def unpredicted(self) -> list[PlanResult]:
        """Plans whose cost was predicted and is another."""
        return [plan for plan in self.plans if plan.prediction.ok is False]

    @property
    def half_predicted(self) -> list[PlanResult]:
        """Plans whose cost was predicted in part."""
        return [plan for plan in self.plans if plan.prediction.ok is None and plan.prediction.missing]

    def summary(self) -> str:
        """The plans in one line."""
        num_ok = sum(plan.ok for plan in self.plans)
        num_bitwise = sum(plan.ok and plan.bitwise for plan in self.plans)
        asked = len(self.plans) - len(self.refused)
        words = [f"{num_ok} of {asked} equal one process, {num_bitwise} of them bit for bit"]
        words += [f"{len(self.unpredicted)} with a prediction that is off"] if self.unpredicted else []
        words += [f"{len(self.refused)} refused"] if self.refused else []
        words += [f"{len(self.pending)} not tried yet"] if self.pending else []
        return "; ".join(words)

    def as_values(self) -> dict[str, Any]:
        """JSON: what was proved, and what makes the result repeatable."""
        return {
            "ok": self.ok,
            "predictions_ok": not self.unpredicted,
            "plans": [_plan_values(plan) for plan in self.plans],
            "mutants": [asdict(mutant) for mutant in self.mutants],
            "pending": list(self.pending),
            "recipe": self.recipe,
            "recipe_sha256": self.recipe_hash,
            "settings": list(self.settings),
            "steps": self.steps,
            "model_sha256": self.model_hash,
            "seeds": {"train": self.seed},
            "threads": self.threads,
            "versions": find_versions(),
            "wall_s": self.wall_s,
            "remarks": list(self.warnings),
        }

    def as_markdown(self) -> str:
        """A page to put into a pull request."""
        word = "not finished" if self.pending else "proved" if self.ok else "NOT proved"
        lines = [f"# Shoal certificate: {word}", ""]
        changed = "".join(f" with `{setting}`" for setting in self.settings)
        lines += [
            f"- recipe `{self.recipe}`{changed} (sha256 `{self.recipe_hash[:16]}`), seed {self.seed}, {self.steps} steps"
        ]
        lines += [f"- initial weights sha256 `{self.model_hash[:16]}`, {self.threads} compute thread(s) per process"]
        lines += ["- " + ", ".join(f"{name} {text}" for name, text in find_versions().items())]
        if self.plans:
            lines += ["", f"## Plans: {self.summary()}", ""]
            lines += _markdown_table(PLAN_COLUMNS, [plan_row(plan) for plan in self.plans])
            lines += [
                "",
                *[f"- `{plan.plan}` in {plan.dtype}: {text}" for plan in self.plans for text in notes_of(plan)],
            ]
        if self.mutants:
            num_caught = sum(mutant.caught for mutant in self.mutants)
            lines += ["", f"## {num_caught} of {len(self.mutants)} planted bugs caught", ""]
            lines += _markdown_table(MUTANT_COLUMNS, [mutant_row(mutant) for mutant in self.mutants])
        return "\n".join(lines).rstrip() + "\n"


PLAN_COLUMNS = (
    "plan",
    "dtype",
    "result",
    "prediction",
    *KINDS,
    "calls",
    "bytes sent",
    "state bytes",
    "activations",
    "seconds",
)
MUTANT_COLUMNS = ("planted bug", "plan", "caught", "by", "should be", "control", "what was seen")


def plan_row(plan: PlanResult) -> list[str]:
    """One line of the table."""
    errors = [f"{plan.worst[kind]:.1e}" if plan.worst.get(kind) else "0" for kind in KINDS] if plan.worst else ["-"] * 6
    calls, num_bytes = _totals(plan.traffic.get("counted", {}))
    return [
        plan.plan,
        plan.dtype,
        _result_word(plan),
        plan.prediction.describe(),
        *errors,
        str(calls) if plan.traffic else "-",
        str(num_bytes) if plan.traffic else "-",
        _size_pair(plan.sizes, ("weights", "gradients", "optimizer")),
        _size_pair(plan.sizes, ("activations",)),
        f"{plan.wall_s:.1f}",
    ]


def _result_word(plan: PlanResult) -> str:
    if not plan.ok:
        return {"differs": "DIFFERS", "crashed": "CRASHED"}.get(plan.status, plan.status)
    if plan.decided_by is not None:
        return f"by {plan.decided_by}"
    return "bitwise" if plan.bitwise else f"within {plan.tolerance:.1g}"


def notes_of(plan: PlanResult) -> list[str]:
    """What a reader of the table should know beside: why a plan is not proven, or by what, and what of its cost is off."""
    found = [plan.reason] if not plan.ok or plan.decided_by is not None else []
    found += [f"prediction off: {one}" for one in plan.prediction.off]
    # The first line of an error says enough; the rest is in the file.
    return found + [
        f"not predicted: bytes of {what}: {(why.splitlines() or [''])[0]}"
        for what, why in plan.prediction.missing.items()
    ]


def mutant_row(mutant: MutantResult) -> list[str]:
    """One line of the table."""
    return [
        mutant.name,
        f"{mutant.plan} {mutant.dtype}",
        "yes" if mutant.caught else "NO",
        mutant.by or "nothing",
        mutant.expected,
        "passes" if mutant.control_ok else "FAILS",
        mutant.detail,
    ]


def find_versions() -> dict[str, str]:
    """What computed this."""
    return {
        "shoal": version("shoal"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _plan_values(plan: PlanResult) -> dict[str, Any]:
    values = asdict(plan)
    values |= {"ok": plan.ok, "noise": dict(plan.noise), "prediction": plan.prediction.as_values()}
    # A plan that did not run has the contract's keys too.
    values["worst"] = {kind: plan.worst.get(kind) for kind in KINDS}
    values["first_difference"] = None if plan.first_difference is None else _difference_values(plan.first_difference)
    return values


def _difference_values(difference: Difference) -> dict[str, Any]:
    return {**asdict(difference), "text": str(difference)}


def _totals(traffic: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    return sum(entry[0] for entry in traffic.values()), sum(entry[1] for entry in traffic.values())


def _size_pair(sizes: Mapping[str, Any], names: Sequence[str]) -> str:
    """Measured and predicted, or only one of them where they are equal."""
    if not sizes or not any(name in sizes["measured"] for name in names):
        return "-"
    measured = sum(sizes["measured"][name] for name in names if name in sizes["measured"])
    if not any(name in sizes["predicted"] for name in names):
        return f"{measured} (not predicted)"
    predicted = sum(sizes["predicted"][name] for name in names if name in sizes["predicted"])
    return str(measured) if measured == predicted else f"{measured} ({predicted} predicted)"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in row)} |" for row in rows]
