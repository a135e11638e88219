"""A stage's bytes are predicted from the stage itself: a weight tied to another rank's module lies where the cut left it."""

import pytest

from shoal.comm.mesh import pretend_mesh
from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.engine.sizes import RankPreview
from shoal.optim.build import build_optimizer, initialise_state
from shoal.optim.config import OptimConfig
from shoal.optim.precision import Precision
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.parallel.state_bytes import measure_state_bytes
from shoal.parallel.zero.apply import apply_zero
from shoal.pipeline.build import RankPart, Stages
from shoal.pipeline.cut import StagedModule
from shoal.pipeline.units import find_units
from shoal.schedules.catalogue import make_schedule
from support.pipeline.cut_modules import gpt
from support.pipeline.stages_on_ranks import batch


def lay_out_rank(model, plan, rank):
    """A rank of a pipeline without its peers: its analysis and what it kept."""
    example = batch("gpt", 0)[0]
    analysis = analyse_module(model, example, ParallelConfig())
    schedule = make_schedule("1f1b", ranks=plan.pp, microbatches=plan.microbatches)
    units = find_units(model, example, analysis)
    stages = Stages(units=units, starts=(0, [unit.path for unit in units].index("blocks.1")), schedule=schedule)
    chain = StagedModule(model, units, stages.starts)
    chain.settle(example)
    place = pretend_mesh(plan, rank).coordinate(Axis.PIPELINE)
    own = chain.keep(schedule.grid.stages_of(place))
    return analysis, RankPart(elsewhere=stages.elsewhere(place), names=frozenset(own))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("zero", [1, 3])
def test_bytes_of_a_stage_with_a_tied_weight_are_those_of_the_real_stage(zero, rank):
    """The last stage holds the embedding for its head, where no embedding is called: it is laid out beside the norm there."""
    plan = Plan.parse(f"dp=2 pp=2 schedule=1f1b microbatches=2 zero={zero}")
    whole, stage = gpt(), gpt()
    analysis, part = lay_out_rank(stage, plan, rank)
    how = {"analysis": analysis, "mesh": pretend_mesh(plan, rank), "num_microbatches": 2, "placements": {}}
    reduction = apply_zero(stage, stage=zero, **how)
    optimizer = build_optimizer(OptimConfig(name="adamw"), stage, reduction.updated)
    initialise_state(optimizer)
    reduction.begin_step()
    measured = measure_state_bytes(stage, reduction, optimizer)
    precision = Precision.named("float32")
    preview = RankPreview.build(whole, analysis=analysis, plan=plan, rank=rank, precision=precision, part=part)
    predicted = preview.state_bytes(OptimConfig(name="adamw"))
    assert (predicted.weights, predicted.optimizer) == (measured.weights, measured.optimizer)
    assert "embedding.weight" in part.names and whole.head.weight is whole.embedding.weight
