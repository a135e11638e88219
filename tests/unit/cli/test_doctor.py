"""``shoal doctor`` with real leftovers: what was killed half way is found, said, and removed with ``--fix`` only."""

import json
import os
import subprocess

import pytest

from shoal.checkpoint.commit import begin


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "runs" / "killed"
    (run / "checkpoints").mkdir(parents=True)
    dead = subprocess.Popen(["true"])
    dead.wait()
    (run / "run.lock").write_text(f"{dead.pid}\n")
    return run


def leftovers(done, tmp_path) -> list[dict]:
    """The leftovers below the test's own folder: others on this machine are none of its business."""
    assert done.returncode in (0, 1), done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert done.returncode == (1 if result["wrong"] else 0)
    assert result["ok"] == (result["wrong"] == 0)
    return [check for check in result["checks"] if str(tmp_path) in str(check["values"].get("path"))]


def test_it_reports_and_touches_nothing(shoal, run, tmp_path):
    draft = begin(run / "checkpoints", 20)
    done = shoal("doctor", "--quick", "--json", "out.json")
    found = [check for check in leftovers(done, tmp_path) if check["name"].startswith("leftover")]
    assert found == []
    done = shoal("doctor", "--quick", "--json", "out.json", tmp_path / "runs")
    found = [check for check in leftovers(done, tmp_path) if check["name"].startswith("leftover")]
    assert [(check["name"], check["state"]) for check in found] == [
        ("leftover checkpoint", "wrong"),
        ("leftover lock", "wrong"),
    ]
    assert done.returncode == 1 and draft.folder.name in done.stdout and "--fix" in done.stdout
    assert draft.folder.is_dir() and (run / "run.lock").exists()


def test_fix_removes_them_and_says_so(shoal, run, tmp_path):
    draft = begin(run / "checkpoints", 20)
    done = shoal("doctor", "--quick", "--fix", "--json", "out.json", tmp_path / "runs")
    found = [check for check in leftovers(done, tmp_path) if check["name"].startswith("leftover")]
    assert {check["state"] for check in found} == {"fixed"}
    assert f"removed {draft.folder.name}" in done.stdout
    assert os.listdir(run / "checkpoints") == [] and not (run / "run.lock").exists()
    again = shoal("doctor", "--quick", "--json", "out.json", tmp_path / "runs")
    assert [check for check in leftovers(again, tmp_path) if check["name"].startswith("leftover")] == []


def test_a_checkpoint_that_was_only_set_aside_is_put_back(shoal, run, tmp_path):
    draft = begin(run / "checkpoints", 20)
    # The save died between its two renames: what it moved away is the only checkpoint of that step.
    draft.replaced.mkdir()
    (draft.replaced / "manifest.json").write_text("precious")
    shoal("doctor", "--quick", "--fix", tmp_path / "runs")
    assert (draft.final / "manifest.json").read_text() == "precious"
    assert os.listdir(run / "checkpoints") == [draft.final.name]


def test_the_backends_are_asked_unless_told_otherwise(shoal, tmp_path):
    shoal("doctor", "--json", "out.json")
    checks = {check["name"]: check for check in json.loads((tmp_path / "out.json").read_text())["checks"]}
    assert checks["backends"]["values"]["gloo"] is True


def test_a_folder_that_is_not_there_is_a_wrong_request(shoal):
    done = shoal("doctor", "nowhere")
    assert done.returncode == 2 and done.stderr.startswith("error: there is no folder nowhere")
