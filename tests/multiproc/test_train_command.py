"""``shoal train`` from outside: what it leaves behind, what it obeys, and that it equals itself on other numbers of processes."""

import json
import os
import subprocess
import sys
import tomllib

import psutil
import pytest

from shoal.trainer.inspect import sample_run
from support.processes.command import ranks_of, read_events, read_summary, wait_for_step, wait_until

SUMMARY_KEYS = {
    "status", "steps", "first_loss", "final_loss", "validation_loss", "baseline_loss", "tokens_per_s", "wall_s", "world_size",
    "plan", "peak_rss_bytes", "weights_sha256",
}  # fmt: skip


def test_a_run_leaves_what_the_contract_names(shoal, tiny):
    shoal.run(
        "train",
        tiny,
        "--plan",
        "dp=2",
        "--run-dir",
        "run",
        "--json",
        "out.json",
        "--set",
        "telemetry.tensorboard=true",
        real=True,
    )
    run = shoal.folder / "run"
    summary = read_summary(run)
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["status"] == "completed" and summary["steps"] == 8 and summary["world_size"] == 2
    assert summary["plan"] == "dp=2" and len(summary["peak_rss_bytes"]) == 2
    assert summary["final_loss"] < summary["first_loss"]
    assert 1.0 < summary["baseline_loss"] < 4.0
    assert json.loads((shoal.folder / "out.json").read_text()) == summary
    assert json.loads((run / "plan.json").read_text())["dp"] == 2
    resolved = tomllib.loads((run / "recipe.toml").read_text())
    assert resolved["optim"]["betas"] == [0.9, 0.999], "every default is filled in"
    for rank in (0, 1):
        steps = read_events(run, rank, "step")
        assert [event["step"] for event in steps] == list(range(1, 9))
        assert all(event["rank"] == rank and event["t"] > 0 for event in steps)
    assert [a["loss"] for a in read_events(run, 0, "step")] == [b["loss"] for b in read_events(run, 1, "step")]
    memory = read_events(run, 0, "memory")[-1]
    # The weights here include the rotary tables, which have no optimizer state.
    assert memory["optimizer_bytes"] > 1.9 * memory["weights_bytes"] > 0
    assert list((run / "tensorboard").iterdir())
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000006", "step-00000008"]
    assert not (run / "run.lock").exists()


def test_one_process_is_an_interpreter_of_its_own(shoal, tiny):
    """Nothing is forked for a single rank; the commands of other tests always fork."""
    shoal.run("train", tiny, "--nproc", "1", "--run-dir", "run", "--set", "train.steps=2", real=True)
    assert read_summary(shoal.folder / "run")["status"] == "completed"


def test_two_replicas_end_in_the_weights_of_one_process_with_two_microbatches(shoal, tiny):
    # Some 1,100 samples in batches of 500: the last batch of the epoch is short, and both plans must cut it alike.
    short = ("--set", "train.global_batch=500", "--set", "train.steps=4", "--set", "data.limit_bytes=20000")
    shoal.run("train", tiny, "--plan", "dp=2", "--run-dir", "two", *short)
    shoal.run("train", tiny, "--plan", "dp=1 microbatches=2", "--run-dir", "one", *short)
    sizes = [event["samples"] for event in read_events(shoal.folder / "two", 0, "step")]
    assert min(sizes) < 500
    two, one = (read_summary(shoal.folder / name) for name in ("two", "one"))
    assert two["weights_sha256"] == one["weights_sha256"]


