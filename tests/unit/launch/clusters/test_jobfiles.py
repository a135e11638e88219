"""Job files, by reading them as their programs do: a shell, SLURM's directives, and Kubernetes by its own schema."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from shoal.launch.clusters.job import Job, read_slots
from shoal.launch.clusters.jobfiles import (
    PodOptions,
    SlurmOptions,
    kubernetes_manifest,
    mpi_script,
    ray_script,
    slurm_script,
)
from shoal.launch.clusters.slurm import srun_command
from shoal.launch.clusters.yamltext import write_yaml
from shoal.launch.environments import read_place

PLAN = "dp=2 tp=2"
JOB = Job(
    name="tiny",
    arguments=("train", "/r/my recipe.toml", "--plan", PLAN, "--run-dir", "/runs/tiny"),
    nodes=2,
    per_node=2,
    folder=Path("/work dir"),
    environment={"PYTHONPATH": "/a b:/c"},
)
COMMAND = [sys.executable, "-m", "shoal", *JOB.arguments]
SCHEMA = json.loads((Path(__file__).parent / "kubernetes-1.37.json").read_text())


def _words(script: str, start: str) -> list[str]:
    """The words of the line that begins so, as a shell takes it apart."""
    (line,) = [line for line in script.splitlines() if line.startswith(start)]
    return shlex.split(line)


def _is_a_script(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_batch_script_asks_for_its_tasks_and_runs_the_command_in_each():
    options = SlurmOptions(time="1:00:00", partition="gpu", account="us", signal_seconds=90)
    text = slurm_script(JOB, options)
    _is_a_script(text)
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if line.startswith("#SBATCH")
    )
    assert asked == {
        "job-name": "tiny",
        "nodes": "2",
        "ntasks": "4",
        "ntasks-per-node": "2",
        "chdir": "/work dir",
        "time": "1:00:00",
        "partition": "gpu",
        "account": "us",
        "signal": "TERM@90",
        "no-requeue": "",
    }
    assert _words(text, "exec srun") == ["exec", "srun", "--kill-on-bad-exit=1", *COMMAND]
    assert _words(text, "export") == ["export", "PYTHONPATH=/a b:/c"]


def test_a_job_that_may_start_again_is_requeued_when_it_was_asked_to_stop(tmp_path):
    """Run for real, with programs of those names that only say what they were called with."""
    text = slurm_script(JOB, SlurmOptions(requeue=True))
    assert "#SBATCH --requeue" in text
    said = tmp_path / "said"
    for code, requeues in ((143, True), (1, False), (0, False)):
        said.unlink(missing_ok=True)
        for name, ends in (("srun", code), ("scontrol", 0)):
            program = tmp_path / name
            program.write_text(f'#!/bin/sh\necho "{name} $1 $2" >>{said}\nexit {ends}\n')
            program.chmod(0o755)
        ended = subprocess.run(
            ["bash"], input=text, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17"}
        )
        assert ended.returncode == code
        assert ("scontrol requeue 17" in said.read_text()) is requeues


def test_a_run_that_survives_deaths_is_not_ended_by_one():
    job = Job(name="ps", arguments=("train", "r"), nodes=1, per_node=3, folder=Path("/"), survives_deaths=True)
    assert "--kill-on-bad-exit=0" in srun_command(job) and "--kill-on-bad-exit=0" in slurm_script(job)


def test_mpirun_is_told_where_the_first_rank_is():
    text = mpi_script(JOB, "openmpi", slots=read_slots("a,b", per_node=2), is_root=False)
    _is_a_script(text)
    words = _words(text, "exec mpirun")
    assert words[words.index("--host") + 1] == "a:2,b:2" and words[words.index("-np") + 1] == "4"
    assert "MASTER_ADDR=a" in words and "PYTHONPATH=/a b:/c" in words and "--allow-run-as-root" not in words
    assert words[-len(COMMAND) :] == COMMAND
    words = _words(mpi_script(JOB, "mpich", slots=read_slots("a,b", per_node=2)), "exec mpirun")
    at = words.index("MASTER_ADDR")
    assert words[at - 1 : at + 2] == ["-genv", "MASTER_ADDR", "a"]


def test_a_job_of_ray_starts_the_run_by_ray_with_the_nodes_that_were_asked_for():
    text = ray_script(JOB, address="http://head:8265")
    _is_a_script(text)
    words = _words(text, "exec ray")
    assert words[:6] == ["exec", "ray", "job", "submit", "--address", "http://head:8265"]
    assert words[6:9] == ["--", "sh", "-c"]
    (entry,) = words[9:]
    folder, _, command = entry.partition(" && ")
    assert shlex.split(folder) == ["cd", "/work dir"]
    placed = ["--on", "ray", "--nodes", "2", "--per-node", "2"]
    assert shlex.split(command) == ["exec", "env", "PYTHONPATH=/a b:/c", *COMMAND, *placed]


def _documents(text: str) -> dict[str, dict]:
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def _validate(document: dict) -> None:
    schema = {"$ref": f"#/$defs/{SCHEMA['roots'][document['kind']]}", "$defs": SCHEMA["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(document)


RECIPE = 'plan = "dp=1"\n[model]\n  name = "gpt"   # a comment: with a colon\n\n[data]\nsource = "stdlib"\n'


@pytest.mark.parametrize(
    "options",
    [PodOptions(image="registry:5000/shoal:1"), PodOptions(image="i", namespace="n", claim="c", gpus=8)],
    ids=["least", "most"],
)
def test_a_manifest_is_what_the_schema_of_kubernetes_allows(options):
    found = _documents(kubernetes_manifest(JOB, options, recipe_text=RECIPE, arguments=["--plan", PLAN]))
    assert list(found) == ["ConfigMap", "Service", "Job"]
    for document in found.values():
        _validate(document)
    assert found["ConfigMap"]["data"]["recipe.toml"] == RECIPE
    spec = found["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    # A misspelt key is seen: the check can fail.
    spec["completionmode"] = spec.pop("completionMode")
    with pytest.raises(jsonschema.ValidationError, match="completionmode"):
        _validate(found["Job"])


def test_pods_find_the_first_one_and_every_rank_its_number():
    found = _documents(kubernetes_manifest(JOB, PodOptions(image="i"), recipe_text=RECIPE, arguments=["--plan", PLAN]))
    template = found["Job"]["spec"]["template"]
    pod = template["spec"]
    assert found["Service"]["spec"]["selector"] == template["metadata"]["labels"]
    assert pod["subdomain"] == found["Service"]["metadata"]["name"]
    (container,) = pod["containers"]
    given = {one["name"]: one["value"] for one in container["env"]}
    # A pod of an indexed job has the job's name and its index as its host's.
    assert given["MASTER_ADDR"] == f"{found['Job']['metadata']['name']}-0.{pod['subdomain']}"
    assert container["command"][-2:] == ["--per-node", "2"] and container["command"][3:5] == ["--plan", PLAN]
    places = [
        read_place({**given, "JOB_COMPLETION_INDEX": str(index), "LOCAL_RANK": str(local)})
        for index in range(2)
        for local in range(2)
    ]
    assert [(one.rank, one.world_size, one.local_rank, one.local_size) for one in places] == [
        (0, 4, 0, 2),
        (1, 4, 1, 2),
        (2, 4, 0, 2),
        (3, 4, 1, 2),
    ]
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in pod["volumes"]}


@pytest.mark.parametrize(
    "value",
    [
        {"a": "", "b": "yes", "c": "3", "d": "1e3", "e": "- x", "f": "#", "g": "a: b", "h": " x ", "i": "\t\n\x1b"},
        {
            "text": "one\ntwo\n",
            "open": "one\ntwo",
            "lead": "  in\nout\n",
            "more": "x\n\n\n",
            "blank": "\n",
            "crlf": "a\r\nb\n",
        },
        {"list": [[1, [2, 3]], {"a": [], "b": {}}, True, None, 1.5, "ü ☃"], "null": None, "~": "~"},
        [{"a": {"b": "x\ny\n"}}, ["p\nq\n"]],
    ],
)
def test_what_is_written_as_yaml_is_read_back(value):
    assert yaml.safe_load(write_yaml(value)) == value
