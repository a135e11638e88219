"""Random numbers that depend on the number of processes, in words: what the model or the data drew in its first step."""

from collections.abc import Iterator

from shoal.data.loader import Loader
from shoal.randomness.dropout import DropoutKey


def describe_draws(dropout: DropoutKey, loader: Loader) -> Iterator[str]:
    """One warning for each kind of draw that another number of processes would do otherwise."""
    for path, shape in dropout.odd_shapes().items():
        yield (
            f"dropout {path!r} sees a tensor of shape {shape}, whose first dim is not the batch: its mask is not drawn "
            "by sample and can differ on another number of processes; put the batch first where that matters"
        )
    if loader.draws_random_numbers:
        yield (
            "loading a sample draws from a global generator: samples are loaded in step and not ahead, and another number of "
            "processes will draw other numbers; seed a generator of its own by the sample's index where that matters"
        )
    if foreign := dropout.foreign_draws():
        yield (
            f"the model draws random numbers in its forward pass that are not dropout: {', '.join(foreign)}; "
            "another number of processes will draw other numbers"
        )
