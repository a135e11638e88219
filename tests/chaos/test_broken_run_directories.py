"""A run directory that is not what a run left there: one message with its name and the fix, exit code 2 or 1, no traceback."""

import json
import shutil
import stat

import pytest

from shoal.core.errors import RequestError
from shoal.serverrun.notices import count_notices
from shoal.serverrun.server.finalize import read_steps
from shoal.telemetry import summaryfile
from shoal.telemetry.eventlog import decode_events
from shoal.trainer.claim import check_claim, read_plan
from shoal.trainer.config import load_recipe
from support.checkpoint.forged import forge, manifest_tree
from support.processes.command import TINY, Shoal, read_summary, wait_for_step

FEW = ("--set", "train.steps=2", "--set", "checkpoint.every=1", "--set", "eval.samples=4")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that has completed, made once; tests break a copy of it."""
    shoal = Shoal(tmp_path_factory.mktemp("finished"))
    (shoal.folder / "tiny.toml").write_text(TINY)
    shoal.run("train", "tiny.toml", "--run-dir", "run", *FEW)
    return shoal.folder / "run"


@pytest.fixture
def broken(shoal, tiny, finished):
    shutil.copytree(finished, shoal.folder / "run", symlinks=True)
    return shoal.folder / "run"


def resume(shoal, expect, *options):
    ended = shoal.run("train", "tiny.toml", "--run-dir", "run", *FEW, "--resume", *options, expect=expect)
    assert "Traceback" not in ended.stderr
    return ended.stderr


def turn_into_a_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def turn_into_a_file(path):
    shutil.rmtree(path, ignore_errors=True)
    path.write_text("not a folder")


def turn_into_a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("name", "break_it", "words"),
    [
        ("checkpoints", turn_into_a_link, ["checkpoints is a link", "elsewhere"]),
        ("checkpoints", turn_into_a_file, ["checkpoints is not a folder"]),
        ("events", turn_into_a_link, ["events is a link"]),
        ("events", turn_into_a_file, ["events is not a folder"]),
        ("logs", turn_into_a_file, ["logs is not a folder"]),
        ("recipe.toml", turn_into_a_folder, ["recipe.toml is not a file"]),
        ("recipe.toml", turn_into_a_link, ["recipe.toml is a link"]),
        ("recipe.toml", lambda path: path.write_bytes(b"\xff\xfe"), ["run/recipe.toml"]),
        ("recipe.toml", lambda path: path.write_text("plan = [["), ["run/recipe.toml is not valid TOML"]),
        ("recipe.toml", lambda path: path.write_text('plan = "dp=1"\n'), ["run/recipe.toml", "'model' is missing"]),
        ("summary.json", turn_into_a_folder, ["summary.json is not a file"]),
        ("plan.json", turn_into_a_folder, ["plan.json is not a file"]),
    ],
)
def test_what_is_in_the_place_of_a_file_or_folder_is_named(shoal, broken, name, break_it, words):
    break_it(broken / name)
    recipe = load_recipe(shoal.folder / "tiny.toml", [change for change in FEW if change != "--set"])
    with pytest.raises(RequestError) as refusal:
        check_claim(broken, recipe, resume=True)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_summary_that_is_none_is_passed_over_and_written_anew(shoal, broken):
    before = read_summary(broken)
    for text in ('{"status": "comp', "[]", "\x00", '{"status": "completed", "steps": "two"}', "[" * 100_000):
        (broken / "summary.json").write_text(text)
        assert summaryfile.read_summary(broken) is None
    said = resume(shoal, 0)
    assert "warning: run/summary.json is not a summary" in said, said
    after = read_summary(broken)
    assert after["weights_sha256"] == before["weights_sha256"] and after["steps"] == 2


def test_a_plan_that_is_none_is_named_where_it_is_needed(shoal, broken):
    for text in ("[]", "\x00", '{"plan": 5}', "{"):
        (broken / "plan.json").write_text(text)
        with pytest.raises(RequestError, match="does not hold a plan"):
            read_plan(broken)
    said = resume(shoal, 2, "--plan", "auto")
    assert "run/plan.json does not hold a plan" in said and "--plan" in said, said


def test_lines_that_are_no_events_are_passed_over(tmp_path):
    good = {"t": 1.0, "rank": 0, "kind": "step", "step": 1, "loss": "nan", "lr": 0.1, "grad_norm": None}
    good |= {"samples": 1, "tokens": 1, "seconds": 0.5, "data_seconds": 0.0}
    bad = [{**good, "step": "one"}, {**good, "seconds": []}, {**good, "t": None}, {"t": 1.0, "kind": "step"}, [], 5]
    texts = [*map(json.dumps, bad), "[" * 100_000, '{"kind": ', "\x00\xff", json.dumps(good)]
    assert list(decode_events(text.encode("latin-1") for text in texts)) == [good]
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank-000.jsonl").write_text("\n".join(texts), encoding="latin-1")
    assert read_steps(tmp_path) == [] and count_notices(tmp_path)["not_finite"] == 0


def test_counters_of_another_type_are_named(shoal, broken):
    """In a manifest whose sums are right: whoever wrote it meant it."""
    path = broken / "checkpoints" / "step-00000002"
    tree = manifest_tree(path)
    tree["values"]["progress"]["tokens"] = "many"
    forge(path, tree)
    (broken / "summary.json").unlink()
    said = resume(shoal, 1)
    assert "step-00000002" in said and "tokens is 'many'" in said, said


def test_a_run_directory_that_is_removed_while_it_runs_fails_the_run(shoal, tiny):
    # Everything that is written goes through names that are no longer there.
    long = ("--set", "train.steps=100000", "--set", "checkpoint.every=20")
    process = shoal.start("train", tiny, "--run-dir", "run", *long)
    wait_for_step(shoal.folder / "run", 1)
    (shoal.folder / "run").rename(shoal.folder / "gone")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in stderr, stderr
    assert "run was removed while the run was under way" in stderr, stderr
    assert not (shoal.folder / "run" / "checkpoints").exists()


def test_a_resume_of_what_does_not_exist_is_refused_and_offers_what_does(shoal, tiny):
    (shoal.folder / "runs" / "small").mkdir(parents=True)
    (shoal.folder / "runs" / "other").mkdir()
    refused = shoal.run("train", tiny, "--run-dir", "runs/smal", "--resume", expect=2)
    assert "runs/smal does not exist" in refused.stderr and "'runs/small'" in refused.stderr, refused.stderr
    assert "--resume=auto" in refused.stderr
    unnamed = shoal.run("train", tiny, "--resume", expect=2)
    assert "runs/tiny does not exist" in unnamed.stderr
    assert not (shoal.folder / "runs" / "smal").exists() and not (shoal.folder / "runs" / "tiny").exists()
    # Nor is a plan searched for it.
    searched = shoal.run("train", tiny, "--run-dir", "runs/smal", "--plan", "auto", "--resume", *FEW, expect=2)
    assert "runs/smal does not exist" in searched.stderr and "plan auto" not in searched.stderr
    # The value belongs to the option and what follows it is the recipe.
    started = shoal.run("train", "--resume=auto", tiny, "--run-dir", "runs/new", *FEW)
    assert "starting at step 0" in started.stderr
    assert shoal.run("train", "--resume=auto", tiny, "--run-dir", "runs/new", *FEW).returncode == 0
    wrong = shoal.run("train", tiny, "--resume=maybe", expect=2)
    assert "--resume=maybe" in wrong.stderr and "--resume=auto" in wrong.stderr


def rights(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_is_its_owners_alone_unless_the_recipe_says_otherwise(shoal, finished):
    assert rights(finished) == 0o700
    assert {rights(path) & 0o077 for path in finished.rglob("*")} == {0}
    (shoal.folder / "tiny.toml").write_text(TINY)
    (shoal.folder / "mine").mkdir(mode=0o755)
    shoal.run("train", "tiny.toml", "--run-dir", "mine/run", *FEW, "--set", "run.readable_by=group")
    run = shoal.folder / "mine" / "run"
    assert rights(run) == 0o750 and rights(run / "summary.json") == 0o640
    shard = run / "checkpoints" / "step-00000002" / "rank-000.safetensors"
    assert rights(shard) == 0o640 and rights(shard.parent) == 0o750
    # A folder that somebody made keeps its rights; what is written there has those of the recipe.
    shoal.run("ckpt", "export", finished, "--to", "exported")
    assert rights(shoal.folder / "exported") == 0o700
