"""Completion for bash, zsh and fish: installed where each shell looks, and answered before the user notices."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

from shoal.cli.startup import only_when_done
from shoal.core.errors import RunError

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
    "doctor",
)
ANSWER_SECONDS = 0.2

QUESTIONS = {
    "bash": {"COMP_WORDS": "shoal ", "COMP_CWORD": "1"},
    "zsh": {"_TYPER_COMPLETE_ARGS": "shoal "},
    "fish": {"_TYPER_COMPLETE_ARGS": "shoal ", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}
INSTALLED = {
    "bash": ".bash_completions/shoal.sh",
    "zsh": ".zfunc/_shoal",
    "fish": ".config/fish/completions/shoal.fish",
}


@pytest.mark.parametrize("shell", QUESTIONS)
def test_a_tab_is_answered_with_the_verbs_at_once(installed_shoal, shell):
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = installed_shoal(_SHOAL_COMPLETE=f"complete_{shell}", **QUESTIONS[shell])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Time on the processor: one thread that waits for nothing, however busy the machine is with other things.
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert done.returncode == 0 and done.stderr == ""
        assert all(verb in done.stdout for verb in VERBS)
    assert min(seconds) < ANSWER_SECONDS, seconds


def test_options_of_a_verb_are_completed(installed_shoal):
    done = installed_shoal(_SHOAL_COMPLETE="complete_bash", COMP_WORDS="shoal doctor --", COMP_CWORD="2")
    hosts = {"--hosts", "--hostfile", "--ssh", "--python", "--network"}
    assert {"--fix", "--quick", "--json", "--help"} | hosts == set(done.stdout.split())


def test_the_start_of_a_verb_is_completed(installed_shoal):
    done = installed_shoal(_SHOAL_COMPLETE="complete_bash", COMP_WORDS="shoal do", COMP_CWORD="1")
    assert done.stdout.split() == ["doctor"]


@pytest.mark.parametrize("shell", INSTALLED)
def test_completion_installs_where_the_shell_looks(shell, tmp_path):
    # typer asks which shell it was started from; bash under another name answers for the shells that are not on every machine.
    program = Path(sys.executable).parent / "shoal"
    script = f'exec -a {shell} bash -c "{program} --install-completion; exit \\$?"'
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "_SHOAL_COMPLETE=complete_" + shell in (tmp_path / INSTALLED[shell]).read_text()


def test_bash_itself_completes_with_the_script(tmp_path):
    program = Path(sys.executable).parent
    script = (
        f"PATH={program}:$PATH; source <(shoal --show-completion); "
        "COMP_WORDS=(shoal sa) COMP_CWORD=1; _shoal_completion shoal; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.split() == ["sample"], done.stderr


def leave() -> None:
    sys.exit(0)


def leave_in(module: str) -> None:
    FunctionType(leave.__code__, {"__name__": module, "sys": sys})()


def test_what_the_command_runs_cannot_end_it_with_success() -> None:
    before = os._exit
    with (
        pytest.raises(RunError, match=r"test_startup\.py:\d+ called sys\.exit\(0\) before the command was done"),
        only_when_done(),
    ):
        leave_in("mine.model")
    assert os._exit is before


@pytest.mark.parametrize("module", ["shoal.cli.verify", "typer.core", "click.core"])
def test_the_command_line_ends_as_it_likes(module: str) -> None:
    with pytest.raises(SystemExit), only_when_done():
        leave_in(module)


def test_a_fork_ends_as_it_likes() -> None:
    with only_when_done():
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
