"""Every setting that people expect is obeyed: changed here, and its effect looked for in what the run did."""

import json
import math
import tomllib

import pytest
import torch

from shoal.core.config import apply_overrides
from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.engine.state import hash_weights
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from support.processes.command import TINY, read_events

BASE = tomllib.loads(TINY)


def build(*overrides, run_dir=None, resume=False, plan="dp=1", base=BASE):
    recipe = Recipe.model_validate(apply_overrides(base, ["data.limit_bytes=60000", *overrides]))
    model, loss, data = build_parts(recipe)
    return Trainer(
        model,
        data,
        loss=loss,
        train=recipe.train,
        optim=recipe.optim,
        evaluation=recipe.eval,
        checkpoint=recipe.checkpoint,
        telemetry=recipe.telemetry,
        plan=Plan.parse(plan),
        prefetch=recipe.data.prefetch,
        run_dir=run_dir,
        resume=resume,
        environment={},
    )


def run(*overrides, **options):
    """Train in this process; what each step said, and the trainer."""
    torch.set_num_threads(1)
    with build(*overrides, **options) as trainer:
        return list(trainer.training_steps()), trainer


def losses(*overrides, **options):
    return [info.loss for info in run(*overrides, **options)[0]]


def test_the_seed_decides_weights_order_and_dropout():
    assert losses() == losses()
    assert losses()[0] != losses("train.seed=2")[0]


def test_global_batch_and_steps_count():
    infos, _ = run("train.global_batch=4", "train.steps=3")
    assert [info.samples for info in infos] == [4, 4, 4] and infos[-1].tokens == 4 * 16


def test_gradient_accumulation_changes_the_order_of_a_sum_and_nothing_else():
    whole, parts = losses("model.dropout=0.1"), losses("model.dropout=0.1", "train.micro_batch=2")
    assert parts == pytest.approx(whole, rel=1e-5) and parts != whole
    assert losses(plan="dp=1 microbatches=4") == parts, "by count or by size, it is the same"


def test_epochs_end_with_a_short_batch_and_see_every_sample_once():
    infos, trainer = run("train.epochs=1", base={**BASE, "train": {"global_batch": 64}})
    total = len(trainer.data.train)
    assert sum(info.samples for info in infos) == total and infos[-1].samples == total % 64
    assert trainer.progress.position.epoch == 1 and trainer.progress.position.offset == 0


def test_tokens_are_a_length_too():
    infos, _ = run("train.tokens=200", base={**BASE, "train": {"global_batch": 4}})
    assert len(infos) == math.ceil(200 / (4 * 16))


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "lars", "lamb"])
def test_every_optimizer_learns(name):
    lr = {"sgd": 0.3, "momentum": 0.05, "nesterov": 0.05, "adagrad": 0.03, "lars": 5.0, "lamb": 0.02}.get(name, 3e-3)
    found = losses(f"optim.name={name}", f"optim.lr={lr}", "train.steps=25", "model.dropout=0.0")
    assert found[-1] < found[0] - 0.3


def test_the_learning_rate_follows_its_schedule():
    infos, _ = run("optim.schedule=linear", "optim.warmup=4", "optim.lr=1.0e-3", "train.steps=12")
    rates = [info.lr for info in infos]
    assert rates[0] < rates[1] < rates[3] <= 1e-3 and rates[4:] == sorted(rates[4:], reverse=True)
    constant, _ = run("optim.schedule=constant")
    assert {info.lr for info in constant} == {1e-3}


def test_the_rate_is_reduced_on_a_plateau():
    flat = (
        "optim.schedule=plateau",
        "optim.plateau_patience=1",
        "optim.plateau_factor=0.1",
        "eval.every=1",
        "train.steps=6",
    )
    infos, _ = run(*flat, "optim.lr=1e-12")
    assert infos[-1].lr < infos[0].lr


def test_clipping_bounds_the_update_and_reports_the_norm_before():
    free, _ = run("optim.name=sgd", "optim.lr=1.0", "train.steps=2", "model.dropout=0.0")
    clipped, _ = run("optim.name=sgd", "optim.lr=1.0", "train.steps=2", "model.dropout=0.0", "optim.clip=1e-6")
    assert clipped[0].grad_norm == pytest.approx(free[0].grad_norm, rel=1e-5)
    assert clipped[1].loss == pytest.approx(clipped[0].loss, abs=0.5) and free[1].loss != clipped[1].loss


def test_weight_decay_shrinks_matrices_and_leaves_norms_and_biases():
    _, trainer = run("optim.weight_decay=0.5", "optim.lr=0.1", "train.steps=1", "optim.name=sgd", "optim.clip=1e-12")
    _, plain = run("optim.weight_decay=0.0", "optim.lr=0.1", "train.steps=1", "optim.name=sgd", "optim.clip=1e-12")
    decayed, kept = dict(trainer.model.named_parameters()), dict(plain.model.named_parameters())
    assert torch.allclose(decayed["head.weight"], kept["head.weight"] * 0.95, atol=1e-6)
    assert torch.equal(decayed["norm.weight"], kept["norm.weight"])


