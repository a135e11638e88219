"""``shoal verify``: prove that plans compute what one process computes, and that the proof can fail."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.result import JsonFile, check_result_file, print_table, write_result
from shoal.core.errors import EXIT_NO, EXIT_SIGTERM, RequestError, RunError

if TYPE_CHECKING:
    from shoal.verify.certificate import Certificate

_Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a TOML file.")]
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
_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; KEY= unsets it.")
]
_Markdown = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="Write the certificate there as a page.")
]


def verify(
    recipe: _Recipe,
    plan: _Plans = None,
    all_plans: _All = False,
    mutants: _Mutants = False,
    nproc: _Processes = None,
    steps: _Steps = 3,
    dtype: _Dtype = None,
    overrides: _Set = None,
    json: JsonFile = None,
    markdown: _Markdown = None,
) -> None:
    """Compare plans with one process: every loss, gradient, norm, weight and optimizer state; exit 1 if any differs."""
    if sum((bool(plan), all_plans, mutants)) > 1:
        raise RequestError("give one of --plan, --all and --mutants: each is a proof of its own")
    if mutants and (nproc is not None or dtype is not None):
        given = "--nproc" if nproc is not None else "--dtype"
        raise RequestError(f"--mutants brings the plan and the type that each bug shows in; leave {given} out")
    check_result_file(json)
    check_result_file(markdown, "--markdown")
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.verify.session import verify_mutants, verify_plans

    # Unwinding ends the ranks and removes their files; the default action would leave the files behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_SIGTERM))
    if mutants:
        certificate = verify_mutants(recipe, steps=steps, overrides=overrides or (), tell=_tell)
    else:
        certificate = verify_plans(
            recipe,
            plans=plan or (),
            takes_all=all_plans,
            num_processes=nproc,
            steps=steps,
            precision=dtype,
            overrides=overrides or (),
            tell=_tell,
        )
    _show(certificate)
    write_result(json, certificate.as_values())
    if markdown is not None:
        try:
            markdown.write_text(certificate.as_markdown())
        except OSError as error:
            raise RunError(f"cannot write --markdown {markdown}: {error}") from error
    if not certificate.ok:
        raise typer.Exit(EXIT_NO)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(certificate: "Certificate") -> None:
    from shoal.verify.certificate import MUTANT_COLUMNS, PLAN_COLUMNS, mutant_row, plan_row

    if certificate.plans:
        print_table(PLAN_COLUMNS, [plan_row(plan) for plan in certificate.plans])
        for plan in certificate.plans:
            if plan.first_difference is not None:
                print(f"{plan.plan} ({plan.dtype}): {plan.first_difference}")
        num_ok = sum(plan.ok for plan in certificate.plans)
        num_bitwise = sum(plan.ok and plan.bitwise for plan in certificate.plans)
        print(f"{num_ok} of {len(certificate.plans)} equal one process, {num_bitwise} of them bit for bit")
    if certificate.mutants:
        print_table(MUTANT_COLUMNS, [mutant_row(mutant) for mutant in certificate.mutants])
        num_caught = sum(mutant.caught for mutant in certificate.mutants)
        num_controls = sum(mutant.control_ok for mutant in certificate.mutants)
        total = len(certificate.mutants)
        print(f"{num_caught} of {total} planted bugs caught, {num_controls} of {total} controls pass")
