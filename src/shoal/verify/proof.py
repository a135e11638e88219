"""Running proofs: which jobs, in which processes, against which reference; the result of each plan as one value.

References are shared by all plans with the same tree of sums, and ranks by all plans with the same number of processes: starting
processes takes longer than a proof.
"""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.core.errors import RequestError, ShoalError
from shoal.core.plan import Plan
from shoal.launch.pool import Pool
from shoal.models.losses import build_loss
from shoal.optim.config import PrecisionName
from shoal.trainer.config import Recipe, dump_recipe
from shoal.trainer.layout import derive_layout
from shoal.trainer.meancheck import find_other_mean
from shoal.verify.capture import Recording
from shoal.verify.case import Case, Log, Tree
from shoal.verify.gather import gather_step
from shoal.verify.judge import judge_run
from shoal.verify.mutants import Death
from shoal.verify.pattern import Layout
from shoal.verify.prediction import judge_prediction
from shoal.verify.question import Question, Subject
from shoal.verify.result import PlanResult, compared, crashed, refused
from shoal.verify.serverproof import prove_servers
from shoal.verify.stages import cut_model
from shoal.verify.tolerance import derive_tolerance, flat_bound

# A rank that imports torch on a busy machine; what a job takes comes on top of it.
_START_SECONDS = 180.0
_LONGEST_SECONDS = 3600.0


