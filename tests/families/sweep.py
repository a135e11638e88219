"""Every model of the catalogue under every plan, proved as ``shoal verify`` proves it, and the tables in the documents.

    python -m families.sweep                       # in tests/: all of it, some minutes; writes results.json and the guide
    python -m families.sweep --only BERT --only DLRM --plan tp=2 --print

What is measured is kept in ``results.json``; the tables in ``docs/guides/models.md``, with every model, and
``docs/families.md``, with one of each kind, are made of it. The GAN needs a loop of its own: ``gan.py`` proves it.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
RESULTS = TESTS / "families" / "results.json"
GUIDE = TESTS.parent / "docs" / "guides" / "models.md"
PAGE = TESTS.parent / "docs" / "families.md"
BEGIN, END = "<!-- begin: written by tests/families/sweep.py -->", "<!-- end -->"
FIELDS = ("status", "reason", "dtype", "bitwise", "worst", "predicted")


def prove(cells: Sequence[tuple], steps: int = 3) -> Iterator[tuple[str, str, list[dict]]]:
    """Name, plan and rows of each (family, plan): a row for each arithmetic that it was proved in, or one that says why not.

    The same ranks serve them all: to start them takes longer than a proof.
    """
    # Not at the top: the test that reads the table needs no torch.
    from shoal.core.errors import RequestError
    from shoal.engine.resolve import choose_plan
    from shoal.trainer.config import load_recipe
    from shoal.verify.proof import Prover
    from shoal.verify.request import build_subject, check_plan, choose_precisions
    from shoal.verify.result import settle

    with Prover(steps=steps) as prover, tempfile.TemporaryDirectory() as folder:
        for family, group in itertools.groupby(cells, key=lambda one: one[0]):
            path = Path(folder) / "recipe.toml"
            path.write_text(family.recipe)
            recipe = load_recipe(path, [])
            subject = build_subject(recipe)
            for _, text in group:
                plan = choose_plan(recipe.plan, plan_text=text, num_processes=None)
                try:
                    check_plan(subject, plan)
                    names = choose_precisions(
                        plan,
                        None,
                        recipe.optim,
                        trained=recipe.train.precision,
                        joins_replicas=subject.joins_replicas(plan),
                    )
                except RequestError as error:
                    yield family.name, text, [{"status": "refused", "reason": str(error).splitlines()[0]}]
                    continue
                found = settle([prover.prove(subject, plan, name) for name in names])
                yield family.name, text, [_row(result) for result in found]


def _row(result) -> dict:
    """What is kept of one proof."""
    row = {"status": result.status, "reason": result.reason.splitlines()[0], "dtype": result.dtype}
    if result.status == "proven":
        row |= {"bitwise": result.bitwise, "worst": max(result.worst.values(), default=0.0)}
        row |= {"predicted": result.prediction.ok is not False}
    return row


def cell(rows: Sequence[dict]) -> str:
    """A cell of the table: the worst error of what was proved, or why it was refused."""
    failed = [row for row in rows if row["status"] in ("differs", "crashed")]
    refused = [row for row in rows if row["status"] == "refused"]
    if failed:
        return f"**{failed[0]['status']}**: {_short(failed[0]['reason'])}"
    if refused and len(refused) == len(rows):
        return f"refused: {_short(refused[0]['reason'])}"
    proven = [row for row in rows if row["status"] == "proven"]
    if all(row["bitwise"] for row in proven):
        return "proven, bitwise"
    errors = ", ".join(f"{row['worst']:.0e} in {row['dtype']}" for row in proven)
    return f"proven, {errors}" + (f"; {refused[0]['dtype']} refused" if refused else "")


def _short(reason: str) -> str:
    """A refusal's first clause, without the plan that the column says already; what to do about it is in the message itself."""
    if reason.startswith("plan '"):
        reason = reason.partition("': ")[2]
    clause = reason.partition(";")[0].partition(" (Hugging Face")[0].replace("|", "/")
    return textwrap.shorten(clause, 100, placeholder=" ...")


def table(results: dict[str, dict[str, list[dict]]]) -> str:
    """The table in Markdown."""
    plans = list(next(iter(results.values())))
    lines = [f"| model | {' | '.join(f'`{plan}`' for plan in plans)} |", f"|{'---|' * (len(plans) + 1)}"]
    lines += [f"| {name} | {' | '.join(cell(cells[plan]) for plan in plans)} |" for name, cells in results.items()]
    return "\n".join(lines)


def short_table(results: dict[str, dict[str, list[dict]]]) -> str:
    """One model of each kind, by what people call it."""
    from families.catalogue import ASKED, PLANS

    lines = [f"| model | {' | '.join(f'`{plan}`' for plan in PLANS)} |", f"|{'---|' * (len(PLANS) + 1)}"]
    for called, name in ASKED:
        lines.append(f"| {called} | {' | '.join(cell(results[name][plan]) for plan in PLANS)} |")
    return "\n".join(lines)


def between_markers(text: str, made: str) -> str:
    """A document with what stands between its markers replaced."""
    before, _, rest = text.partition(BEGIN)
    _, marker, after = rest.partition(END)
    assert marker, f"there are no markers {BEGIN} and {END}"
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main() -> None:
    """Run the sweep."""
    from families import gan
    from families.catalogue import EVERY, GAN, PLANS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these models; the others stay")
    parser.add_argument("--plan", action="append", default=[], metavar="PLAN", help="these plans; the others stay")
    parser.add_argument("--print", action="store_true", dest="prints", help="print the cells, write nothing")
    parser.add_argument(
        "--table", action="store_true", help="prove nothing: write the table from the results that are there"
    )
    asked = parser.parse_args()
    os.chdir(TESTS)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    chosen = [family for family in EVERY if not asked.only or family.name in asked.only]
    cells = [] if asked.table else [(family, plan) for family in chosen for plan in asked.plan or PLANS]
    for name, plan, rows in prove(cells) if cells else ():
        print(f"{time.strftime('%H:%M:%S')} {name:20} {plan:12} {cell(rows)}", file=sys.stderr, flush=True)
        kept.setdefault(name, {})[plan] = rows
    if not asked.table and GAN in (asked.only or [GAN]):
        kept[GAN] = gan.prove()
        print(*(f"{GAN:20} {plan:12} {cell(rows)}" for plan, rows in kept[GAN].items()), sep="\n", file=sys.stderr)
    if asked.prints:
        return
    ordered = {
        name: {plan: kept[name][plan] for plan in PLANS if plan in kept[name]}
        for name in (*(family.name for family in EVERY), GAN)
        if name in kept
    }
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    GUIDE.write_text(between_markers(GUIDE.read_text(), table(ordered)))
    PAGE.write_text(between_markers(PAGE.read_text(), short_table(ordered)))


if __name__ == "__main__":
    main()
