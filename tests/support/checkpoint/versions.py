"""A small published version, without torch."""

import array

from shoal.checkpoint.published.version import InputField, Version
from shoal.checkpoint.published.versions import publish
from shoal.checkpoint.shard import Blob


def describe(step, *, loss=1.0):
    return Version(
        number=0,
        step=step,
        weights_sha256="0" * 64,
        data_version=0,
        loss=loss,
        window="1" * 64,
        window_samples=8,
        published=float(step),
        spec={"kind": "classes"},
        inputs=(InputField(name="x", dtype="float32", shape=(2,)),),
        is_keyed=False,
    )


def publish_one(root, step, *, keep=3, loss=1.0, beside=None):
    """Publish weights that are all the number of the step."""
    data = array.array("f", [float(step)] * 4096)
    blobs = {"weight": Blob("F32", (64, 64), memoryview(data.tobytes()))}
    return publish(root, describe(step, loss=loss), blobs, f"step = {step}\n".encode(), keep=keep, beside=beside)
