"""``shoal ckpt``: look at checkpoints, prove that they are whole, compare two, export one.

Each verb takes a run directory or a checkpoint's own folder. Exit 0: whole; 1: something is not whole; 2: the request was
wrong.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.console import JsonFile, check_result_file, print_table, write_result

if TYPE_CHECKING:
    from shoal.checkpoint.diff import TensorDifference
    from shoal.checkpoint.manifest import Manifest

app = typer.Typer(
    help="Show, verify, compare and export checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory or a checkpoint's folder.")]
_FolderOrAddress = Annotated[
    str, typer.Argument(metavar="DIR", help="A run directory, a checkpoint's folder, or an address (s3://...).")
]
_Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run directory of a run whose checkpoint.place is an address.")
]
_First = Annotated[Path, typer.Argument(metavar="FIRST", help="A run directory or a checkpoint's folder.")]
_Second = Annotated[Path, typer.Argument(metavar="SECOND", help="What to compare it with.")]
_Top = Annotated[
    int, typer.Option("--top", metavar="K", min=1, help="How many changed tensors to print; the JSON has all.")
]
_To = Annotated[
    Path | None,
    typer.Option("--to", metavar="DIR", help="The folder to make; by default export-STEP in the run directory."),
]
_Format = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="safetensors|hf|peft|torch-export|onnx|all",
        help="The weights alone; a folder for from_pretrained; the adapters of model.lora; a torch.export program; ONNX; or "
        "weights and program.",
    ),
]
_Weights = Annotated[
    str,
    typer.Option("--weights", metavar="trained|ema", help="As they were trained, or the averages of the callback ema."),
]


@app.command()
def show(folder: _FolderOrAddress, json_file: JsonFile = None) -> None:
    """Show the checkpoints of DIR: step, plan, sizes, tensors. Sizes are checked, bytes are not: see verify."""
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.checkpoint.whole import checkpoints_in

    is_address = "://" in folder
    described = _describe_address(folder) if is_address else [_describe(path) for path in checkpoints_in(Path(folder))]
    for checkpoint in described:
        if len(described) == 1 and checkpoint["whole"]:
            _print_one(checkpoint)
    if len(described) > 1 or not described[0]["whole"]:
        _print_list(described)
    write_result(json_file, {"checkpoints": described})
    if not all(checkpoint["whole"] for checkpoint in described):
        raise typer.Exit(1)


@app.command()
def verify(folder: _Folder, json_file: JsonFile = None) -> None:
    """Read every byte of the checkpoints of DIR and compare it with its sum. Exit 1 if one is not as it was written."""
    check_result_file(json_file)
    from shoal.checkpoint.whole import checkpoints_in
    from shoal.checkpoint.whole import verify as problems_of

    results = []
    for path in checkpoints_in(folder):
        problems = problems_of(path)
        results.append({"path": str(path), "whole": not problems, "problems": problems})
        print(f"{path.name}: {'whole' if not problems else 'not whole'}")
        for problem in problems:
            print(f"  {problem}")
    write_result(json_file, {"checkpoints": results})
    if not all(result["whole"] for result in results):
        raise typer.Exit(1)


@app.command()
def fetch(run: _Run, json_file: JsonFile = None) -> None:
    """Bring the newest whole checkpoint of RUN from its address into RUN, where eval, sample and export look for it."""
    check_result_file(json_file)
    from shoal.checkpoint.places.address import ObjectStore, check_address, fetch_newest
    from shoal.core.config import read_toml
    from shoal.core.errors import RequestError, RunError
    from shoal.core.rundir import RunDir

    section = read_toml(RunDir(run).recipe).get("checkpoint", {})
    place = section.get("place", "auto") if isinstance(section, dict) else "auto"
    if not isinstance(place, str) or "://" not in place:
        raise RequestError(f"{run}: checkpoint.place is {place!r}, which is no address; there is nothing to fetch")
    check_address(place, 1)
    try:
        path, refused = fetch_newest(ObjectStore(place), RunDir(run).checkpoints)
    except OSError as error:
        raise RunError(f"cannot fetch from {place}: {error}") from error
    for name, reason in refused:
        print(f"{name} is not whole and is passed over: {reason}")
    print(f"fetched {path.name} from {place}: {path}")
    write_result(json_file, {"checkpoint": path, "address": place})


@app.command()
def diff(first: _First, second: _Second, top: _Top = 20, json_file: JsonFile = None) -> None:
    """Say which tensors of two checkpoints differ, and by how much. Exit 0 whether they differ or not."""
    check_result_file(json_file)
    from shoal.checkpoint.whole import locate

    paths = locate(first), locate(second)
    from dataclasses import asdict

    from shoal.checkpoint.diff import compare
    from shoal.checkpoint.reader import read

    difference = compare(read(paths[0]), read(paths[1]))
    print(f"{paths[0].name} and {paths[1].name}: " + ("the same, bit for bit" if difference.is_same else "different"))
    for side, names in (("first", difference.only_in_first), ("second", difference.only_in_second)):
        if names:
            print(f"only in the {side}: {', '.join(names)}")
    if difference.values:
        print(f"values that differ: {', '.join(difference.values)}")
    if difference.timings:
        print(f"timings that differ, which makes no difference: {', '.join(difference.timings)}")
    print(f"tensors: {difference.num_same} the same, {len(difference.changed)} changed")
    changed = sorted(difference.changed, key=_severity, reverse=True)
    if changed:
        rows = [
            (
                tensor.name,
                tensor.first if tensor.what == "values" else f"{tensor.first} -> {tensor.second}",
                f"{tensor.num_different}/{tensor.num_elements}",
                "" if tensor.max_abs is None else f"{tensor.max_abs:.3g}",
                "" if tensor.relative is None else f"{tensor.relative:.3g}",
            )
            for tensor in changed[:top]
        ]
        print_table(("tensor", "type", "elements", "max abs", "relative"), rows)
        if len(changed) > top:
            print(f"and {len(changed) - top} more; see --top and --json")
    write_result(json_file, {"first": paths[0], "second": paths[1], "same": difference.is_same, **asdict(difference)})


@app.command()
def export(
    folder: _Folder,
    to: _To = None,
    format: _Format = "safetensors",
    weights: _Weights = "trained",
    json_file: JsonFile = None,
) -> None:
    """Export the weights of DIR (the newest whole checkpoint of a run) for other programs, and compare with the trained model."""
    from shoal.core.errors import RequestError, did_you_mean

    formats = ("safetensors", "hf", "peft", "torch-export", "onnx", "program", "all")
    if format not in formats:
        raise RequestError(f"there is no format {format!r}; {did_you_mean(format, formats)}")
    if weights not in ("trained", "ema"):
        raise RequestError(f"there are no weights {weights!r}; {did_you_mean(weights, ('trained', 'ema'))}")
    check_result_file(json_file)
    from shoal.checkpoint.whole import locate

    source = locate(folder)
    run_dir = _run_of(source)
    if format != "safetensors" and run_dir is None:
        raise RequestError(
            f"no recipe is beside {source}, which would say how the model of {format} is built: use --format safetensors; a "
            f'script that trains it (shoal.Run) calls run.export(path, format="{format}")'
        )
    root = _root_of(source)
    target = to if to is not None else root / f"export-{source.name}" if root is not None else None
    if target is None:
        raise RequestError(f"{source} is not in a run directory; say where to export with --to DIR")
    from shoal.checkpoint.export.weights import new_folder, read_weights, write_weights

    errors: dict[str, float] = {}
    prepares: Path | None = None
    with new_folder(target, like=source) as draft:
        checkpoint = read_weights(source, averaged=weights == "ema")
        if format in ("safetensors", "all"):
            write_weights(checkpoint, draft, model=_model_section(run_dir))
        if format != "safetensors" and run_dir is not None:
            from shoal.trainer.export import export_model

            wanted = {"all": "torch-export", "program": "torch-export"}.get(format, format)
            errors[wanted] = export_model(run_dir, checkpoint.tensors, draft, format=wanted, origin=str(source))
        if run_dir is not None:
            from shoal.data.fitted import FOLDER
            from shoal.data.rawrows import export_preparation

            prepares = export_preparation(run_dir / FOLDER, draft)
    files = sorted(str(path) for path in target.iterdir())
    kind = "averaged " if weights == "ema" else ""
    print(f"exported step {checkpoint.step}: {len(checkpoint.tensors)} {kind}tensors")
    for file in files:
        print(f"  {file}")
    for wanted, error in errors.items():
        print(f"{wanted} run on the same inputs differs from the trained model by {error:.1e}")
    if prepares is not None:
        print(f"{target / prepares.name} prepares rows as training did: shoal.data.rawrows.load_preparation")
    result = {"checkpoint": source, "step": checkpoint.step, "folder": target, "files": files}
    write_result(json_file, {**result, "errors": errors} if errors else result)


def _severity(tensor: "TensorDifference") -> float:
    """What has no number (another shape, NaN) comes before everything that has one."""
    return float("inf") if tensor.relative is None or tensor.relative != tensor.relative else tensor.relative


def _root_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint is in, be it a recipe's or a script's."""
    from shoal.core.rundir import RunDir

    run = RunDir(checkpoint.parent.parent)
    return run.root if run.checkpoints == checkpoint.parent else None


