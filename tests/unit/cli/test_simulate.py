"""``shoal simulate`` as a command: what it prints and writes, and one message for what cannot be."""

import json
import resource
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from shoal.core.rundir import RunDir
from shoal.tuning.simulation import simulate as play

pytestmark = pytest.mark.timeout(240)
RECIPES = Path(__file__).resolve().parents[3] / "recipes"


def simulate(shoal, tiny, *arguments, **options):
    return shoal("simulate", tiny, *arguments, **options)


def test_a_step_as_lines_json_picture_trace_and_run(shoal, tiny, tmp_path):
    done = simulate(
        shoal, tiny, "--plan", "tp=2 pp=2", "--cluster", "h100:2x8", "--global-batch", 16, "--straggler", "3:1.5",
        "--json", "out.json", "--svg", "out.svg", "--trace", "out.trace", "--run-dir", "run", "--steps", 3,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["plan"] == "dp=4 tp=2 pp=2 schedule=1f1b microbatches=4" and found["world_size"] == 16
    assert sum(found["breakdown"].values()) == pytest.approx(found["step_seconds"], rel=1e-6)
    assert found["tokens_per_second"] == pytest.approx(16 * 16 / found["step_seconds"])
    assert [group["replicas"] for group in found["replicas"]] == [3, 1] and 0 < found["bubble"] < 1
    assert [place["num_ranks"] for place in found["places"]] == [8, 8]
    for place in found["places"]:
        memory = place["memory"]
        parts = sum(memory[name] for name in ("weights", "gradients", "optimizer", "other", "activations"))
        assert memory["peak"] == pytest.approx(parts) and memory["weights"] > 0 and memory["activations"] > 0
    assert found["goodput"] is None and found["wide_area"] is None and found["fits"] is True
    for word in ("step", "pipeline", "time goes to", "communication", "tokens/s"):
        assert word in done.stdout
    assert done.stdout.splitlines()[-1].split(maxsplit=1) == ["wrote", "out.svg, out.trace, run"]
    assert xml.fromstring((tmp_path / "out.svg").read_text()).tag.endswith("svg")
    assert json.loads((tmp_path / "out.trace").read_text())["traceEvents"]
    run = RunDir(tmp_path / "run")
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    assert [event["kind"] for event in events] == [
        "run_started",
        "forecast",
        "step",
        "memory",
        "step",
        "spans",
        "step",
        "memory",
        "run_ended",
    ]
    assert events[2]["seconds"] == pytest.approx(found["step_seconds"])
    assert run.recipe.exists() and json.loads(run.summary.read_text())["simulated"] is True


def test_a_simulated_run_reads_memory_when_a_real_one_does(shoal, tiny, tmp_path):
    """After the first step, every so many steps and at the end, when a step that was read may be read again."""
    length = ("--set", "train.steps=2", "--set", "telemetry.memory_every=2", "--run-dir")
    real = shoal("train", tiny, "--nproc", 1, *length, "real")
    simulated = simulate(shoal, tiny, "--cluster", "h100:1", "--steps", 2, *length, "simulated")
    assert real.returncode == simulated.returncode == 0, real.stderr + simulated.stderr
    found = []
    for name in ("real", "simulated"):
        events = map(json.loads, RunDir(tmp_path / name).events(0).read_text().splitlines())
        # Nothing is trained, so nothing is saved or evaluated.
        shared = ("run_started", "step", "memory", "run_ended")
        found.append([(event["kind"], event["step"]) for event in events if event["kind"] in shared])
    assert found[0] == found[1] and [step for kind, step in found[0] if kind == "memory"] == [1, 2, 2]


def test_ten_thousand_devices_with_jitter_and_failures(shoal, tiny):
    done = simulate(
        shoal, tiny, "--plan", "tp=2 pp=2", "--cluster", "h100:1250x8", "--devices", 10_000, "--global-batch", 20_000,
        "--jitter", 0.05, "--link-jitter", 0.1, "--steps", 20, "--mtbf", 50_000, "--checkpoint", 30, "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (
        found["devices"] == 10_000 and found["steps"]["count"] == 20 and found["steps"]["max"] > found["steps"]["p50"]
    )
    goodput = found["goodput"]
    assert goodput["mtbf_seconds"] == pytest.approx(5 * 3600)
    assert goodput["interval_seconds"] == pytest.approx(goodput["young_interval_seconds"], rel=0.05)
    assert 0.8 < goodput["expected_goodput"] < 1 and goodput["failures"] > 50
    parts = ("useful_seconds", "lost_seconds", "restart_seconds", "checkpoint_seconds")
    assert sum(goodput[part] for part in parts) == pytest.approx(goodput["wall_seconds"])
    assert "goodput" in done.stderr


@pytest.mark.parametrize(
    ("recipe", "plan", "batch"),
    [("gpt", "tp=2 pp=2", 10_000), ("tiny", "pp=4 schedule=zb-h1", 20_000), ("tiny", "dp=10000", 10_000)],
)
def test_ten_thousand_devices_without_a_batch(shoal, tmp_path, recipe, plan, batch):
    done = shoal(
        "simulate", RECIPES / f"{recipe}.toml", "--plan", plan, "--cluster", "h100:2x8", "--devices", 10_000,
        "--json", "out.json", "--run-dir", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["devices"] == 10_000 and found["global_batch"] == batch
    (said,) = found["remarks"]
    assert said.endswith(f"{batch} is simulated; --global-batch says another")
    assert done.stderr == f"note: {said}\n" and said not in done.stdout
    assert f"global_batch = {batch}" in (tmp_path / "run" / "recipe.toml").read_text()


def test_ten_thousand_devices_as_a_picture_and_a_trace(shoal, tiny, tmp_path):
    """With jitter no two replicas are alike: both files have 64 lanes, the slowest replica's first, and that is said."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = simulate(
        shoal, tiny, "--plan", "tp=2 pp=2", "--cluster", "h100:1250x8", "--devices", 10_000, "--global-batch", 20_000,
        "--jitter", 0.05, "--steps", 20, "--svg", "out.svg", "--trace", "out.trace", "--json", "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start < 30
    events = json.loads((tmp_path / "out.trace").read_text())["traceEvents"]
    assert len({event["pid"] for event in events}) == 64
    assert xml.fromstring((tmp_path / "out.svg").read_text()).tag.endswith("svg")
    (warning,) = json.loads((tmp_path / "out.json").read_text())["remarks"]
    assert warning == "the picture and the trace show 64 of 5000 groups of ranks, the slowest replica's first"
    assert warning in done.stdout


@pytest.mark.soak
def test_every_rank_of_ten_thousand_in_a_trace(shoal, tiny, tmp_path):
    options = ("--cluster", "h100:1250x8", "--devices", 10_000, "--global-batch", 20_000, "--expand")
    done = simulate(shoal, tiny, "--plan", "tp=2 pp=2", *options, "--trace", "out.trace", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    names = (tmp_path / "out.trace").read_text().count('"process_name"')
    assert names == 10_000 and json.loads((tmp_path / "out.json").read_text())["remarks"] == []


def test_a_plan_that_does_not_fit_is_played_and_said_not_to(shoal, tiny):
    done = simulate(
        shoal, tiny, "--plan", "dp=1", "--cluster", "v100-16gb:1", "--set", "model.layers=40", "--set", "model.hidden=2048",
        "--global-batch", 512, "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is False and found["places"][0]["memory"]["peak"] > found["device_memory_bytes"]
    assert "does not fit: place 0 needs" in done.stderr


def test_sites_over_a_slow_link(shoal, tiny, tmp_path):
    done = simulate(
        shoal, tiny, "--plan", "dp=8 tp=2", "--cluster", "a100:2x8", "--local-steps", 50, "--sites", 4,
        "--wan", "1Gbit/s,30ms", "--json", "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    wide = found["wide_area"]
    assert found["plan"] == "dp=8 tp=2" and found["site_plan"] == "dp=2 tp=2" and wide["sites"] == 4
    moved = 1.5 * wide["bytes_per_sync"] / 1.25e8
    assert wide["sync_seconds"] == pytest.approx(6 * 0.03 + moved)
    assert wide["steps_per_second"] == pytest.approx(50 / (50 * found["step_seconds"] + wide["sync_seconds"]))
    assert [pace["period"] for pace in wide["by_period"]] == [1, 10, 50, 100]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "h100:2x8", "--plan", "dp=32"], "needs 32 devices, and the cluster has 16"),
        (
            ["--cluster", "h100:1x8", "--devices", "10000", "--global-batch", "8"],
            "a global batch of 8 cannot be shared out evenly over its 10000 replicas; give --global-batch 10000, or dp=8",
        ),
        (["--cluster", "h100:1x8", "--straggler", "8:2"], "has 8 ranks, 0 to 7; name one of them"),
        (["--cluster", "h100:1x8", "--jitter", "-1"], "jitter is -1, and must be 0 to 100"),
        (["--cluster", "h100:1x8", "--mtbf", "-2"], "--mtbf is -2 hours"),
        (
            ["--cluster", "h100:1x8", "--mtbf", "0"],
            "--mtbf is 0 hours; give hours above 0",
        ),
        (["--cluster", "h100:1x8", "--mtbf", "9", "--restart", "-1"], "--restart is -1 seconds; give 0 or more"),
        (["--cluster", "h100:1x8", "--mtbf", "9", "--interval", "0"], "--interval is '0'; give a number of steps"),
        (["--cluster", "h100:1x8", "--mtbf", "9", "--days", "0"], "--days is 0; give days above 0"),
        (["--cluster", "h100:1x8", "--local-steps", "5", "--wan", "string"], "there is no link 'string'"),
        (["--cluster", "h100:1x8", "--svg", "no/out.svg"], "--svg no/out.svg: there is no folder no"),
    ],
)
def test_what_cannot_be_is_one_message_and_code_2(shoal, tiny, arguments, message):
    done = simulate(shoal, tiny, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and "Traceback" not in done.stderr


def test_islands_and_codecs_are_played(shoal, tiny, tmp_path):
    cluster = "x86-server:2x2@ethernet-100m"
    done = simulate(
        shoal, tiny, "--plan", "islands=2 dp=2 sync=diloco:5", "--cluster", cluster, "--run-dir", "run", "--json", "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    wide, agreed = found["wide_area"], found["agreed"]
    assert (wide["sites"], wide["policy"], wide["period"]) == (2, "diloco:5", 5) and found["site_plan"] == "dp=2"
    assert found["equals_one_process"] is False and "does not equal one process" in done.stdout
    # A round after the last of five steps: the mean and the longest step are made of it.
    alone, takes = wide["island_step_seconds"], wide["sync_seconds"]
    assert found["step_seconds"] == pytest.approx(alone + takes / 5)
    assert found["steps"]["max"] == pytest.approx(wide["longest_seconds"]) == pytest.approx(alone + takes)
    assert agreed["bytes_per_step"] == pytest.approx(wide["bytes_per_sync"] / 5, rel=1e-3) and agreed["state_bytes"] > 0
    events = [json.loads(line) for line in (tmp_path / "run/events/rank-000.jsonl").read_text().splitlines()]
    (held,) = [event for event in events if event["kind"] == "round"]
    assert (held["step"], held["policy"], held["islands"]) == (5, "diloco:5", 2) and held["seconds"] > 0
    assert json.loads((tmp_path / "run/plan.json").read_text())["islands"] == 2
    assert json.loads((tmp_path / "run/summary.json").read_text())["world_size"] == 4
    dense, coded = (
        play(tiny, cluster, plan, overrides=["compression.min_elements=64"]).as_values()
        for plan in ("dp=4", "dp=4 compress=int8")
    )
    assert coded["breakdown"]["codec"] > 0 and coded["wide_area"] is None
    assert coded["exposed"]["dp"] < dense["exposed"]["dp"] and dense["agreed"] is None and dense["equals_one_process"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plan", "islands=2 dp=2 sync=local:5", "--local-steps", "5"], "--local-steps is another way"),
        (["--plan", "islands=3 sync=local:5"], "not a multiple of the 3 that one replica of each island takes"),
        (["--plan", "dp=4 compress=int9"], "did you mean 'int8'"),
    ],
)
def test_islands_that_cannot_be_played_are_refused(shoal, tiny, options, message):
    done = shoal("simulate", tiny, "--cluster", "x86-server:2x2", *options)
    assert done.returncode == 2 and message in done.stderr
