"""One rank of a proof: the real trainer under the plan, recorded after every step.

Each job joins a group of its own over a file store and leaves it again, so one process serves many plans; nothing of the
trainer is replaced, except by a mutant, and then only for that job.

The bytes of activations are predicted by running one rank's forward pass without data, on fake tensors and a mesh without
peers, and counting what autograd saves; they are measured by the same count around the real forward pass. The bytes of state
are predicted in ``engine/sizes.py``.
"""

import copy
import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore  # torch types this name only there

from shoal.comm.mesh import GRID
from shoal.comm.trafficcounter import TrafficCounts, traffic_rows
from shoal.comm.world import join_world
from shoal.compression.exchange import CompressedSum
from shoal.core.placement import Placement, place_whole
from shoal.core.plan import Plan
from shoal.costs.saved import SavedActivations, measure_saved
from shoal.data.batchform import flat_targets
from shoal.data.loading.loader import Microbatch
from shoal.engine.batches.schedule import most_microbatches
from shoal.engine.hooks import Hook
from shoal.engine.objective import Objective
from shoal.engine.sizes import RankPreview, measure_state
from shoal.launch.environments import read_place
from shoal.launch.pool import serve
from shoal.models.losses import Loss
from shoal.trainer.build import build_parts, load_init
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from shoal.verify.mutants.catalogue import MUTANTS, planted
from shoal.verify.observation import TrafficObserver
from shoal.verify.reference.recording import Recorder, model_tensors, placement_values, saved_buffers


class ActivationMeter:
    """Counts what the first real microbatch keeps, around the objective's own forward pass."""

    def __init__(self, objective: Objective) -> None:
        self.num_bytes: int | None = None
        self.microbatch: Microbatch | None = None
        self._model = objective.model
        self._measuring = ExitStack()
        self._saved: SavedActivations | None = None
        self._handles = [objective.register_forward_pre_hook(self._begin), objective.register_forward_hook(self._end)]

    def _begin(self, _objective: nn.Module, given: tuple[Any, ...]) -> None:
        if given[0] is not None and self.microbatch is None:
            self.microbatch = given[0]
            inputs: Sequence[Tensor] = (*self.microbatch.inputs, *flat_targets(self.microbatch.targets))
            self._saved = self._measuring.enter_context(measure_saved(self._model, *inputs))

    def _end(self, _objective: nn.Module, _given: tuple[Any, ...], _loss: Tensor) -> None:
        if self._saved is not None:
            self._measuring.close()
            self.num_bytes, self._saved = self._saved.num_bytes, None

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()


