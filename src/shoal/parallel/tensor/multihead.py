"""``nn.MultiheadAttention`` with some of its heads on each tensor-parallel rank.

torch computes this module inside one function that takes whole matrices, and in evaluation inside one kernel, so it cannot be
split from outside. Here the same arithmetic is written out with this rank's heads: the fused query-key-value matrix is cut in
three, each part by heads, and the output projection along its inputs. Parameters keep their names. Attention itself is
``F.scaled_dot_product_attention``, as in torch, so that keyed dropout and context parallelism find it where they look for it.

Shapes: B batch, L queries, S keys, E whole width, H this rank's heads, W width of a head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.channel import Channel
from shoal.core.errors import RequestError
from shoal.parallel.tensor.crossing import copy_in, gather_sequence, sum_out
from shoal.parallel.tensor.layers import leave_split, to_compute_type
from shoal.parallel.tensor.sequence import Region


class SplitMultiheadAttention(nn.MultiheadAttention):
    """An ``nn.MultiheadAttention`` with some of its heads; ``num_heads`` is still the number of all of them."""

    channel: Channel
    region: Region | None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's, mask for mask; weights are averaged over heads or not returned.

        Raises:
            RequestError: the weights of single heads are asked for.
        """
        if need_weights and not average_attn_weights:
            raise RequestError(
                f"attention weights by head are not available under tp={self.channel.size}, whose ranks have some heads each; "
                f"ask for need_weights=False or average_attn_weights=True"
            )
        is_batched = query.ndim == 3
        entered = self._enter(query, key, value)
        if not is_batched:
            entered = [x.unsqueeze(1) for x in entered]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif self.batch_first:
            entered = [x.transpose(0, 1) for x in entered]
        query_BHLW, key_BHSW, value_BHSW = self._project(entered)
        use_hint = is_causal and attn_mask is not None and key_padding_mask is None and not need_weights
        mask = None if use_hint else self._mask(attn_mask, key_padding_mask, query_BHLW)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            mixed_BHLW, weights = self._attend_openly(query_BHLW, key_BHSW, value_BHSW, mask, dropout)
        else:
            mixed_BHLW = F.scaled_dot_product_attention(
                query_BHLW, key_BHSW, value_BHSW, attn_mask=mask, dropout_p=dropout, is_causal=use_hint
            )
        mixed_LBX = mixed_BHLW.permute(2, 0, 1, 3).flatten(2)
        if not is_batched:
            return self._leave(mixed_LBX.squeeze(1)), None if weights is None else weights.squeeze(0)
        return self._leave(mixed_LBX.transpose(0, 1) if self.batch_first else mixed_LBX), weights

    def _enter(self, *inputs: Tensor) -> list[Tensor]:
        """Query, key and value, each crossing once even where it is given twice."""
        entered: dict[int, Tensor] = {}
        for x in inputs:
            if id(x) not in entered:
                entered[id(x)] = self._cross(x)
        return [entered[id(x)] for x in inputs]

    def _cross(self, x: Tensor) -> Tensor:
        region, x_computed = self.region, to_compute_type(x)
        if region is None or region.is_whole(x) or not region.is_local(x):
            return copy_in(x_computed, self.channel)
        return gather_sequence(x_computed, self.channel, region.dim)

    def _project(self, inputs_LBE: list[Tensor]) -> list[Tensor]:
        """Query, key and value by heads, (B, H, L, W)."""
        weights = self.in_proj_weight.chunk(3)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = []
        for x, weight, bias in zip(inputs_LBE, weights, biases, strict=True):
            y_LBX = F.linear(x, weight, bias)
            projected.append(y_LBX.view(*y_LBX.shape[:-1], -1, self.head_dim).permute(1, 2, 0, 3))
        return projected

    def _mask(self, attn_mask: Tensor | None, padding_BS: Tensor | None, query_BHLW: Tensor) -> Tensor | None:
        """Both masks as one to add, broadcast to (B, H, L, S)."""
        dtype = query_BHLW.dtype
        mask = None
        if attn_mask is not None:
            mask = _to_add(attn_mask, dtype)
            if mask.ndim == 3:
                # (B * all heads, L, S): this rank's heads of it.
                mine = self.num_heads // self.channel.size
                by_head = mask.view(-1, self.num_heads, *mask.shape[1:])
                mask = by_head.narrow(1, self.channel.rank * mine, mine)
        if padding_BS is not None:
            padding = _to_add(padding_BS, dtype)[:, None, None, :]
            mask = padding if mask is None else mask + padding
        return mask

    def _attend_openly(
        self, query_BHLW: Tensor, key_BHSW: Tensor, value_BHSW: Tensor, mask: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        """Attention with its weights, these averaged over the heads of all ranks: one more sum."""
        scores_BHLS = (query_BHLW * math.sqrt(1.0 / self.head_dim)) @ key_BHSW.transpose(-2, -1)
        weights_BHLS = (scores_BHLS if mask is None else scores_BHLS + mask).softmax(dim=-1)
        if dropout > 0.0:
            weights_BHLS = F.dropout(weights_BHLS, p=dropout)
        average_BLS = sum_out(weights_BHLS.sum(dim=1), self.channel) / self.num_heads
        return weights_BHLS @ value_BHSW, average_BLS

    def _leave(self, mixed: Tensor) -> Tensor:
        output = leave_split(F.linear(mixed, self.out_proj.weight), self.channel, self.region)
        bias: Tensor | None = self.out_proj.bias
        return output if bias is None else output + bias.to(output.dtype)


def check_multihead(module: nn.Module, path: str) -> None:
    """Raise unless the module can be split.

    Raises:
        RequestError: it is no plain ``nn.MultiheadAttention``, or has an option that is not known here.
    """
    if type(module).forward is not nn.MultiheadAttention.forward:
        raise RequestError(
            f"{path!r} is a {type(module).__name__} with a forward of its own; it cannot be split by heads"
        )
    assert isinstance(module, nn.MultiheadAttention)
    wrong = None
    if not module._qkv_same_embed_dim:
        wrong = f"kdim={module.kdim} or vdim={module.vdim} unequal to embed_dim={module.embed_dim}"
    elif module.bias_k is not None:
        wrong = "add_bias_kv=True"
    elif module.add_zero_attn:
        wrong = "add_zero_attn=True"
    if wrong is not None:
        raise RequestError(
            f'attention {path!r} has {wrong}, which cannot be split; keep it whole: parallel.split = {{"{path}" = "none"}}'
        )


def make_multihead(module: nn.Module, channel: Channel, region: Region | None) -> None:
    """Make an ``nn.MultiheadAttention``, whose parameters were cut by heads, compute with them."""
    module.__class__ = SplitMultiheadAttention
    module.__dict__.update(channel=channel, region=region)


def leave_fast_path(model: nn.Module) -> None:
    """Keep torch's encoder layers from the fused kernel of evaluation, which takes their weights for whole ones."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            # Read by nothing but that decision, in the layer and in the encoder around it.
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _to_add(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
