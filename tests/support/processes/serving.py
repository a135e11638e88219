"""A run that publishes, a server beside it, and clients: what tests of ``shoal serve`` share."""

import http.client
import json
import re
import tomllib

import safetensors.torch
import torch

from shoal.data.spec import DataSpec
from shoal.models.build import build_model
from shoal.trainer.config import Recipe

RECIPE = """
[model]
name = "mlp"
[data]
source = "store"
path = "{store}"
target = "label"
validation = 0.2
test = 0
[train]
steps = 12
global_batch = 8
threads = 1
[optim]
name = "adamw"
lr = 1e-2
[publish]
every_steps = {every}
keep = 100000
bound = 100
window = 64
[telemetry]
tensorboard = false
"""


def wait_for_address(process):
    """The host and port that a server has printed."""
    line = process.stdout.readline()
    found = re.search(r"at http://([0-9.]+):([0-9]+): ", line)
    assert found, f"no address: {line!r}\n{process.stderr.read() if process.poll() is not None else ''}"
    return found[1], int(found[2])


def ask(address, method, path, tree=None, *, body=None, headers=None, timeout=30):
    """The status and the content of one answer."""
    connection = http.client.HTTPConnection(*address, timeout=timeout)
    try:
        given = json.dumps(tree).encode() if tree is not None else body
        connection.request(method, path, given, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


class Published:
    """Predictions recomputed from a folder of versions, by nothing that the server is made of."""

    def __init__(self, root):
        self._root, self._models = root, {}

    def predict(self, number, row, *, rows=8):
        """The scores of a row in a pass of so many, all alike."""
        if number not in self._models:
            folder = self._root / f"version-{number:08d}"
            description = json.loads((folder / "version.json").read_text())
            recipe = Recipe.model_validate(tomllib.loads((folder / "recipe.toml").read_text()))
            spec = {**description["spec"], "features": tuple(description["spec"]["features"])}
            model = build_model(recipe.model, DataSpec(**spec)).eval()
            model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
            self._models[number] = model, description["weights_sha256"]
        model, sha256 = self._models[number]
        with torch.inference_mode():
            return model(torch.tensor([row] * rows, dtype=torch.float32))[0].tolist(), sha256