def _run_of(checkpoint: Path) -> Path | None:
    """The same, where it has a recipe."""
    from shoal.core.rundir import RunDir

    root = _root_of(checkpoint)
    return root if root is not None and RunDir(root).recipe.is_file() else None


def _model_section(run_dir: Path | None) -> dict[str, Any]:
    if run_dir is None:
        return {}
    from shoal.core.config import read_toml
    from shoal.core.rundir import RunDir

    section = read_toml(RunDir(run_dir).recipe).get("model", {})
    return section if isinstance(section, dict) else {}


def _describe(path: Path) -> dict[str, Any]:
    from shoal.checkpoint.files import NotWhole
    from shoal.checkpoint.whole import glance

    try:
        manifest = glance(path)
    except NotWhole as error:
        return {"path": str(path), "whole": False, "problem": str(error)}
    return _describe_manifest(str(path), manifest)


def _describe_address(address: str) -> list[dict[str, Any]]:
    from shoal.checkpoint.files import NotWhole
    from shoal.checkpoint.places.address import ObjectStore, check_address, glance_at
    from shoal.core.errors import RequestError, RunError

    check_address(address, 1)
    described: list[dict[str, Any]] = []
    try:
        store = ObjectStore(address)
        for one in store.checkpoints():
            path = f"{store.address}/{one.folder}"
            try:
                described.append(_describe_manifest(path, glance_at(store, one.folder)))
            except NotWhole as error:
                described.append({"path": path, "whole": False, "problem": str(error)})
    except OSError as error:
        raise RunError(f"cannot list {address}: {error}") from error
    if not described:
        raise RequestError(f"no checkpoint at {address}; give what checkpoint.place of the run says")
    return described


