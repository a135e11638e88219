"""``shoal plan`` as a command: a table, JSON, and one message for what cannot be."""

import json

import pytest

from shoal.planner.hardware.machine import write_machine
from support.planner.machines import measured
from support.processes.command import TINY

pytestmark = pytest.mark.timeout(240)
SHAPE = "[planner.shape]\nlayers = 32\nhidden = 4096\nheads = 32\nvocab = 32000\nsequence = 2048\ngated = true\n"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(TINY + SHAPE)
    return path


def test_plans_as_lines_and_as_json(shoal, recipe, tmp_path):
    done = shoal(
        "plan", recipe, "--cluster", "a100-80gb:2x8", "--global-batch", 64, "--top", 3, "--why-not", "pp=2",
        "--set", "train.precision=bfloat16", "--json", "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["plans"]) == 3 and found["devices"] == 16 and found["global_batch"] == 64
    first, *rest = (plan["seconds"] for plan in found["plans"])
    assert rest == pytest.approx(sorted(rest), rel=1e-3) and first <= 1.01 * rest[0]
    for plan in found["plans"]:
        assert plan["fits"] and plan["headroom_bytes"] > 0 and 0 < plan["mfu"] < 1 and 0 <= plan["bubble"] < 1
        assert plan["plan"] in done.stdout
    assert found["asked"]["plan"].startswith("dp=8 pp=2 schedule=1f1b") and found["why_not"] and found["why"]
    for word in ("parameters on 16 x a100-80gb", "tokens/s", "MFU", "bubble", "exposed", "head room", "slower"):
        assert word in done.stdout
    assert "no run of shoal on a100-80gb was there to calibrate on" in done.stdout and found["in_range"] is False
    (why,) = found["remarks"]
    assert why.startswith("no command runs these: they are for [planner.shape]") and done.stdout.count(why) == 1
    assert "run 1 with" not in done.stdout and {plan["command"] for plan in found["plans"]} == {None}


@pytest.mark.parametrize(
    ("cluster", "batch", "is_slower"),
    [("a100-40gb:2x8", 64, False), pytest.param("h200:1x8", 8, True, marks=pytest.mark.soak), ("gb300:1x8", 8, None)],
)
def test_the_first_plan_that_memory_refuses_is_always_told(shoal, recipe, tmp_path, cluster, batch, is_slower):
    """It was told only where it is faster than the best."""
    done = shoal("plan", recipe, "--cluster", cluster, "--global-batch", batch, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    (told,) = (line for line in done.stdout.splitlines() if line.startswith("refused by memory: "))
    assert ("would not have been chosen anyway" in told) == bool(is_slower)
    if is_slower is None:
        assert found["refused"] is None and "all plans fit" in told
        return
    refused, fastest = found["refused"], min(plan["seconds"] for plan in found["plans"])
    assert refused.keys() == found["plans"][0].keys() and not refused["fits"] and refused["headroom_bytes"] < 0
    assert (refused["seconds"] > 1.01 * fastest) == is_slower
    assert refused["plan"] in told and f"{-refused['headroom_bytes'] / 2**30:.1f} GiB" in told


def test_what_memory_and_head_room_leave_out_is_said(shoal, recipe):
    """Both did not add up to the device: a process takes some of it for itself."""
    done = shoal("plan", recipe, "--cluster", "a100-80gb:1x8", "--global-batch", 64, "--top", 1)
    assert done.returncode == 0, done.stderr
    assert "head room are of 78.0 GiB: a process takes 2.0 GiB of a device's 80.0 GiB for itself" in done.stdout


@pytest.mark.soak
def test_images_are_samples_and_a_split_without_gain_is_said(shoal, tmp_path):
    model = "[model]\nname = 'cnn'\n[data]\nsource = 'digits'\n[train]\nsteps = 2\nglobal_batch = 64\n"
    (tmp_path / "images.toml").write_text(model)
    done = shoal("plan", "images.toml", "--cluster", "h100:1x2", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout and "tokens/s" not in done.stdout
    assert "tokens_per_s" in json.loads((tmp_path / "out.json").read_text())["plans"][0], (
        "programs find it where it was"
    )
    assert "a split of each layer's own" in done.stdout
    done = shoal("simulate", "images.toml", "--cluster", "h100:1x2", "--plan", "dp=2")
    assert done.returncode == 0 and "samples/s" in done.stdout and "tokens/s" not in done.stdout, done.stderr


def test_the_recipes_precision_is_ranked_and_a_faster_one_is_said_to_change_numerics(shoal, tmp_path):
    (tmp_path / "own.toml").write_text(TINY)
    done = shoal(
        "plan", "own.toml", "--cluster", "h100:8", "--top", 2, "--set", "model.hidden=2048", "--set", "data.sequence=1024",
        "--global-batch", 64, "--json", "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert [plan["precision"] for plan in found["plans"]] == ["float32"] * 2 and found["runnable"] is None
    assert not any(plan["changes_numerics"] for plan in found["plans"])
    (faster,) = found["faster_precisions"]
    assert faster["precision"] == "bfloat16" and faster["changes_numerics"] and faster["executable"]
    command = f"shoal train own.toml --plan '{faster['plan']}' --set model.hidden=2048 --set data.sequence=1024"
    assert faster["command"] == f"{command} --set train.global_batch=64 --set train.precision=bfloat16"
    assert "precision" in done.stdout and f"run 3 with: {faster['command']}" in done.stdout
    assert "bfloat16 (3) is not the recipe's float32: numerics change" in done.stdout


def test_what_shoal_does_not_execute_has_a_star(shoal, recipe, tmp_path):
    done = shoal(
        "plan", recipe, "--cluster", "h100:4x8", "--global-batch", 64, "--top", 1, "--precision", "bfloat16,float8",
        "--set", "planner.software=megatron-core", "--set", "planner.shape.experts=16", "--json", "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    (first,), runs = found["plans"], found["runnable"]
    assert first["precision"] == "float8" and first["executable"] is False and first["command"] is None
    assert "float8" in first["not_executed"] and runs["executable"] is True and runs["precision"] == "bfloat16"
    assert "1*" in done.stdout and "* is priced and not executed by Shoal yet (" in done.stdout
    assert "the fastest of these that runs is 2" in done.stdout


def test_memory_is_told_for_every_place_of_the_pipeline(shoal, recipe, tmp_path):
    """Before, only the fullest rank's memory was printed and written."""
    options = ("--global-batch", 16, "--why-not", "pp=4", "--set", "train.precision=bfloat16", "--json", "out.json")
    done = shoal("plan", recipe, "--cluster", "a100-80gb:1x4", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    asked = found["asked"]
    held = [place["allocated"] for place in asked["memory_by_place"]]
    assert len(held) == 4 and max(held) == asked["memory"]["allocated"] > min(held)
    assert all(len(plan["memory_by_place"]) == (4 if "pp=4" in plan["plan"] else 2 if "pp=2" in plan["plan"] else 1)
               for plan in found["plans"])  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "h100:8", "--precision", "bf16"], "there is no precision 'bf16'"),
        (["--cluster", "a10:8"], "there is no device 'a10'; did you mean 'a100', 'v100' or 'h100'?"),
        (["--cluster", "v100-16gb:1"], "it fits on"),
    ],
)
def test_bad_input_gets_one_message(shoal, recipe, tmp_path, arguments, message):
    done = shoal("plan", recipe, *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and sorted(path.name for path in tmp_path.iterdir()) == ["plan.toml"]


def test_the_section_is_in_the_help_and_in_the_schema(shoal):
    text = shoal("train", "--help-recipe").stdout
    assert "[planner]" in text and "software" in text and "[planner.shape]" in text and "[planner.devices.NAME]" in text
    assert "peak_tflops = (required)    # table of float: " in text and "Config" not in text
    schema = json.loads(shoal("train", "--schema").stdout)
    assert "planner" in schema["properties"]
    assert {"layers", "hidden", "heads", "vocab", "sequence"} <= set(schema["$defs"]["ShapeConfig"]["required"])
    assert "memory_gib" in schema["$defs"]["DeviceConfig"]["properties"]
    for name in ("head_size", "shared_ffn", "dense_layers", "query_rank", "kv_rank"):
        assert schema["$defs"]["ShapeConfig"]["properties"][name]["description"] and f"\n# {name} = " in text


def test_a_measured_machine_is_a_cluster_of_plan_and_simulate(shoal, tmp_path):
    """Before, what `shoal calibrate` wrote was for `train --plan auto` alone."""
    (tmp_path / "own.toml").write_text(TINY)
    write_machine(tmp_path / "machine.json", measured())
    done = shoal("plan", "own.toml", "--cluster", "machine.json", "--global-batch", 16, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert (
        found["devices"] == 2
        and found["cluster"] == "machine.json"
        and "what was measured (shoal calibrate" in done.stdout
    )
    played = shoal(
        "simulate", "own.toml", "--cluster", "./machine.json:2x2@ethernet-1g", "--plan", "pp=2", "--global-batch", 16
    )
    assert played.returncode == 0 and "4 x " in played.stdout, played.stderr
    (tmp_path / "other.json").write_text("{}")
    for verb in ("plan", "simulate"):
        refused = shoal(verb, "own.toml", "--cluster", "other.json")
        assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1
        assert "other.json is no machine file" in refused.stderr and "make one with `shoal calibrate`" in refused.stderr


@pytest.mark.soak
def test_the_simplest_of_those_as_good_comes_first_however_many_are_asked_for(shoal, tmp_path):
    """With --top 1 came ``dp=16 zero=2``, and the plain plan, 0.1% slower, was not even looked at."""
    (tmp_path / "own.toml").write_text(TINY)
    sizes = ("--set", "model.layers=4", "--set", "model.hidden=128", "--set", "data.sequence=128")
    for top in (1, 8):
        done = shoal(
            "plan",
            "own.toml",
            "--cluster",
            "h100:2x8",
            "--global-batch",
            32,
            "--top",
            top,
            *sizes,
            "--json",
            "out.json",
        )
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "out.json").read_text())["plans"][0]["plan"] == "dp=16"


def test_other_ways_to_agree_stand_apart_and_are_run_where_they_are_asked_for(shoal, tmp_path):
    (tmp_path / "own.toml").write_text(TINY)
    options = ("--cluster", "x86-server:2x1@ethernet-100m", "--set", "model.hidden=128", "--top", 3)
    done = shoal("plan", "own.toml", *options)
    assert done.returncode == 0, done.stderr
    ranking, _, block = done.stdout.partition("other ways to agree, which do not equal one process")
    assert "sync=" not in ranking and "compress=" not in ranking and "~1 " in block and "~1 " not in ranking
    assert "run ~" not in block and "--allow lossy ranks all of them" in block
    done = shoal(
        "plan", "own.toml", *options, "--allow", "lossy", "--why-not", "dp=2 compress=int8", "--json", "out.json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    first = found["other_ways"][0]
    assert f"run ~1 with: {first['command']}" in done.stdout and "run 1 with: " in done.stdout
    assert first["equals_one_process"] is False and first["is_worth"] and first["dense_seconds"] > first["seconds"]
    assert found["asked"]["plan"] == "dp=2 compress=int8" and found["asked"]["agreed_bytes_per_step"] > 0
    assert "dp=2 compress=int8 does not equal one process" in done.stdout
