"""What importing costs: the command line, recipes and every ``config.py`` stay clear of torch, and help answers at once.

Each case is a process of its own, because what is already imported here would hide the import that is looked for.
"""

import ast
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "pydantic")
HELP_SECONDS = 0.2
HELP_TO_BARE = 2.0
VERBS = (
    "train",
    "verify",
    "eval",
    "sample",
    "schedule",
    "plan",
    "predict",
    "simulate",
    "calibrate",
    "tune",
    "init",
    "ckpt",
    "keys",
    "role",
    "doctor",
    "dash",
    "top",
    "report",
    "runs",
    "export",
)

# Runs one line, then says on stdout's last line which of the heavy packages were loaded on the way.
PROBE = """
import json, sys
try:
    exec(sys.argv.pop(1))
except SystemExit as end:
    assert not end.code, end.code
print()
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


START = "import sys; from shoal.cli.main import main; sys.argv[0] = 'shoal'"


def loaded_by(line: str, *arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, line, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def shoal(*arguments: str) -> set[str]:
    return loaded_by(f"{START}; main()", *arguments)


def test_the_probe_sees_what_is_loaded():
    assert {"json", "numpy"} <= loaded_by("import numpy")


def test_the_package_imports_nothing_heavy():
    assert loaded_by("import shoal").isdisjoint(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_imports_nothing_heavy(arguments):
    assert shoal(*arguments).isdisjoint({*HEAVY, "rich", "psutil"})


def test_the_verbs_of_ckpt_are_as_light():
    assert shoal("ckpt", "show", "--help").isdisjoint({*HEAVY, "rich"})


def test_help_answers_in_time():
    """Against a process that imports typer and nothing else, in turns: a busy machine slows both."""
    commands = {
        "shoal": [str(Path(sys.executable).parent / "shoal"), "--help"],
        "bare": [sys.executable, "-c", "import typer"],
    }
    seconds = {name: [] for name in commands}
    for _ in range(7):
        for name, command in commands.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=30)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds[name].append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    fastest = {name: min(values) for name, values in seconds.items()}
    assert fastest["shoal"] < max(HELP_SECONDS, HELP_TO_BARE * fastest["bare"]), fastest


def test_config_modules_import_no_torch(modules):
    names = [module.name for module in modules if module.path.name == "config.py"]
    assert len(names) > 5
    assert "torch" not in loaded_by("import " + ", ".join(names))


def test_config_modules_do_not_name_torch(modules):
    found = []
    for module in modules:
        if module.path.name == "config.py":
            for node in ast.walk(module.tree):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                found += [f"{module.path}:{node.lineno}" for name in names if name.split(".")[0] == "torch"]
    assert found == []


def test_reading_a_recipe_imports_no_torch(root):
    recipe = root / "recipes" / "tiny.toml"
    line = "import sys; from pathlib import Path; from shoal.trainer.config import load_recipe; load_recipe(Path(sys.argv[1]))"
    assert "torch" not in loaded_by(line, str(recipe))


def test_a_misspelt_recipe_is_refused_without_torch(root, tmp_path):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text((root / "recipes" / "tiny.toml").read_text().replace("global_batch", "globl_batch"))
    line = f"{START}\ntry:\n    main()\nexcept SystemExit as end:\n    assert end.code == 2, end.code"
    assert "torch" not in loaded_by(line, "train", str(wrong))


def test_the_launcher_of_a_run_imports_no_torch():
    """It once did, through the summary: every start then took two seconds longer, and the launcher 300 MB."""
    assert "torch" not in loaded_by("import shoal.trainer.request, shoal.trainer.launch, shoal.launch.ranks")


def test_a_center_and_the_job_that_starts_it_import_no_torch():
    """It once did, through the servers' side of a vote: a center was there after three seconds instead of half of one."""
    assert "torch" not in loaded_by("import shoal.serverrun.center, shoal.serverrun.job.run")