def test_the_same_command_runs_under_torchrun(shoal, tiny):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "shoal", "train", str(tiny), "--run-dir", "run"]
    done = subprocess.run(command, cwd=shoal.folder, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    shoal.run("train", tiny, "--plan", "dp=2", "--run-dir", "ours")
    theirs, ours = read_summary(shoal.folder / "run"), read_summary(shoal.folder / "ours")
    assert theirs["weights_sha256"] == ours["weights_sha256"]
    assert theirs["world_size"] == 2


@pytest.mark.soak
def test_a_wrong_request_under_torchrun_ends_on_every_rank(shoal, tiny):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "shoal", "train", str(tiny), "--set", "train.global_batch=7"]
    done = subprocess.run(command, cwd=shoal.folder, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode != 0
    assert done.stderr.count("7 is not divisible by dp 2") == 1, "told once, and not by every rank"
    assert "exitcode  : 2" in done.stderr


def test_everything_listens_on_loopback_only(shoal, tiny):
    process = shoal.start("train", tiny, "--plan", "dp=2", "--run-dir", "run", "--set", "train.steps=100000")
    wait_for_step(shoal.folder / "run", 3)
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    listening = [c for one in everyone for c in one.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
    assert listening, "the ranks listen for each other, so an empty list means that this test looks in the wrong place"
    assert {connection.laddr.ip for connection in listening} <= {"127.0.0.1", "::1"}
    connected = [c for one in everyone for c in one.net_connections(kind="inet") if c.status == psutil.CONN_ESTABLISHED]
    assert {connection.raddr.ip for connection in connected} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_help_never_imports_torch_and_a_dry_run_starts_nothing(shoal, tiny):
    done = shoal.run("train", tiny, "--plan", "dp=2", "--dry-run", "--json", "dry.json")
    result = json.loads((shoal.folder / "dry.json").read_text())
    assert result["plan"] == "dp=2" and result["world_size"] == 2
    assert result["shapes"]["embedding.weight"] == [256, 32]
    assert result["bytes_per_rank"]["optimizer"] >= 2 * result["bytes_per_rank"]["weights"]
    assert "nothing was started" in done.stdout
    assert not (shoal.folder / "runs").exists()


def test_the_time_limit_stops_in_an_orderly_way_and_resume_goes_on(shoal, tiny):
    shoal.run("train", tiny, "--run-dir", "run", "--set", "train.steps=100000", "--set", "train.time_limit=1s")
    summary = read_summary(shoal.folder / "run")
    assert summary["status"] == "interrupted" and summary["stopped_by"] == "time_limit" and summary["steps"] > 0
    steps = summary["steps"] + 2
    shoal.run("train", tiny, "--run-dir", "run", "--resume", "--set", f"train.steps={steps}")
    assert read_summary(shoal.folder / "run")["steps"] == steps


def test_resuming_a_completed_run_changes_nothing(shoal, tiny):
    shoal.run("train", tiny, "--run-dir", "run")
    before = {path: path.stat().st_mtime_ns for path in (shoal.folder / "run").rglob("*") if path.is_file()}
    done = shoal.run("train", tiny, "--run-dir", "run", "--resume")
    after = {path: path.stat().st_mtime_ns for path in (shoal.folder / "run").rglob("*") if path.is_file()}
    assert before == after
    assert "nothing to do" in done.stderr


def test_two_commands_cannot_use_one_run_directory_at_once(shoal, tiny):
    first = shoal.start("train", tiny, "--run-dir", "run", "--set", "train.steps=100000")
    wait_for_step(shoal.folder / "run", 2)
    done = shoal.run("train", tiny, "--run-dir", "run", "--resume", "--set", "train.steps=100000", expect=2)
    assert f"in use by process {first.pid}" in done.stderr


def test_a_trace_of_chosen_steps_opens_as_chrome_json(shoal, tiny):
    shoal.run("train", tiny, "--run-dir", "run", "--profile", "3:5")
    trace = json.loads((shoal.folder / "run" / "traces" / "rank-000.json").read_text())
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert any("aten::" in name for name in names)


def test_eval_and_sample_answer_for_a_finished_run(shoal, tiny):
    shoal.run("train", tiny, "--run-dir", "run", "--set", "eval.samples=0")
    shoal.run("eval", "run", "--split", "validation", "--json", "eval.json")
    found = json.loads((shoal.folder / "eval.json").read_text())
    assert found["loss"] == pytest.approx(read_summary(shoal.folder / "run")["validation_loss"], rel=1e-6)
    summary = read_summary(shoal.folder / "run")
    assert found["accuracy"] == pytest.approx(summary["validation_accuracy"]) and 0.0 < found["accuracy"] < 1.0
    assert found["samples"] == found["split_samples"] > 5
    assert summary["tokens_per_s"] == pytest.approx(16 * summary["samples_per_s"])
    said = shoal.run("sample", "run", "--prompt", "def ", "--tokens", "20").stdout
    options = {"prompt": "def ", "num_tokens": 20, "temperature": 0.8, "top_k": 40}
    again, other = (sample_run(shoal.folder / "run", seed=seed, **options)["text"] for seed in (1, 2))
    assert said == again + "\n" and other != again and again.startswith("def ")


def test_rank_output_reaches_the_user_with_its_rank(shoal, tiny):
    (shoal.folder / "mine.py").write_text(
        "import torch\n"
        "def build(spec):\n"
        "    print('hello from build')\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    (shoal.folder / "own.toml").write_text(
        'plan = "dp=2"\n[model]\nbuild = "mine:build"\n[data]\nsource = "synthetic"\nkind = "classes"\nsamples = 64\n'
        "features = [64]\nclasses = 10\n[train]\nsteps = 2\nglobal_batch = 8\n"
    )
    done = shoal.run("train", "own.toml", "--run-dir", "run")
    assert "[rank 1] hello from build" in done.stderr
    assert "hello from build" in (shoal.folder / "run" / "logs" / "rank-000.log").read_text()


def test_loader_processes_die_with_their_rank(shoal, tiny):
    extra = ("--set", "train.steps=100000", "--set", "data.workers=1")
    process = shoal.start("train", tiny, "--plan", "dp=1", "--run-dir", "run", *extra)
    wait_for_step(shoal.folder / "run", 2)
    rank = ranks_of(process)[0]
    loaders = wait_until(lambda: rank.children(recursive=True), "loader processes")
    os.kill(rank.pid, 9)
    process.wait(timeout=30)
    gone, alive = psutil.wait_procs(loaders, timeout=10)
    assert not alive and gone