def _describe_manifest(path: str, manifest: "Manifest") -> dict[str, Any]:
    from shoal.checkpoint.boxes import describe_cut

    return {
        "path": path,
        "whole": True,
        "problem": None,
        "step": manifest.step,
        "id": manifest.id,
        "plan": manifest.plan,
        "world_size": manifest.world_size,
        "num_bytes": manifest.num_bytes,
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "cut": describe_cut(tensor.shape, [piece.box for piece in tensor.pieces]),
                "pieces": [{"file": piece.file, "start": piece.start, "shape": piece.shape} for piece in tensor.pieces],
            }
            for name, tensor in manifest.tensors.items()
        },
        "values": manifest.values,
    }


def _print_list(described: list[dict[str, Any]]) -> None:
    from shoal.core.units import format_bytes

    rows = [
        (
            Path(entry["path"]).name,
            entry["plan"],
            len(entry["tensors"]),
            format_bytes(entry["num_bytes"]),
            "sizes agree",
        )
        if entry["whole"]
        else (Path(entry["path"]).name, "", "", "", f"not whole: {entry['problem']}")
        for entry in described
    ]
    print_table(("checkpoint", "plan", "tensors", "size", "state"), rows)


def _print_one(entry: dict[str, Any]) -> None:
    import math

    from shoal.checkpoint.shard import ITEM_BYTES
    from shoal.core.units import format_bytes

    size = f"{format_bytes(entry['num_bytes'])} in {len(entry['files'])} files"
    print(f"{entry['path']}: step {entry['step']}, plan {entry['plan']}, {size}")
    rows = [
        (
            name,
            tensor["dtype"],
            list(tensor["shape"]),
            format_bytes(ITEM_BYTES[tensor["dtype"]] * math.prod(tensor["shape"])),
            tensor["cut"],
        )
        for name, tensor in entry["tensors"].items()
    ]
    print_table(("tensor", "type", "shape", "size", "cut"), rows)
    print(f"values: {entry['values']}")
