"""Weights from elsewhere under every plan: each rank reads its part, the whole is what one process loads, and tuning is exact."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shoal
from shoal.checkpoint.foreign import ForeignWeights
from shoal.core.plan import Plan
from shoal.models.losses import cross_entropy
from shoal.testing.parity import assert_close
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts, load_init
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer

SIZES = {"layers": 2, "hidden": 32, "heads": 2, "dropout": 0.1}
RECIPE = {
    "model": {"name": "gpt", **SIZES},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 32, "sequence": 8, "vocab": 32},
    "train": {"steps": 3, "global_batch": 8},
    "optim": {"weight_decay": 0.1, "schedule": "cosine", "warmup": 1},
}
GROUPS = [
    {"match": "embedding.*", "frozen": True},
    {"match": "blocks.0.*", "lr_factor": 0.5},
    {"match": "head.*", "lr": 2e-3, "weight_decay": 0.0},
]
LORA = {"rank": 4, "alpha": 8.0, "targets": ["query", "value"], "dropout": 0.1}
LINEAR = {"weight": (256, 256), "bias": (256,)}
PLANS = ["dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2", "pp=2 microbatches=2", "dp=2 recompute=full"]


def recipe_of(model=(), optim=()):
    return {**RECIPE, "model": {**RECIPE["model"], **dict(model)}, "optim": {**RECIPE["optim"], **dict(optim)}}


def write_folder(folder, seed=5):
    """A Hugging Face folder of two files, in bfloat16 in part, with names of its own."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    model, _, _ = build_parts(Recipe.model_validate({**RECIPE, "train": {**RECIPE["train"], "seed": seed}}))
    tensors = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["model.norm.weight"] = torch.rand(32).bfloat16()
    names = sorted(tensors)
    where = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return {name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()}


def train(world, recipe, plans):
    """Whole weights before and after some steps of each plan, what each rank read, and its parts."""
    found = []
    for plan in plans:
        read = []
        plain = ForeignWeights.read_spans

        def watched(self, file, spans, plain=plain, read=read):
            read.append(sum(span.end - span.start for span in spans))
            return plain(self, file, spans)

        config = Recipe.model_validate(recipe)
        model, loss, data = build_parts(config, loads=False)
        chosen = {"plan": Plan.parse(plan), "world": world, "optim": config.optim, "was_tried": True}
        trainer = Trainer(model, data, loss=loss, train=config.train, **chosen)
        ForeignWeights.read_spans = watched
        load_init(trainer.engine, config)
        ForeignWeights.read_spans = plain
        first = trainer.engine.state_dict(everywhere=True)
        held = sum(shard.tensor.numel() for shard in trainer.engine.state_dict(whole=False).values())
        trainer.train()
        last = trainer.engine.state_dict()
        frozen = {name: one for name, one in trainer.engine.model.named_parameters() if not one.requires_grad}
        state = sum(value.numel() for one in trainer.optimizer.state.values() for value in one.values())
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        trainer.persistence.close()
        trainer.reporter.close()
        trainer.engine.close()
        found.append(
            {
                "first": first,
                "last": {} if last is None else last,
                "is_main": last is not None,
                "read": sum(read),
                "held": held,
                "frozen": sorted(frozen),
                "state": state,
                "rates": rates,
            }
        )
    return found


def alone(recipe):
    (result,) = run_on_ranks(train, 1, recipe, ["dp=1"])
    return result[0]


