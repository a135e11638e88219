"""``shoal verify``: prove that plans compute what one process computes, and that the proof can fail."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import (
    JsonFile,
    Overrides,
    RecipeFile,
    check_result_file,
    is_rewritable,
    log,
    print_table,
    unwind_on_sigterm,
    write_result,
    write_whole,
)
from shoal.core.errors import EXIT_NO, RequestError

if TYPE_CHECKING:
    from shoal.verify.certificate import Certificate

_Plans = Annotated[
    list[str] | None, typer.Option("--plan", metavar="TEXT", help="Prove this plan, such as 'dp=2 zero=1'; repeatable.")
]
_All = Annotated[bool, typer.Option("--all", help="Prove every plan that fits; up to 4 processes unless --nproc says.")]
_Mutants = Annotated[bool, typer.Option("--mutants", help="Plant bugs in the ranks and show that each is caught.")]
_Processes = Annotated[int | None, typer.Option("--nproc", metavar="N", min=1, help="Processes of each plan.")]
_Steps = Annotated[int, typer.Option("--steps", metavar="K", min=1, help="Steps to compare.")]
_Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="NAME", help="float64, float32, bfloat16 or float16 for all plans.")
]
_Strict = Annotated[
    bool, typer.Option("--strict", help="Exit 1 also where the numbers are equal and a predicted cost is off.")
]
_Elastic = Annotated[
    str | None,
    typer.Option(
        "--elastic", metavar="COUNTS", help="Let replicas die too, and come back, until so many are there: 4,3,1,4."
    ),
]
_Markdown = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="Write the certificate there as a page.")
]


def verify(
    recipe: RecipeFile,
    plan: _Plans = None,
    all_plans: _All = False,
    mutants: _Mutants = False,
    nproc: _Processes = None,
    steps: _Steps = 3,
    dtype: _Dtype = None,
    overrides: Overrides = None,
    json: JsonFile = None,
    markdown: _Markdown = None,
    strict: _Strict = False,
    elastic: _Elastic = None,
) -> None:
    """Compare plans with one process: every loss, gradient, norm, weight and optimizer state; exit 1 if any differs."""
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.launch.environments import refuse_launcher
    from shoal.verify.exclusive import check_clocks, check_exclusive

    refuse_launcher(os.environ, "shoal verify")
    check_exclusive(has_plans=bool(plan), all_plans=all_plans, mutants=mutants, nproc=nproc, dtype=dtype)
    check_clocks(plan or ())
    check_result_file(json)
    check_result_file(markdown, "--markdown")
    from shoal.verify.session import verify as prove

    unwind_on_sigterm()
    kept = _Kept(json, markdown)
    try:
        prove(
            recipe,
            plan or (),
            all_plans=all_plans,
            mutants=mutants,
            nproc=nproc,
            steps=steps,
            dtype=dtype,
            overrides=overrides or (),
            elastic=elastic,
            log=log,
            save=kept.save,
        )
    finally:
        # An interruption loses the proof under way, and none that was finished.
        kept.show()
    assert kept.certificate is not None, "a request that proves nothing is refused"
    _judge(kept.certificate, strict=strict)


class _Kept:
    """The newest certificate, in the files from the first proof on."""

    def __init__(self, json: Path | None, markdown: Path | None) -> None:
        self.certificate: Certificate | None = None
        self._json, self._markdown = json, markdown

    def save(self, certificate: "Certificate") -> None:
        """Write it beside and rename; what cannot be written twice, such as a pipe, gets the last one."""
        self.certificate = certificate
        if self._json is not None and (not certificate.pending or is_rewritable(self._json)):
            write_result(self._json, certificate.as_values())
        if self._markdown is not None and (not certificate.pending or is_rewritable(self._markdown)):
            write_whole(self._markdown, certificate.as_markdown(), "--markdown")

    def show(self) -> None:
        """Print the table."""
        if self.certificate is not None:
            _show(self.certificate)


def _judge(certificate: "Certificate", *, strict: bool) -> None:
    """The exit code: 1 where something differs, 2 where what was asked cannot be proved, 0 where it is."""
    if certificate.failures or (certificate.mutants and not certificate.ok):
        raise typer.Exit(EXIT_NO)
    if strict and certificate.unpredicted:
        log("--strict: the numbers are equal, and a prediction is off")
        raise typer.Exit(EXIT_NO)
    if strict and certificate.half_predicted:
        log(f"--strict: {len(certificate.half_predicted)} with a cost that was not predicted, and so not compared")
    if not certificate.ok:
        raise RequestError("\n".join(dict.fromkeys(plan.reason for plan in certificate.refused)))


def _show(certificate: "Certificate") -> None:
    from shoal.verify.certificate import MUTANT_COLUMNS, PLAN_COLUMNS, mutant_row, notes_of, plan_row

    if certificate.plans:
        print_table(PLAN_COLUMNS, [plan_row(plan) for plan in certificate.plans])
        warnings: dict[str, list[str]] = {}
        # Where all plans were refused the error says why.
        is_error = not certificate.pending and len(certificate.refused) == len(certificate.plans)
        for plan in () if is_error else certificate.plans:
            for warning in notes_of(plan):
                warnings.setdefault(warning, []).append(f"{plan.plan} ({plan.dtype})")
        for warning, plans in warnings.items():
            print(f"{', '.join(plans)}: {warning}")
        print(certificate.summary())
    if certificate.mutants:
        print_table(MUTANT_COLUMNS, [mutant_row(mutant) for mutant in certificate.mutants])
        num_caught = sum(mutant.caught for mutant in certificate.mutants)
        num_controls = sum(mutant.control_ok for mutant in certificate.mutants)
        total = len(certificate.mutants)
        print(f"{num_caught} of {total} planted bugs caught, {num_controls} of {total} controls pass")