class GradientRecorder(Hook):
    """Keeps a step's gradients as they were summed, before they are clipped."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_gradients(self, step: int, parameters: Mapping[str, nn.Parameter], loss_scale: float) -> None:
        """Copy them, without the loss scale."""
        self.gradients = {
            # A new tensor: clipping writes into the old one.
            f"grad/{name}": parameter.grad.detach() / loss_scale
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }


def compressed_sums(trainer: Trainer) -> CompressedSum | None:
    """The sums of a trainer that go compressed, between replicas or between islands; None where none do."""
    exchange = trainer.engine.reduction.exchange
    if trainer.engine.islands is not None:
        return trainer.engine.islands.sums
    return None if exchange is None else exchange.sums


def sums_memory(trainer: Trainer) -> "SumsMemory":
    """What the compressed sums of a trainer remember."""
    islands = trainer.engine.islands
    if islands is None:
        return SumsMemory(compressed_sums(trainer))
    return SumsMemory(compressed_sums(trainer), islands.close, is_of_islands=True)


@dataclass(frozen=True)
class SumsMemory:
    """What a rank's compressed sums remember from step to step, under the names of optimizer state.

    ``TENSOR/WHAT-R`` is rank R's own; what all ranks have together, ``TENSOR/WHAT``, lies where its placement says.
    """

    sums: CompressedSum | None
    settle: Callable[[], None] = lambda: None
    """Waits for a sum that is under way beside the steps, which is when it is known what it leaves unsent."""
    is_of_islands: bool = False
    """Each island is compared by itself, and none has all of what the owners of a sum did not send back: the next round shows
    it."""

    def _shared(self) -> dict[str, dict[str, tuple[Tensor, int, int]]]:
        assert self.sums is not None
        found = self.sums.shared_state()
        return {what: named for what, named in found.items() if not (self.is_of_islands and what == "sum_residual")}

    def tensors(self) -> dict[str, Tensor]:
        """As it is now."""
        self.settle()
        return {key: tensor for key, (tensor, _) in self._with_places().items()}

    def placements(self) -> dict[str, Placement]:
        """Where this rank's part lies in the whole, by the name of the capture."""
        return {key: placement for key, (_, placement) in self._with_places().items()}

    def _with_places(self) -> dict[str, tuple[Tensor, Placement]]:
        found: dict[str, tuple[Tensor, Placement]] = {}
        if self.sums is None:
            return found
        for what, own in self.sums.own_state().items():
            for name, flat in own.items():
                part = self.sums.parts[name]
                # A shard is whole rows.
                rows = part.own(flat).view(-1, *part.shape[1:])
                start = (part.offset + part.before) // math.prod(part.shape[1:])
                place = place_whole(part.shape).rows(start, start + len(rows))
                found[f"optimizer/{name}/{what}-{self.sums.channel.rank}"] = rows, place
        for what, shared in self._shared().items():
            for name, (tensor, start, num_rows) in shared.items():
                place = place_whole((num_rows, *tensor.shape[1:])).rows(start, start + len(tensor))
                found[f"optimizer/{name}/{what}"] = tensor, place
        return found


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train the job's recipe under its plan for some steps and record each; says what crossed between ranks and what it
    weighs."""
    torch.set_num_threads(job["threads"])
    folder = Path(job["folder"])
    recipe = Recipe.model_validate(job["recipe"])
    store = FileStore(str(folder / "store"), int(os.environ["WORLD_SIZE"]))
    world = join_world(read_place(os.environ), deadline_seconds=job["deadline_seconds"], store=store)
    mutant = MUTANTS[job["mutant"]] if job["mutant"] else None
    with planted(mutant, world):
        model, loss, data = build_parts(recipe, loads=False)
        plain = copy.deepcopy(model)
        trainer = Trainer(
            model,
            data,
            loss=loss,
            train=recipe.train,
            optim=recipe.optim,
            telemetry=recipe.telemetry,
            elastic=recipe.elastic,
            parallel=recipe.parallel,
            pipeline=recipe.pipeline,
            replicas=recipe.replicas,
            compression=recipe.compression,
            plan=Plan.parse(job["plan"]),
            prefetch=recipe.data.prefetch,
            workers=recipe.data.workers,
            world=world,
        )
        load_init(trainer.engine, recipe)
        # Training reads the cheap norm where nothing is decided by it; here what is measured by it is compared to the bit.
        trainer.engine.needs_exact_norm |= recipe.optim.adapt in ("noise", "adascale")
        if trainer.engine.asynchronous is not None:
            trainer.engine.asynchronous.longest = 1  # Every step is looked at; how long a window is changes no bit.
        with trainer:
            meter = ActivationMeter(trainer.engine.objective)
            observer = TrafficObserver(trainer, plain, loss, data)
            answer = _record(trainer, observer, job["steps"], folder)
            meter.close()
            return {**answer, "sizes": _sizes(trainer, plain, loss, meter)}


def _record(trainer: Trainer, observer: TrafficObserver, steps: int, folder: Path) -> dict[str, Any]:
    recorder = Recorder(folder, f"rank-{trainer.world.rank:03d}")
    summed, memory = GradientRecorder(), sums_memory(trainer)
    trainer.engine.add_hook(summed)
    counted: list[TrafficCounts] = []
    expected: list[TrafficCounts] = []
    running = itertools.islice(trainer.training_steps(), steps)
    for _ in range(steps):
        with trainer.mesh.traffic.counting() as counts:
            done = next(running)
        counted.append(dict(counts))
        expected.append(observer.expected(counts))
        tensors = model_tensors(
            trainer.engine.reduction.updated.items(), trainer.optimizer, saved_buffers(trainer.model)
        )
        tensors |= memory.tensors() | _adapted(trainer, done.lr)
        if not done.skipped:
            tensors |= summed.gradients
        assert done.grad_norm is not None, "a trainer has the whole gradient"
        recorder.add(loss=done.loss, norm=done.grad_norm, skipped=done.skipped, tensors=tensors)
    placements = {**trainer.engine.reduction.placements, **memory.placements()}
    recorder.close(placements={name: placement_values(place) for name, place in placements.items()})
    return {
        "coordinates": {axis.value: trainer.mesh.coordinate(axis) for axis in GRID},
        "degrees": {axis.value: trainer.mesh.degree(axis) for axis in GRID},
        "microbatches": trainer.plan.microbatches or 1,
        "adds_in_order": adds_in_order(trainer),
        "traffic": [traffic_rows(counts) for counts in counted],
        "expected_traffic": [traffic_rows(counts) for counts in expected],
    }


def _adapted(trainer: Trainer, lr: float) -> dict[str, Tensor]:
    """The rate of a step and what it follows, as tensors; nothing where neither rate nor batch adapts."""
    optim, train, adapt = trainer.growth.optim, trainer.settings.train, trainer.adapt
    if optim.adapt == "none" and optim.scale == "none" and train.batch_schedule is None:
        return {}
    state = {} if adapt is None else adapt.state()
    kinds = {"averages": ("square", "variance"), "progress": ("weight", "progress", "level"), "factor": ("factor",)}
    found = {kind: [state[key] for key in keys] for kind, keys in kinds.items() if keys[0] in state}
    found["rate"] = [lr]
    return {f"optimizer/optim.adapt/{key}": torch.tensor(value, dtype=torch.float64) for key, value in found.items()}


def _sizes(
    trainer: Trainer, plain: nn.Module, loss: Loss, meter: ActivationMeter
) -> dict[str, dict[str, int] | dict[str, str]]:
    """Predicted and measured bytes of this rank, and why some were not predicted."""
    analysis, rank = trainer.engine.analysis, trainer.world.rank
    plan = replace(trainer.plan, microbatches=most_microbatches(trainer.settings.train, trainer.plan))
    cut = trainer.engine.pipeline
    preview = functools.partial(
        RankPreview.build, plain, analysis=analysis, plan=plan, rank=rank, precision=trainer.engine.precision
    )
    part = None if cut is None else cut.part
    predicted = asdict(preview(part=part).state_bytes(trainer.settings.optim, trainer.settings.compression))
    missing: dict[str, str] = {}
    measured = measure_state(trainer.engine)
    predicted = {what: size for what, size in predicted.items() if what in measured}
    if plan.zero == 0 and "gradients" in predicted:
        # One that no sample touched has no gradient to keep; that it has none in one process either is compared elsewhere.
        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        predicted["gradients"] -= sum(parameter.nbytes for parameter in trained if parameter.grad is None)
    # Stage 3 keeps weights out of what autograd saves with hooks of its own, which would hide from the count what is inside them.
    if meter.microbatch is not None and meter.num_bytes is not None and plan.zero < 3:
        measured["activations"] = meter.num_bytes
        try:
            has_piggyback = trainer.engine.scalars.carrier is not None
            predicted["activations"] = preview().activation_bytes(loss, meter.microbatch, has_piggyback=has_piggyback)
        except Exception as error:
            # A forward pass that looks at values cannot run without them, and may raise anything; the certificate says what.
            missing["activations"] = f"{type(error).__name__}: {error}"
    return {"predicted": predicted, "measured": measured, "missing": missing}


def adds_in_order(trainer: Trainer) -> bool:
    """True when sums over replicas run in the order of ranks, so that any number of them keeps the reference's bits."""
    transport = trainer.mesh.replicas.transport
    return transport is None or transport.is_ordered


def main() -> None:
    """Entry point: serves jobs."""
    serve(lambda job: run_job(job))


if __name__ == "__main__":
    main()
