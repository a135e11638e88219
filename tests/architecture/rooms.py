"""The rooms of the design, their rows, and who imports whom: read by the checks of imports and by the picture of the rooms."""

import ast
from collections.abc import Iterable, Iterator

# The rows of the design, lowest first. A room that is not here has no place yet: give it one before it is built.
ROWS = (
    ("core",),
    ("comm", "schedules", "telemetry"),
    ("data", "models", "randomness", "compression", "optim", "costs"),
    ("parallel", "launch", "elastic", "checkpoint", "sparsity"),
    ("pipeline", "paramserver", "replicas", "planner", "doctor"),
    ("engine",),
    ("trainer", "library"),
    ("serverrun", "controller", "serve"),
    ("dashboard", "verify", "tuning", "testing"),
    ("cli",),
    # `python -m shoal`: a door to the command line, no room of its own.
    ("__main__",),
)
ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}


def imported_names(node: ast.AST, package: str) -> list[str]:
    """The modules that an import statement, or a call of ``import_module`` with a written name, asks for."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
        # From the package or from a room, the names may be modules; from a module they are not.
        return (
            [f"{base}.{alias.name}" for alias in node.names]
            if base.count(".") < 2 and base.startswith("shoal")
            else [base]
        )
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def imports_of_ours(module) -> Iterator[tuple[ast.AST, str]]:
    """Each import of Shoal in a module, with its statement."""
    for node in ast.walk(module.tree):
        for name in imported_names(node, module.package):
            if name == "shoal" or name.startswith("shoal."):
                yield node, name


def room_imports(modules: Iterable) -> dict[str, set[str]]:
    """For each room, the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for module in modules:
        if module.room is None:
            continue
        mine = found.setdefault(module.room, set())
        mine |= {name.split(".")[1] for _, name in imports_of_ours(module) if "." in name} - {module.room}
    return found


def place_in_room(name: str) -> str:
    """A module's place for the order inside its room: its sub-folder, or the module itself where it lies on the top level."""
    return ".".join(name.split(".")[:3])


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """The names along one cycle of a graph, or an empty list."""
    done: set[str] = set()
    for start in sorted(edges):
        path: list[str] = []
        stack: list[tuple[str, Iterator[str]]] = [(start, iter(sorted(edges.get(start, ()))))]
        while stack and start not in done:
            name, rest = stack[-1]
            if not path or path[-1] != name:
                path.append(name)
            following = next(rest, None)
            if following is None:
                done.add(name)
                stack.pop()
                path.pop()
            elif following in path:
                return path[path.index(following) :]
            elif following not in done:
                stack.append((following, iter(sorted(edges.get(following, ())))))
    return []
