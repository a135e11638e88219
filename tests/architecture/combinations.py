"""Writes the table of combinations into docs/guides/parallelism.md: which techniques go together, as the rules of a plan say it.

Run it after a rule has changed: ``python tests/architecture/combinations.py``. A test compares the page with the rules.
"""

from pathlib import Path
from typing import Any

from shoal.core.facts import ModelFacts, Width
from shoal.core.plan import Plan

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "parallelism.md"
TABLE_START = "<!-- combinations: written by `python tests/architecture/combinations.py`, do not edit -->"
TABLE_END = "<!-- end of combinations -->"


TECHNIQUES: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero=1": {"dp": 2, "zero": 1},
    "zero=2": {"dp": 2, "zero": 2},
    "zero=3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sp": True},
    "cp ring": {"cp": 2},
    "cp alltoall": {"cp": 2, "cp_kind": "alltoall"},
    "pp": {"pp": 2, "schedule": "1f1b"},
    "pp, pipedream": {"pp": 2, "schedule": "pipedream"},
    "compress": {"dp": 2, "compress": "int8"},
    "islands": {"islands": 2, "sync": "diloco:20"},
    "recompute=selective": {"recompute": "selective"},
    "recompute=full": {"recompute": "full"},
}
_MODELS = {
    "transformer": ModelFacts(
        name="the transformer",
        num_blocks=4,
        num_pairs=8,
        heads=((8, 4),),
        has_attention=True,
        sequence=64,
        has_sequence=True,
    ),
    "transformer with attention dropout": ModelFacts(
        name="the transformer",
        num_blocks=4,
        num_pairs=8,
        heads=((8, 4),),
        has_attention=True,
        sequence=64,
        has_sequence=True,
        attention_dropout=0.1,
    ),
    "mlp": ModelFacts(name="the mlp", num_blocks=2, num_pairs=1, widths=(Width(name="hidden", size=64),)),
    "cnn": ModelFacts(
        name="the cnn",
        num_pairs=1,
        widths=(Width(name="hidden", size=64),),
        has_batch_norm=True,
        keeps_statistics=True,
    ),
}


def combination_table() -> str:
    """The table of combinations as Markdown: techniques with each other on a transformer, then each on other models."""
    names = list(TECHNIQUES)
    lines = ["| with | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    refused: dict[str, int] = {}
    for row in names:
        cells = [_cell({**TECHNIQUES[row], **TECHNIQUES[column]}, row, column, refused) for column in names]
        lines.append(f"| **{row}** | " + " | ".join(cells) + " |")
    lines += ["", "| model | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for model, facts in _MODELS.items():
        cells = [_answer(Plan(**{"dp": 1, **TECHNIQUES[name]}), facts, refused) for name in names]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {reason}" for reason, number in refused.items()]
    return "\n".join([*lines, "", *notes])


def _cell(keys: dict[str, Any], row: str, column: str, refused: dict[str, int]) -> str:
    clashes = [
        key
        for key in TECHNIQUES[row].keys() & TECHNIQUES[column].keys()
        if TECHNIQUES[row][key] != TECHNIQUES[column][key] and key != "dp"
    ]
    # One key has one value: zero=1 and zero=2 are not two techniques but a choice. Stage 3 includes stage 1.
    is_choice = bool(clashes) or (row != column and row.startswith("cp") and column.startswith("cp"))
    if is_choice:
        return "one of them"
    return _answer(Plan(**{"dp": 1, **keys}), _MODELS["transformer"], refused)


def _answer(plan: Plan, facts: ModelFacts, refused: dict[str, int]) -> str:
    problems = plan.problems(facts)
    if not problems:
        return "yes"
    reasons = [problem.partition(";")[0] for problem in problems]
    return "no " + ", ".join(f"[{refused.setdefault(reason, len(refused) + 1)}]" for reason in reasons)


def with_table(text: str) -> str:
    """A page with the table between its two marks."""
    head, _, rest = text.partition(TABLE_START)
    return f"{head}{TABLE_START}\n\n{combination_table()}\n\n{TABLE_END}{rest.partition(TABLE_END)[2]}"


if __name__ == "__main__":
    GUIDE.write_text(with_table(GUIDE.read_text()))
