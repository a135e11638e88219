"""Running proofs: which jobs, in which processes, against which reference; the result of each plan as one value.

References are shared by all plans with the same tree of sums, and ranks by all plans with the same number of processes: starting
processes takes longer than a proof. The reference imports nothing of ``pipeline/``: in which order a pipeline's gradients are
added (which stages use a weight, in which directions and on how many ranks) is found here and handed over as names and numbers.
"""

import copy
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from shoal.core.errors import RequestError, ShoalError
from shoal.core.plan import Plan
from shoal.data.source import Splits
from shoal.engine.config import Settings
from shoal.engine.meancheck import find_other_mean
from shoal.engine.parallelize import example_of, resolve_stages
from shoal.engine.resolve import resolve_plan
from shoal.launch.pool import Pool
from shoal.models.losses import build_loss
from shoal.optim.config import PrecisionName
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.pipeline.build import Stages, cut_chain
from shoal.trainer.config import Recipe, dump_recipe
from shoal.verify.compare.assemble import assemble_step
from shoal.verify.compare.diagnose import RankGrid
from shoal.verify.compare.judge import judge_run
from shoal.verify.compare.tolerance import derive_tolerance, flat_bound
from shoal.verify.mutants.mutant import Death
from shoal.verify.reference.case import Case, Tree, UpdateLog
from shoal.verify.reference.recording import Recording
from shoal.verify.request import ProofRequest, Subject, steps_to_prove
from shoal.verify.result import PlanResult, compared, crashed, judge_prediction, refused, worst_of
from shoal.verify.server_proof import prove_servers

# A rank that imports torch on a busy machine; what a job takes comes on top of it.
_START_SECONDS = 180.0
_LONGEST_SECONDS = 3600.0


class Prover:
    """Proves plans one after another; a context manager, because it keeps processes and a folder."""

    def __init__(self, *, steps: int, threads: int = 1, deadline_seconds: float | None = None) -> None:
        self.steps = steps
        self.threads = threads
        self.deadline_seconds = deadline_seconds
        self._reference_pool = Pool("shoal.verify.oracle.process", 1, threads=threads, called="reference")
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

    def _prove(self, request: ProofRequest, folder: Path) -> PlanResult:
        if request.plan.ps:
            return prove_servers(
                request,
                folder,
                reference=lambda case, tree: self._reference(case, tree)[0],
                replay=self._replay,
                threads=self.threads,
                deadline_seconds=self.deadline_seconds or _LONGEST_SECONDS,
            )
        reference_folder, reference_seconds = self._reference(request.case, request.tree)
        answers = self._run_ranks(request, folder, reference_seconds)
        return self._judge(request, reference_folder, folder, answers)

    def _ask(
        self, subject: Subject, plan: Plan, precision: PrecisionName, mutant: str | None, deaths: Sequence[Death]
    ) -> ProofRequest:
        # Between steps nothing else may run: the watch would be counted as the step's traffic.
        between = {"time_limit": None, "watch_every": 0}
        train = subject.recipe.train.model_copy(update={"precision": precision, **between})
        recipe = subject.recipe.model_copy(update={"train": train})
        derived = resolve_plan(train, plan).plan
        recipe, tree = _tree_of(subject, recipe, derived)
        steps = max(self.steps, steps_to_prove(derived))
        case = _case_of(recipe, subject, derived, min(steps, subject.total_steps))
        return ProofRequest(
            subject=subject, recipe=recipe, plan=derived, case=case, tree=tree, mutant=mutant, deaths=tuple(deaths)
        )

    def _replay(self, case: Case, log: UpdateLog) -> Path:
        folder = self._new_folder()
        job = {"case": asdict(case), "log": asdict(log), "folder": str(folder), "threads": self.threads}
        self._reference_pool.run(job, deadline_seconds=self.deadline_seconds or _LONGEST_SECONDS)
        return folder

    def _reference(self, case: Case, tree: Tree) -> tuple[Path, float]:
        # As JSON: a list and a tuple of the same names are one tree.
        values = {"case": asdict(case), "tree": asdict(tree)}
        key = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        if key not in self._references:
            folder, started = self._new_folder(), time.monotonic()
            job = {**values, "folder": str(folder), "threads": self.threads}
            self._reference_pool.run(job, deadline_seconds=self.deadline_seconds or _LONGEST_SECONDS)
            self._references[key] = (folder, time.monotonic() - started)
        return self._references[key]

    def _run_ranks(self, request: ProofRequest, folder: Path, reference_seconds: float) -> list[dict[str, Any]]:
        plan = request.plan
        if self._pool is not None and self._pool.size != plan.world_size:
            self._pool.end()
            self._pool = None
        if self._pool is None:
            self._pool = Pool("shoal.verify.ranks", plan.world_size, threads=self.threads)
        # A plan does the reference's work in other pieces, on cores that ranks may have to share.
        deadline = self.deadline_seconds or _START_SECONDS + 10.0 * plan.world_size * reference_seconds
        job = {
            "recipe": request.recipe.model_dump(mode="json"),
            "plan": str(plan),
            "steps": request.case.steps,
            "mutant": request.mutant,
            "folder": str(folder),
            "threads": self.threads,
            "deadline_seconds": deadline,
        }
        # The ranks' own deadline is first, because it names the collective and the peer.
        return self._pool.run(job, deadline_seconds=deadline + 10.0)

    def _judge(
        self, request: ProofRequest, reference_folder: Path, folder: Path, answers: list[dict[str, Any]]
    ) -> PlanResult:
        """Compare every island with what one process has for it; where none is wrong, the last one's comparison stands."""
        plan, each = request.plan, len(answers) // request.plan.islands
        judged: list[PlanResult] = []
        for island in range(plan.islands):
            name = "reference" if plan.islands == 1 else f"reference-{island}"
            reference = Recording.open(reference_folder, name)
            ranks = range(island * each, (island + 1) * each)
            judged.append(self._judge_island(request, reference, folder, answers, ranks))
        return worst_of(judged)

    def _judge_island(
        self,
        request: ProofRequest,
        reference: Recording,
        folder: Path,
        answers: list[dict[str, Any]],
        numbers: Sequence[int],
    ) -> PlanResult:
        subject, recipe, plan = request.subject, request.recipe, request.plan
        precision, first = recipe.train.precision, answers[0]
        narrow = reference.facts.get("narrow", ())
        tolerance = derive_tolerance(
            plan,
            precision=precision,
            depth=max(1, subject.facts.num_blocks),
            adds_in_order=first["adds_in_order"],
            joins_replicas=subject.joins_replicas(plan),
            optim=recipe.optim,
            total_steps=subject.total_steps,
            steps=request.case.steps,
            narrow=narrow,
            zeros=reference.facts.get("zeros", ()),
        )
        where = RankGrid(
            degrees={**first["degrees"], "microbatches": first["microbatches"]},
            coordinates=[answers[rank]["coordinates"] for rank in numbers],
        )
        ranks = [Recording.open(folder, f"rank-{rank:03d}") for rank in numbers]
        judged = judge_run(
            reference,
            lambda index: assemble_step(ranks, index),
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
            request,
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
    replicas, microbatches = plan.num_shares // plan.islands, plan.microbatches or 1
    more: dict[str, Any] = {}
    if plan.islands > 1:
        more = {"islands": plan.islands, "sync": plan.sync, "settings": recipe.replicas.model_dump(mode="json")}
    if plan.compress is not None or recipe.compression.weights != "none":
        compression = recipe.compression.model_dump(mode="json")
        more |= {"compress": plan.compress, "compression": compression, "keeps_shards": plan.zero > 0}
    if plan.pp == 1:
        return recipe, Tree(replicas=replicas, microbatches=microbatches, **more)
    cut = cut_model(subject.model, subject.data, subject.analysis, plan, recipe.settings)
    pipeline = recipe.pipeline.model_copy(update={"stages": cut.places})
    tree = replace(cut.tree(replicas=replicas, microbatches=microbatches), **more)
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
        joins_batch=subject.joins_batch,
        # What one process has no gradient of either is refused there; what the ranks alone lack is their failure.
        needs_every_gradient=not plan.ps and (plan.dp or 1) * plan.cp > 1 and not recipe.train.unused_parameters,
    )


