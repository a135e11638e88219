"""What bad input gets: one message with the numbers and the fix, exit code 2, no traceback, and nothing started or written."""

import json

import numpy as np
import pytest

RECIPE = """
[model]
name = "gpt"
layers = 1
hidden = 16
heads = 2
[data]
source = "stdlib"
sequence = 8
limit_bytes = 50000
[train]
steps = 2
global_batch = 4
"""
DIGITS = (
    "[model]\nname = 'mlp'\n[data]\nsource = 'synthetic'\nkind = 'classes'\nsamples = 3\nvalidation = 0\ntest = 0\n"
)
DIGITS += "[train]\nsteps = 2\nglobal_batch = 4\n"
TEXT = RECIPE.replace('"stdlib"', '"text"').replace("limit_bytes = 50000", 'path = "corpus"')
TOKENS = RECIPE.replace('"stdlib"', '"tokens"').replace("limit_bytes = 50000", 'path = "tokens.npy"\nvocab = 50')
OWN = "[model]\nbuild = 'mine:build'\n[data]\nsource = 'synthetic'\nkind = 'classes'\n[train]\nsteps = 2\n"


OWN_DATA = "[model]\nname = 'mlp'\n[data]\nbuild = 'mine:data'\nvalidation = 0\ntest = 0\n[train]\nsteps = 2\nglobal_batch = 4\n"


def write_own_data(folder):
    (folder / "mine.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def data():\n    return TensorDataset(torch.zeros(3, 4), torch.zeros(3, 1))\n"
    )


def write_short_tokens(folder):
    np.save(folder / "tokens.npy", np.arange(5, dtype=np.uint16))


def write_wild_tokens(folder):
    np.save(folder / "tokens.npy", np.full(500, 99, dtype=np.uint16))


def write_torn_tokens(folder):
    np.save(folder / "tokens.npy", np.zeros(500, dtype=np.uint16))
    whole = (folder / "tokens.npy").read_bytes()
    (folder / "tokens.npy").write_bytes(whole[:-100])


def write_broken_module(folder):
    (folder / "mine.py").write_text("import nothing_of_that_name\n")


def write_empty_corpus(folder):
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("")


def write_schedule_without_a_backward(folder):
    (folder / "own.csv").write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n")


def write_schedule_that_never_ends(folder):
    (folder / "own.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")


def write_own_model(folder):
    (folder / "mine.py").write_text(
        "import torch\n"
        "def build():\n    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))\n"
        "class Tied(torch.nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(*(torch.nn.Linear(16, 16) for _ in range(3)))\n"
        "        self[2].weight = self[0].weight\n"
    )