def test_each_rank_reads_its_own_part_of_a_folder_and_groups_are_those_of_one_process(tmp_path):
    given = write_folder(tmp_path)
    init = {"path": str(tmp_path), "prefix": "model."}
    recipe = recipe_of({"init": init}, {"groups": GROUPS})
    one = alone(recipe)
    ranks = run_on_ranks(train, 2, recipe, PLANS, deadline_seconds=120)
    numel = sum(tensor.numel() for tensor in given.values())
    for place, plan in enumerate(PLANS):
        both = [rank[place] for rank in ranks]
        assert [rank["is_main"] for rank in both] == [True, False]
        for rank in both:
            assert_close(given, rank["first"], bound=0.0)
        assert_close(one["last"], both[0]["last"], bound=1e-5 if plan == "tp=2" else 1e-6)
        assert torch.equal(both[0]["last"]["embedding.weight"], given["embedding.weight"])
        assert both[0]["rates"] == one["rates"] and len(set(one["rates"])) == 3
        if plan in ("dp=2 zero=3", "pp=2 microbatches=2"):
            assert all(rank["held"] < 0.75 * numel for rank in both)
        # Columns of a matrix are read with the rows that they lie in, one matrix at a time.
        most = 4 * numel - 1 if plan == "tp=2" else None
        assert all(rank["read"] <= (most or 4 * rank["held"]) for rank in both), "a rank reads what it holds"


@pytest.mark.parametrize(
    "plans",
    [["dp=2 zero=3", "tp=2"], pytest.param(["dp=2", "dp=2 zero=1", *PLANS[4:]], marks=pytest.mark.soak)],
    ids=len,
)
def test_adapters_of_peft_on_weights_from_a_folder_are_those_of_one_process(tmp_path, plans):
    """``model.lora`` with dropout of its own; what is not an adapter keeps every bit that was loaded."""
    pytest.importorskip("peft")
    given = write_folder(tmp_path)
    recipe = recipe_of({"init": {"path": str(tmp_path), "prefix": "model."}, "lora": LORA})
    one = alone(recipe)
    adapters = {name for name in one["last"] if "lora_" in name}
    assert adapters and all(name in adapters for name in one["last"] if name not in one["frozen"])
    moved = [name for name in adapters if not torch.equal(one["last"][name], one["first"][name])]
    assert set(moved) == adapters, "all of them learn, and nothing else"
    for rank, found in enumerate(run_on_ranks(train, 2, recipe, plans, deadline_seconds=120)):
        for plan, result in zip(plans, found, strict=True):
            assert_close(one["first"], result["first"], bound=0.0)
            trained = sum(one["last"][name].numel() for name in adapters)
            assert result["state"] < 3 * trained, "frozen weights have no optimizer state"
            if rank == 0:
                assert_close(one["last"], result["last"], bound=1e-5 if plan == "tp=2" else 1e-6)
                for name in one["last"].keys() - adapters:
                    assert torch.equal(result["last"][name], given[name.replace(".base_layer.", ".")]), name


def tune_by_script(world, folder, plans):
    """Weights that a script loads after it set its model up, what this rank read of them, and the weights two steps later."""
    found = []
    for plan in plans:
        read = []
        plain = ForeignWeights.read_spans

        def watched(self, file, spans, plain=plain, read=read):
            read.append(sum(span.end - span.start for span in spans))
            return plain(self, file, spans)

        with shoal.Run(plan=plan, world=world) as run:
            model, _, data = build_parts(Recipe.model_validate(RECIPE), loads=False)
            loader = run.loader(data, global_batch=8)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            model, optimizer = run.setup(model, optimizer, loss=cross_entropy)
            ForeignWeights.read_spans = watched
            told = shoal.load_weights(model, folder, prefix="model.", skip="head.*", strict=False)
            ForeignWeights.read_spans = plain
            first = {name: one.clone() for name, one in run.state_dict().items()}
            held = sum(shard.tensor.numel() for shard in run.state_dict(whole=False).values())
            for batch in loader.steps(2):
                run.step(batch)
            found.append((first, run.state_dict(), sum(read), held, sorted(told.loaded)))
    return found


