"""Nothing in the source runs code that it reads: no pickle in any of its forms, no ``eval``, no shell, no object collectives."""

import ast
from collections.abc import Iterator

import pytest

PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
FORBIDDEN_CALLS = {"os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> object:
    return next((getattr(entry.value, "value", "not a constant") for entry in call.keywords if entry.arg == name), None)


def call_problems(call: ast.Call) -> Iterator[str]:
    name = dotted(call.func)
    last = name.rpartition(".")[2]
    if name in ("eval", "exec", "compile", "builtins.eval", "builtins.exec") or name in FORBIDDEN_CALLS:
        yield f"calls {name}"
    if last in OBJECT_COLLECTIVES or name.startswith("torch.distributed.rpc"):
        yield f"calls {name}, which unpickles what it receives"
    if keyword(call, "shell") not in (None, False):
        yield f"calls {name} through a shell"
    if keyword(call, "allow_pickle") not in (None, False):
        yield f"calls {name} with allow_pickle"
    if name in ("torch.load", "torch.serialization.load") and keyword(call, "weights_only") is not True:
        yield "calls torch.load without weights_only=True"


def trust_problems(module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [f"imports {alias.name}" for alias in node.names if alias.name.split(".")[0] in PICKLERS]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            top = (node.module or "").split(".")[0]
            found = [f"imports {node.module}"] if top in PICKLERS else []
            # `from torch import load` would hide the call from the check below.
            renamed = {(node.module, alias.name) for alias in node.names} & {
                ("torch", "load"),
                ("os", "system"),
                ("yaml", "load"),
            }
            found += [f"imports {source}.{name} by its bare name" for source, name in sorted(renamed)]
        elif isinstance(node, ast.Call):
            found = list(call_problems(node))
        for problem in found:
            yield f"{module.path}:{node.lineno}: {problem}"


def test_the_source_runs_nothing_that_it_reads(modules):
    assert [problem for module in modules for problem in trust_problems(module)] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import os, marshal as m",
        "eval('1')",
        "exec(text)",
        "yaml.load(file)",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=wanted)",
        "os.system('ls')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=trusted)",
        "from torch import load",
        "numpy.load(path, allow_pickle=True)",
        "dist.broadcast_object_list(values)",
    ],
)
def test_a_trusting_line_is_refused(plant, text):
    assert len(list(trust_problems(plant("shoal.core.x", text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "torch.compile(model)",
        "re.compile('a')",
        "subprocess.run(['ls'], shell=False)",
        "numpy.load(path, allow_pickle=False)",
    ],
)
def test_a_harmless_line_is_not(plant, text):
    assert list(trust_problems(plant("shoal.core.x", text))) == []