class Prover:
    """Proves plans one after another; a context manager, because it keeps processes and a folder."""

    def __init__(self, *, steps: int, threads: int = 1, deadline_seconds: float | None = None) -> None:
        self.steps = steps
        self.threads = threads
        self.deadline_seconds = deadline_seconds
        self._reference_pool = Pool("shoal.verify.reference", 1, threads=threads, called="reference")
        self._pool: Pool | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-verify-")
        self._references: dict[str, tuple[Path, float]] = {}
        self._num_jobs = 0

    def __enter__(self) -> "Prover":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reference_pool.end()
        if self._pool is not None:
            self._pool.end()
        self._folder.cleanup()

    def prove(
        self,
        subject: Subject,
        plan: Plan,
        precision: PrecisionName,
        *,
        mutant: str | None = None,
        deaths: Sequence[Death] = (),
    ) -> PlanResult:
        """Run one plan and compare it. Never raises for what is wrong with this plan: the next one has its own proof.

        Args:
            subject: the recipe and its model.
            plan: what is proved.
            precision: the arithmetic.
            mutant: name of a bug to plant.
            deaths: servers that are killed on the way, where the plan has any.
        """
        started, folder = time.monotonic(), self._new_folder()
        steps = min(self.steps, subject.total_steps)
        try:
            return self._prove(self._ask(subject, plan, precision, mutant, deaths), folder)
        except RequestError as error:
            # The model is run to find this out: it draws random numbers of its own, cannot be cut, or its loss is not finite.
            seconds = time.monotonic() - started
            return refused(str(plan), dtype=precision, steps=steps, reason=str(error), wall_s=seconds)
        # The user's model runs here too, to be cut.
        except Exception as error:
            seconds, is_ours = time.monotonic() - started, isinstance(error, ShoalError)
            return crashed(str(plan), dtype=precision, steps=steps, error=error, is_ours=is_ours, wall_s=seconds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _prove(self, question: Question, folder: Path) -> PlanResult:
        if question.plan.ps:
            return prove_servers(
                question,
                folder,
                reference=lambda case, tree: self._reference(case, tree)[0],
                replay=self._replay,
                threads=self.threads,
                deadline_seconds=self.deadline_seconds or _LONGEST_SECONDS,
            )
        reference_folder, reference_seconds = self._reference(question.case, question.tree)
        answers = self._run_ranks(question, folder, reference_seconds)
        return self._judge(question, reference_folder, folder, answers)

    def _ask(
        self, subject: Subject, plan: Plan, precision: PrecisionName, mutant: str | None, deaths: Sequence[Death]
    ) -> Question:
        # Between steps nothing else may run: the watch would be counted as the step's traffic.
        between = {"time_limit": None, "watch_every": 0}
        train = subject.recipe.train.model_copy(update={"precision": precision, **between})
        recipe = subject.recipe.model_copy(update={"train": train})
        derived = derive_layout(train, plan).plan
        recipe, tree = _tree_of(subject, recipe, derived)
        case = _case_of(recipe, subject, derived, min(self.steps, subject.total_steps))
        return Question(
            subject=subject, recipe=recipe, plan=derived, case=case, tree=tree, mutant=mutant, deaths=tuple(deaths)
        )

    def _replay(self, case: Case, log: Log) -> Path:
        folder = self._new_folder()
        job = {"case": case.as_values(), "log": log.as_values(), "folder": str(folder), "threads": self.threads}
        self._reference_pool.run(job, deadline_seconds=self.deadline_seconds or _LONGEST_SECONDS)
        return folder

    def _reference(self, case: Case, tree: Tree) -> tuple[Path, float]:
        # As JSON: a list and a tuple of the same names are one tree.
        values = {"case": case.as_values(), "tree": tree.as_values()}
        key = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        if key not in self._references:
            folder, started = self._new_folder(), time.monotonic()
            job = {**values, "folder": str(folder), "threads": self.threads}
            self._reference_pool.run(job, deadline_seconds=self.deadline_seconds or _LONGEST_SECONDS)
            self._references[key] = (folder, time.monotonic() - started)
        return self._references[key]

    def _run_ranks(self, question: Question, folder: Path, reference_seconds: float) -> list[dict[str, Any]]:
        plan = question.plan
        if self._pool is not None and self._pool.size != plan.world_size:
            self._pool.end()
            self._pool = None
        if self._pool is None:
            self._pool = Pool("shoal.verify.ranks", plan.world_size, threads=self.threads)
        # A plan does the reference's work in other pieces, on cores that ranks may have to share.
        deadline = self.deadline_seconds or _START_SECONDS + 10.0 * plan.world_size * reference_seconds
        job = {
            "recipe": question.recipe.model_dump(mode="json"),
            "plan": str(plan),
            "steps": question.case.steps,
            "mutant": question.mutant,
            "folder": str(folder),
            "threads": self.threads,
            "deadline_seconds": deadline,
        }
        # The ranks' own deadline is first, because it names the collective and the peer.
        return self._pool.run(job, deadline_seconds=deadline + 10.0)

    def _judge(
        self, question: Question, reference_folder: Path, folder: Path, answers: list[dict[str, Any]]
    ) -> PlanResult:
        subject, recipe, plan = question.subject, question.recipe, question.plan
        precision, first = recipe.train.precision, answers[0]
        reference = Recording.open(reference_folder, "reference")
        narrow = reference.facts.get("narrow", ())
        tolerance = derive_tolerance(
            plan,
            precision=precision,
            depth=max(1, subject.facts.num_blocks),
            adds_in_order=first["adds_in_order"],
            joins_replicas=subject.joins_replicas(plan),
            optim=recipe.optim,
            total_steps=subject.total_steps,
            steps=question.case.steps,
            narrow=narrow,
            zeros=reference.facts.get("zeros", ()),
        )
        where = Layout(
            degrees={**first["degrees"], "microbatches": first["microbatches"]},
            coordinates=[answer["coordinates"] for answer in answers],
        )
        ranks = [Recording.open(folder, f"rank-{rank:03d}") for rank in range(len(answers))]
        judged = judge_run(
            reference,
            lambda index: gather_step(ranks, index),
            tolerance=tolerance,
            layout=where,
            flat_bound=flat_bound(precision, tolerance, narrow),
            explain_flat=lambda: find_other_mean(
                subject.model,
                build_loss(recipe.model, subject.data.spec),
                subject.data.train,
                plan=plan,
                train=recipe.train,
            ),
        )
        return compared(
            question,
            judged,
            tolerance,
            prediction=judge_prediction(answers),
            flat=reference.facts["flat"],
            traffic={"expected": first["expected_traffic"][-1], "counted": first["traffic"][-1]},
            sizes=first["sizes"],
        )

    def _new_folder(self) -> Path:
        self._num_jobs += 1
        folder = Path(self._folder.name) / f"job-{self._num_jobs}"
        folder.mkdir()
        return folder


def _tree_of(subject: Subject, recipe: Recipe, plan: Plan) -> tuple[Recipe, Tree]:
    """The order of a plan's sums; and the recipe, which for a pipeline names the cut that they follow from."""
    replicas, microbatches = plan.num_shares, plan.microbatches or 1
    if plan.pp == 1:
        return recipe, Tree(replicas=replicas, microbatches=microbatches)
    cut = cut_model(
        subject.model, subject.data, subject.analysis, plan, recipe.pipeline, global_batch=recipe.train.global_batch
    )
    pipeline = recipe.pipeline.model_copy(update={"stages": cut.places})
    tree = cut.tree(replicas=replicas, microbatches=microbatches)
    return recipe.model_copy(update={"pipeline": pipeline}), tree


def _case_of(recipe: Recipe, subject: Subject, plan: Plan, steps: int) -> Case:
    values = recipe.model_dump(mode="json")
    return Case(
        model=values["model"],
        data=values["data"],
        optim=values["optim"],
        seed=recipe.train.seed,
        global_batch=recipe.train.global_batch,
        precision=recipe.train.precision,
        batch_norm=recipe.train.batch_norm,
        total_steps=subject.total_steps,
        steps=steps,
        # What one process has no gradient of either is refused there; what the ranks alone lack is their failure.
        needs_every_gradient=not plan.ps and (plan.dp or 1) * plan.cp > 1 and not recipe.train.unused_parameters,
    )


def hash_recipe(recipe: Recipe) -> str:
    """SHA-256 of the recipe with every default filled in."""
    return hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()