DEEP = RECIPE.replace("layers = 1", "layers = 4")
OWN_TIED = OWN.replace("build'", "Tied'").replace("'classes'", "'classes'\nclasses = 16")
PIPELINES = {
    "more ranks than blocks": (DEEP, ("--plan", "pp=8"), ["pp=8", "4 blocks", "nearest plan", "pp=4"], None),
    "microbatches and batch": (DEEP, ("--plan", "pp=2 microbatches=3"), ["microbatches=3", "4 samples", "2"], None),
    "no such schedule file": (DEEP, ("--plan", "pp=2 schedule=own.csv"), ["own.csv", "No such file"], None),
    "schedule without a backward": (
        DEEP,
        ("--plan", "pp=2 schedule=own.csv"),
        ["own.csv", "stage 0 has no B (or I) of microbatch 1", "^ here"],
        write_schedule_without_a_backward,
    ),
    "schedule that never ends": (
        DEEP,
        ("--plan", "pp=2 schedule=own.csv"),
        ["own.csv", "it never ends", "0B0", "1F1", "^ here"],
        write_schedule_that_never_ends,
    ),
    "no such place for a stage": (
        DEEP,
        ("--plan", "pp=2", "--set", 'pipeline.stages=["blocks.9"]'),
        ["pipeline.stages", "'blocks.9'", "'blocks.3'"],
        None,
    ),
    "too few places for stages": (
        DEEP,
        ("--plan", "pp=2 schedule=zbv", "--set", 'pipeline.stages=["blocks.1"]'),
        ["1 place", "2 stages", "has 4", "name 3"],
        None,
    ),
    "tied weights": (
        DEEP,
        ("--plan", "pp=2 schedule=pipedream", "--set", "model.tied=true"),
        ["'embedding.weight'", "of 2", "untie it", "nearest plan"],
        None,
    ),
    "tied weights of their own": (
        OWN_TIED,
        ("--plan", "pp=3 schedule=pipedream"),
        ["'0.weight'", "stages 0 and 2", "untie it"],
        write_own_model,
    ),
    "shards under versions": (
        DEEP,
        ("--plan", "dp=2 pp=2 zero=1 schedule=pipedream"),
        ["zero=1", "schedule=pipedream", "nearest plan"],
        None,
    ),
    "float16 under versions": (
        DEEP,
        ("--plan", "pp=2 schedule=pipedream", "--set", "train.precision=float16"),
        ["float16", "bfloat16", "schedule=1f1b"],
        None,
    ),
    "skipping under versions": (
        DEEP,
        ("--plan", "pp=2 schedule=pipedream", "--set", "train.nonfinite=skip"),
        ["train.nonfinite skip", "schedule=1f1b"],
        None,
    ),
    "too many stages for a module of their own": (OWN, ("--plan", "pp=4"), ["4 stages", "3"], write_own_model),
}