def hash_recipe(recipe: Recipe) -> str:
    """SHA-256 of the recipe with every default filled in."""
    return hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class CutModel:
    """A plan's cut of a model, and who holds what under it."""

    stages: Stages
    holders: Mapping[str, frozenset[int]]
    """Stages by parameter name."""
    aliases: Mapping[str, Sequence[str]]
    """All names of each parameter."""
    paths: Mapping[str, frozenset[int]]
    """Stages by the path of a unit."""

    @property
    def places(self) -> list[str]:
        """Where the second and later stages begin, as a recipe says it."""
        return [self.stages.units[start].path for start in self.stages.starts[1:]]

    def tree(self, *, replicas: int, microbatches: int) -> Tree:
        """The order of sums."""
        schedule, count = self.stages.schedule, self.stages.schedule.grid.num_stages
        if schedule.updates.are_asynchronous:
            held = [[name for name, stages in self.holders.items() if stage in stages] for stage in range(count)]
            return Tree(replicas=replicas, microbatches=microbatches, delay=schedule.name, stages=held)
        tied = {name: stages for name, stages in self.holders.items() if len(stages) > 1}
        uses = {name: [self._names_in(name, stage) for stage in sorted(stages)] for name, stages in tied.items()}
        turns: dict[str, list[int]] = {}
        for name, stages in self.holders.items():
            ranks = [schedule.grid.replicas[stage] for stage in sorted(stages)] if schedule.grid.replicas else []
            if max(ranks, default=1) > 1:
                turns[name] = ranks
        return Tree(
            replicas=replicas,
            microbatches=microbatches,
            directions=schedule.grid.directions,
            users={name: sorted(stages) for name, stages in tied.items()},
            uses=uses,
            # Without such weights the tree says nothing of the cut: one reference serves them all.
            places=self.places if tied else (),
            units=list(self.paths) if tied else (),
            turns=turns,
        )

    def _names_in(self, parameter: str, stage: int) -> list[str]:
        return [
            alias
            for alias in self.aliases[parameter]
            if any(alias.startswith(f"{path}.") and stage in stages for path, stages in self.paths.items())
        ]


def cut_model(model: nn.Module, data: Splits, analysis: ModuleAnalysis, plan: Plan, settings: Settings) -> CutModel:
    """Look at how a plan cuts a model, which stays as it is.

    Raises:
        RequestError: it cannot be cut so.
    """
    stages = resolve_stages(model, data, analysis, plan=plan, settings=settings)
    own = copy.deepcopy(model)
    chain = cut_chain(own, example_of(data), stages)
    first = {id(parameter): name for name, parameter in own.named_parameters()}
    aliases: dict[str, list[str]] = {}
    for name, parameter in own.named_parameters(remove_duplicate=False):
        aliases.setdefault(first[id(parameter)], []).append(name)
    paths = {unit.path: chain.stages_of(unit.path) for unit in stages.units}
    return CutModel(stages=stages, holders=chain.holders(), aliases=aliases, paths=paths)
