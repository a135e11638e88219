"""The mail of a pipeline rank without peers: what would come from other stages has the right shapes and some finite values."""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.costs.undisturbed import undisturbed
from shoal.pipeline.cut import Chain
from shoal.pipeline.mail import Form, Lane, Mail, Parcel, Piece

_SIZE = 1e-2
"""Of the values that are made up: activations and gradients of about this size keep every number finite."""


def learn_forms(chain: Chain, inputs: Sequence[Tensor]) -> dict[int, Form]:
    """What a microbatch sends along each lane, by its tag, from one pass through all stages of a chain that has kept them all."""
    found: dict[int, Form] = {}
    # Not in training: shapes are the same, and dropout wants to be told whose samples these are.
    with undisturbed(chain.model, training=False), torch.enable_grad():
        received: Sequence[Tensor] = ()
        for stage in range(chain.num_stages - 1):
            outputs = chain.run(stage, inputs, received)
            form = tuple(Piece(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in outputs)
            # Lanes as the runtime numbers them: two for each stage, outputs and gradients.
            found[2 * stage] = form
            found[2 * (stage + 1) + 1] = tuple(
                Piece(piece.shape, piece.dtype, False) for piece in form if piece.has_gradient
            )
            received = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs]
    return found


class RehearsedMail(Mail):
    """Sends into the void, which is counted, and receives what was made up."""

    def __init__(self, mail: Mail, learnt: Mapping[int, Form]) -> None:
        # All that the real one has, a traffic counter and a device among it; nothing is ever sent through its group.
        self.__dict__.update(mail.__dict__)
        self._learnt = learnt
        self._made: dict[Piece, Tensor] = {}

    def expect(self, lane: Lane, kind: Hashable) -> Parcel:
        """See ``Mail``."""
        return _MadeUp(self, lane, kind)

    def made_up(self, lane: Lane, kind: Hashable) -> tuple[list[Tensor], Form]:
        """A parcel of a lane."""
        form = self.forms[lane, kind] if (lane, kind) in self.forms else self._learnt[lane.tag]
        return [self._value(piece).clone() for piece in form], form

    def _value(self, piece: Piece) -> Tensor:
        if piece not in self._made:
            made = torch.zeros(piece.shape, dtype=piece.dtype, device=self.device)
            if made.is_floating_point():
                made.uniform_(-_SIZE, _SIZE, generator=torch.Generator(self.device).manual_seed(1))
            self._made[piece] = made
        return self._made[piece]

    def _post(self, tensor: Tensor, lane: Lane, needed_at: int) -> None:
        """Nobody is there."""


class _MadeUp(Parcel):
    """A parcel that is here already."""

    def __init__(self, mail: RehearsedMail, lane: Lane, kind: Hashable) -> None:
        self._source, self._lane, self._kind = mail, lane, kind

    def open(self) -> tuple[list[Tensor], Form]:
        """See ``Parcel``."""
        return self._source.made_up(self._lane, self._kind)