CASES = PIPELINES | {
    "misspelt section": (RECIPE.replace("[train]", "[trian]"), (), ["'trian'", "did you mean 'train'?"], None),
    "misspelt key": (RECIPE.replace("layers", "layerz"), (), ["'model.layerz'", "did you mean 'layers'?"], None),
    "misspelt override": (RECIPE, ("--set", "optim.name=adamv"), ["optim.name", "adamv"], None),
    "wrong type": (RECIPE, ("--set", "train.steps=many"), ["train.steps", "'many'"], None),
    "no length": (RECIPE.replace("steps = 2", ""), (), ["exactly one of steps, epochs and tokens"], None),
    "two lengths": (RECIPE, ("--set", "train.epochs=1"), ["steps and epochs"], None),
    "indivisible batch": (RECIPE, ("--plan", "dp=3"), ["4", "dp 3", "3 or 6"], None),
    "processes and plan": (RECIPE, ("--plan", "dp=2", "--nproc", "4"), ["4 processes", "dp 2"], None),
    "plan of the future": (RECIPE, ("--plan", "dp=1 ep=2"), ["ep=2", "not there yet"], None),
    "heads": (RECIPE, ("--set", "model.heads=3"), ["16", "3"], None),
    "unknown model": (RECIPE.replace('"gpt"', '"gtp"'), (), ["'gtp'", "did you mean 'gpt'?"], None),
    "unknown source": (RECIPE.replace('"stdlib"', '"stdlibs"'), (), ["'stdlibs'", "did you mean 'stdlib'?"], None),
    "missing corpus": (TEXT, (), ["corpus"], None),
    "empty corpus": (TEXT, (), ["corpus", "0"], write_empty_corpus),
    "missing tokens": (TOKENS, (), ["tokens.npy"], None),
    "torn tokens": (TOKENS, (), ["tokens.npy"], write_torn_tokens),
    "tokens beyond the vocabulary": (TOKENS, (), ["99", "50"], write_wild_tokens),
    "too few tokens": (TOKENS, (), ["5 token ids", "27"], write_short_tokens),
    "import error in build": (
        OWN,
        (),
        ["mine:build", "mine.py", "line 1", "nothing_of_that_name"],
        write_broken_module,
    ),
    "no such module": (OWN, (), ["mine", "there is no module"], None),
    "more processes than samples": (DIGITS, ("--plan", "dp=4"), ["3 samples", "4 replicas"], None),
    "more processes than samples of their own": (
        OWN_DATA,
        ("--plan", "dp=4"),
        ["3 samples", "4 replicas"],
        write_own_data,
    ),
    "bad time limit": (RECIPE, ("--set", "train.time_limit=soon"), ["'soon'", "1h30m"], None),
    "bad profile window": (RECIPE, ("--profile", "9:3"), ["9:3"], None),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_message_and_exit_code_2(name, shoal, tmp_path):
    recipe, arguments, words, prepare = CASES[name]
    (tmp_path / "recipe.toml").write_text(recipe)
    if prepare is not None:
        prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = shoal("train", "recipe.toml", "--run-dir", "run", *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr and not done.stdout
    for word in words:
        assert word in done.stderr
    # A schedule is drawn, with an arrow at the cell that is wrong.
    assert len(done.stderr.splitlines()) <= (4 if "^ here" in words else 3), "one message"
    after = [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts]
    assert after == before, "nothing was written"


def test_a_run_directory_that_holds_another_recipe(shoal, tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text(RECIPE.replace("hidden = 16", "hidden = 32"))
    command = ("train", "recipe.toml", "--run-dir", "run")
    for arguments in ((), ("--resume",)):
        done = shoal(*command, *arguments)
        assert done.returncode == 2
        assert "model.hidden is 32 there and 16 here" in done.stderr
    (run / "recipe.toml").write_text(RECIPE)
    done = shoal(*command)
    assert done.returncode == 2 and "--resume" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train",), ["which recipe?"]),
        (("train", "nowhere.toml"), ["no such file", "nowhere.toml"]),
        (("eval", "nowhere", "--split", "test"), ["nowhere"]),
        (("eval", "nowhere", "--split", "tset"), ["'tset'", "did you mean 'test'?"]),
        (("sample", "nowhere"), ["nowhere"]),
        (("train", "recipe.toml", "--json", "no/such/folder.json"), ["--json"]),
    ],
)
def test_other_wrong_requests(arguments, words, installed_shoal, tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    done = installed_shoal(*arguments)
    assert done.returncode == 2, done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_warns_of_what_the_run_would_ignore(shoal, tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    done = shoal("train", "recipe.toml", "--dry-run", "--set", "paramserver.overlap=true")
    assert done.returncode == 0 and done.stderr.startswith(
        "warning: paramserver.overlap: no effect, because the plan 'dp=1"
    )
    assert "warning" not in done.stdout and "nothing was started" in done.stdout


def test_a_dry_run_says_what_it_costs_to_go_on_without_the_dead(shoal, tmp_path):
    """A change of the view holds the state twice, and one logical replica for each present one is slow without one of them."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    asked = ["train", "recipe.toml", "--dry-run", "--json", "dry.json", "--set", "elastic.mode=shrink"]
    slow = "while one is missing every step takes twice as long"
    done = shoal(*asked, "--plan", "dp=2 zero=2")
    assert done.returncode == 0 and slow in done.stderr and "elastic.max_dp 2" in done.stderr, done.stderr
    held = json.loads((tmp_path / "dry.json").read_text())["bytes_per_rank"]
    assert held["view change"] == held["weights"] + held["optimizer"] > 0
    assert held["copies"] == pytest.approx(held["weights"] + 2 * held["optimizer"], rel=0.01), "two of half the rows"
    assert held["total"] == sum(count for name, count in held.items() if name != "total")
    for fix in ("elastic.max_dp=2", "elastic.spares=1"):
        done = shoal(*asked, "--plan", "dp=4", "--set", fix)
        assert done.returncode == 0 and slow not in done.stderr, done.stderr
    assert "copies" not in json.loads((tmp_path / "dry.json").read_text())["bytes_per_rank"]
