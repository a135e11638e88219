"""That all ranks have built the same model: names, shapes and types of its tensors, compared before it is laid out.

The user's own code may differ from host to host; ranks with other tensors would exchange what does not belong together, or hang.
"""

import json

from torch import nn

from shoal.comm.world import World
from shoal.core.errors import AgreedError
from shoal.trainer.samedata import gather_texts


def outline(model: nn.Module) -> list[str]:
    """A line for each parameter and buffer, in the module's own order."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for name, tensor in tensors]


def agree_on_model(world: World, model: nn.Module) -> None:
    """Compare the outlines of all ranks; every rank calls it.

    Raises:
        AgreedError: a rank has another model; names the first tensor that differs. All ranks raise it.
    """
    if world.size == 1 or world.is_rehearsed:
        return
    everyone = [json.loads(text) for text in gather_texts(world, json.dumps(outline(model)))]
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            pairs = zip([*everyone[0], "nothing more"], [*other, "nothing more"], strict=False)
            first, theirs = next(pair for pair in pairs if pair[0] != pair[1])
            raise AgreedError(
                f"the ranks have different models: rank 0 has {first}, and rank {rank} has {theirs}; give every host the same "
                "code, and build the same model on every rank"
            )