def test_a_script_loads_its_part_of_a_folder_after_it_set_its_model_up(tmp_path):
    given = write_folder(tmp_path)
    ((first, last, _, _, names),) = tune_by_script(None, str(tmp_path), ["dp=1"])
    assert names == sorted(name for name in given if not name.startswith("head."))
    assert all(torch.equal(first[name], given[name]) for name in names)
    assert not any(
        torch.equal(first[name], given[name]) for name in given if name.startswith("head.") and "bias" not in name
    )
    plans = ["dp=2 zero=3", "pp=2 microbatches=2", "tp=2"]
    for rank in run_on_ranks(tune_by_script, 2, str(tmp_path), plans, deadline_seconds=120):
        for plan, (loaded, tuned, read, held, told) in zip(plans, rank, strict=True):
            assert_close(first, loaded, bound=0.0)
            assert_close(last, tuned, bound=1e-5 if plan == "tp=2" else 1e-6)
            assert plan == "tp=2" or 0 < read <= 4 * held, "a rank reads what it holds"
            assert set(told) <= set(names)


def count_read():
    """Bytes that this process has got of files so far, as the kernel counts them."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def load_counted(world, path, plans):
    """What the kernel counted while a rank loaded a file, and the bytes of what it holds, for each plan."""
    found = []
    for plan in plans:
        with shoal.Run(plan=plan, world=world) as run:
            model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(256, 256), nn.Tanh())])
            loader = run.loader([(torch.zeros(256), torch.zeros(256))] * 8, global_batch=8)
            run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.MSELoss())
            shoal.load_weights(model, path)  # The first time also imports what it needs.
            before = count_read()
            shoal.load_weights(model, path)
            read = count_read() - before
            held = sum(4 * shard.tensor.numel() for shard in run.state_dict(whole=False).values())
            run.step(loader.next())
            found.append((read, held))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts bytes in /proc")
def test_the_bytes_that_the_system_reads_for_a_rank_are_those_that_it_holds(tmp_path):
    tensors = {f"{2 * layer}.{name}": torch.randn(shape) for layer in range(4) for name, shape in LINEAR.items()}
    save_file(tensors, tmp_path / "body.safetensors")
    whole = sum(4 * tensor.numel() for tensor in tensors.values())
    header = 16_384
    plans = ["dp=2", "dp=2 zero=3", "pp=2 microbatches=2", "tp=2"]
    ranks = run_on_ranks(load_counted, 2, str(tmp_path / "body.safetensors"), plans, deadline_seconds=120)
    for place, plan in enumerate(plans):
        both = [rank[place] for rank in ranks]
        if plan == "tp=2":  # Of a matrix whose columns are split a rank reads the rows in which they lie.
            assert all(held <= read <= held + whole / 2 + header for read, held in both)
        else:
            assert all(held <= read <= held + header for read, held in both), (plan, both)
        assert sum(held for _, held in both) == pytest.approx(2 * whole if plan == "dp=2" else whole, rel=0.01)


@pytest.mark.soak
def test_a_run_that_goes_on_needs_nothing_of_what_it_began_from(shoal, tmp_path):
    write_folder(folder := tmp_path / "pretrained")
    sizes = "\n".join(f"{key} = {value}" for key, value in SIZES.items())
    data = "\n".join(f"{key} = {json.dumps(value)}" for key, value in RECIPE["data"].items())
    (tmp_path / "tuned.toml").write_text(
        f'[model]\nname = "gpt"\n{sizes}\n[model.init]\npath = "{folder}"\nprefix = "model."\n[data]\n{data}\n'
        "[train]\nsteps = 2\nglobal_batch = 8\nthreads = 1\n[telemetry]\ntensorboard = false\n"
    )
    shoal.run("train", "tuned.toml", "--plan", "dp=2", "--run-dir", "run")
    for file in folder.iterdir():
        file.unlink()
    shoal.run("train", "tuned.toml", "--plan", "dp=2", "--run-dir", "run", "--resume", "--set", "train.steps=3")
    refused = shoal.run("train", "tuned.toml", "--plan", "dp=2", "--run-dir", "other", expect=2)
    assert str(folder) in refused.stderr
