"""A model that answers: built from a published version or, where a run has published nothing, from its newest whole checkpoint.

The bits of an answer do not depend on who else asks: every pass has the same number of rows, filled up with copies of a row.
A model whose bits depend on the row's place all the same, which is looked at when it is loaded, answers row by row.
"""

import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.published.version import InputField
from shoal.checkpoint.published.versions import open_version
from shoal.core.config import validate
from shoal.data.batchform import BatchForm, Branch, Leaf
from shoal.data.fitted import FOLDER
from shoal.data.rawrows import COLUMNS_NAME, Preparation, load_preparation
from shoal.data.spec import DataSpec
from shoal.engine.state import hash_weights, import_weights
from shoal.models.hugging_face import logits_of
from shoal.optim.precision import Precision
from shoal.serve.schema import Row
from shoal.trainer.build import build_seeded, load_run
from shoal.trainer.config import Recipe
from shoal.trainer.online.publisher import describe_inputs

BATCH = 8
"""Rows of a pass, unless it is told otherwise."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model in memory, whole, with what an answer says of it."""

    model: nn.Module
    fields: tuple[InputField, ...]
    is_keyed: bool
    precision: Precision
    version: int | None
    """None of a checkpoint."""
    step: int
    weights_sha256: str
    loss: float | None
    data_version: int
    published: float | None
    preparation: Preparation | None = None
    """From raw rows to what the model takes, where the run has steps for that."""
    batch: int = BATCH
    """Rows of every pass; 1 where the bits would depend on their place."""

    def describe(self) -> dict[str, Any]:
        """For people and programs."""
        raw = self.preparation
        return {
            "version": self.version,
            "source": "checkpoint" if self.version is None else "published",
            "step": self.step,
            "weights_sha256": self.weights_sha256,
            "holdback_loss": self.loss,
            "data_version": self.data_version,
            "published": self.published,
            "batch": self.batch,
            "inputs": [
                {"name": one.name, "dtype": one.dtype, "shape": list(one.shape), "below": one.below}
                for one in self.fields
            ],
            "columns": None if raw is None else {one.name: one.kind.lstrip("<|") for one in raw.given},
            "labels": list(self.labels),
        }

    @property
    def labels(self) -> tuple[Any, ...]:
        """Names of the classes, by their places among the scores; empty where nothing is known of them."""
        return () if self.preparation is None else self.preparation.labels

    def predict(self, rows: Sequence[Row]) -> list[NDArray[Any]]:
        """The scores of each row."""
        alike: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
        for place, row in enumerate(rows):
            alike[tuple(array.shape for array in row)].append(place)
        found: dict[int, NDArray[Any]] = {}
        for places in alike.values():
            for start in range(0, len(places), self.batch):
                group = places[start : start + self.batch]
                filled = [rows[place] for place in group] + [rows[group[0]]] * (self.batch - len(group))
                found |= zip(group, self._forward(filled)[: len(group)], strict=True)
        return [found[place] for place in range(len(rows))]

    def _forward(self, rows: Sequence[Row]) -> NDArray[Any]:
        tensors = [
            torch.from_numpy(np.stack(column)).to(getattr(torch, field.dtype))
            for field, column in zip(self.fields, zip(*rows, strict=True), strict=True)
        ]
        inputs = [self.precision.cast_input(tensor) for tensor in tensors]
        with torch.inference_mode(), self.precision.autocast("cpu"):
            output = logits_of(self._call(inputs))
        return np.asarray((output.double() if output.dtype == torch.float64 else output.float()).numpy())

    def _call(self, inputs: Sequence[Tensor]) -> Any:
        if not self.is_keyed:
            return self.model(*inputs)
        names = tuple(field.name for field in self.fields)
        form = BatchForm(Branch(dict, names, tuple(Leaf(place) for place in range(len(names)))), None)
        return form.call(self.model, inputs)


def load_version(root: Path, number: int, *, expect: str | None = None, batch: int = BATCH) -> ServedModel:
    """A published version, beside any that serves meanwhile.

    Args:
        root: the folder of versions.
        number: of the version.
        expect: the sum of its description, as the pointer has it.
        batch: rows of a pass.

    Raises:
        NotWhole: it is torn or altered.
        ShoalError: its model cannot be built here.
    """
    opened = open_version(root, number, expect=expect)
    version = opened.version
    try:
        recipe = validate(Recipe, tomllib.loads(opened.recipe.decode()), origin=f"{opened.path}/recipe.toml")
        spec = dict(version.spec)
        features = spec.get("features")
        data = DataSpec(**{**spec, "features": None if features is None else tuple(features)})
        tensors = safetensors.torch.load(opened.weights)
    except (SafetensorError, TypeError, ValueError) as error:
        raise NotWhole(f"{opened.path}: {error}") from error
    precision = Precision.named(recipe.train.precision)
    model = build_seeded(recipe, data).to(dtype=precision.weight_dtype)
    import_weights(model, {f"weights/{name}": tensor for name, tensor in tensors.items()}, origin=str(opened.path))
    model.eval()
    preparation = load_preparation(opened.path) if COLUMNS_NAME in opened.beside else None
    if (found := hash_weights(model)) != version.weights_sha256:
        raise NotWhole(f"{opened.path}: its weights have the sum {found[:16]}..., not {version.weights_sha256[:16]}...")
    return _settled(
        ServedModel(
            model=model,
            fields=version.inputs,
            is_keyed=version.is_keyed,
            precision=precision,
            version=version.number,
            step=version.step,
            weights_sha256=version.weights_sha256,
            loss=version.loss,
            data_version=version.data_version,
            published=version.published,
            preparation=preparation,
            batch=batch,
        )
    )


def load_checkpoint(run_dir: Path, *, batch: int = BATCH) -> ServedModel:
    """The newest whole checkpoint of a run that has published nothing.

    Raises:
        ShoalError: there is none, or its model cannot be built here.
    """
    run = load_run(run_dir)
    prepared = run_dir / FOLDER
    fields, is_keyed = describe_inputs(run.model, run.example_inputs, run.data.spec)
    return _settled(
        ServedModel(
            model=run.model,
            fields=fields,
            is_keyed=is_keyed,
            precision=Precision.named(run.recipe.train.precision),
            version=None,
            step=run.step,
            weights_sha256=hash_weights(run.model),
            loss=None,
            data_version=0,
            published=None,
            preparation=load_preparation(prepared) if (prepared / COLUMNS_NAME).is_file() else None,
            batch=batch,
        )
    )


def _settled(served: ServedModel) -> ServedModel:
    """The model, or one that answers row by row where a row's bits depend on its place among others."""
    if served.batch == 1:
        return served
    random = np.random.default_rng(0)
    rows = [tuple(_draw(random, field) for field in served.fields) for _ in range(served.batch)]
    together = served.predict(rows)
    alone = [served.predict([row])[0] for row in rows]
    if all(one.tobytes() == other.tobytes() for one, other in zip(together, alone, strict=True)):
        return served
    return ServedModel(**{**served.__dict__, "batch": 1})


def _draw(random: np.random.Generator, field: InputField) -> NDArray[Any]:
    if field.dtype.startswith("float") or field.dtype == "bfloat16":
        return random.standard_normal(field.shape).astype(np.float32)
    high = 2 if field.dtype == "bool" else field.below or 1
    return random.integers(0, high, size=field.shape).astype(np.bool_ if field.dtype == "bool" else np.int64)