def test_dropout_is_on_in_training_and_off_in_evaluation():
    assert losses("model.dropout=0.5")[0] != losses("model.dropout=0.0")[0]
    _, trainer = run("model.dropout=0.5")
    assert trainer.evaluate("validation").loss == trainer.evaluate("validation").loss


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float64"])
def test_precisions_learn_and_keep_the_weights_that_they_promise(precision):
    infos, trainer = run(f"train.precision={precision}", "train.steps=20", "optim.lr=3e-3", "model.dropout=0.0")
    exact = losses("train.steps=20", "optim.lr=3e-3", "model.dropout=0.0")
    expected = torch.float64 if precision == "float64" else torch.float32
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {expected}
    applied = [info for info in infos if not info.skipped]
    assert applied[-1].loss < applied[0].loss - 0.5
    assert infos[0].loss == pytest.approx(exact[0], rel=2e-2) and infos[0].loss != exact[0]


def test_float16_halves_its_scale_and_skips_the_step_when_it_overflows():
    infos, trainer = run("train.precision=float16", "train.steps=6")
    with build("train.precision=float16", "train.steps=6") as hot:
        hot.progress = hot.progress.__class__(
            position=hot.progress.position, loss_scale=hot.progress.loss_scale.__class__(scale=2.0**24)
        )
        before = hash_weights(hot.model)
        steps = hot.training_steps()
        first = next(steps)
        assert first.skipped and first.loss_scale == 2.0**24 and hash_weights(hot.model) == before
        assert next(steps).loss_scale == 2.0**23
        steps.close()
    assert not any(info.skipped for info in infos[-1:])
    assert trainer.progress.loss_scale.scale <= 2.0**16


def test_evaluation_and_checkpoint_intervals_and_retention(tmp_path):
    run("eval.every=2", "checkpoint.every=1", "checkpoint.keep=2", "train.steps=7", run_dir=tmp_path / "run")
    evaluated = [event["step"] for event in read_events(tmp_path / "run", 0, "evaluated")]
    assert evaluated == [2, 4, 6, 7]
    saved = [event["step"] for event in read_events(tmp_path / "run", 0, "checkpoint_saved")]
    assert saved == [1, 2, 3, 4, 5, 6, 7]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000006", "step-00000007"]


def test_a_run_in_two_halves_is_the_run_in_one(tmp_path):
    options = ("optim.schedule=cosine", "train.steps=10", "train.precision=float16", "optim.name=lamb")
    _, whole = run(*options)
    with build(*options, "checkpoint.every=0", run_dir=tmp_path / "run") as first:
        for info in first.training_steps():
            if info.step == 4:
                first.request_stop("test")
    assert first.status == "interrupted" and first.progress.step == 5, "the wish is agreed on with the next step"
    _, second = run(*options, run_dir=tmp_path / "run", resume=True)
    assert hash_weights(second.model) == hash_weights(whole.model)
    assert (
        second.progress.position == whole.progress.position and second.progress.loss_scale == whole.progress.loss_scale
    )


def test_resume_without_a_whole_checkpoint_starts_at_step_0(tmp_path):
    infos, _ = run("train.steps=3", run_dir=tmp_path / "run", resume=True)
    assert [info.step for info in infos] == [1, 2, 3]


def test_a_torn_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capsys):
    _, whole = run("train.steps=7", "checkpoint.every=2")
    run("train.steps=5", "checkpoint.every=2", run_dir=tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000005" / "rank-000.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[1000] ^= 1
    newest.write_bytes(damaged)
    infos, resumed = run("train.steps=7", "checkpoint.every=2", run_dir=tmp_path / "run", resume=True)
    said = capsys.readouterr().err
    assert "step-00000005 is not whole" in said and "rank-000.safetensors" in said
    assert [info.step for info in infos] == [5, 6, 7]
    assert hash_weights(resumed.model) == hash_weights(whole.model)


def test_a_nan_stops_by_default_and_names_what_it_found(tmp_path):
    with (
        build(
            "optim.name=sgd", "optim.lr=1e30", "train.steps=9", "checkpoint.every=1", run_dir=tmp_path / "run"
        ) as trainer,
        pytest.raises(
            RunError, match=r"is not finite on rank 0 .*last good checkpoint: none is known \(no step was taken from"
        ),
    ):
        trainer.train()


def test_prefetching_changes_nothing():
    assert losses("data.prefetch=0") == losses("data.prefetch=3")


def test_the_resolved_recipe_reads_back_the_same(tmp_path):
    from shoal.trainer.config import dump_recipe, load_recipe

    recipe = Recipe.model_validate(BASE)
    path = tmp_path / "again.toml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe


def test_the_schema_accepts_the_shipped_recipes():
    jsonschema = pytest.importorskip("jsonschema")
    from support.processes.command import ROOT

    schema = Recipe.model_json_schema()
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        jsonschema.validate(tomllib.loads(path.read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**BASE, "trian": {}}, schema)
    json.dumps(schema)
