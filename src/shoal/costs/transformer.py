"""A transformer straight from its numbers, as a list of layers, without a module. No torch.

The activations of a block follow Korthikanti et al. 2022 (arXiv:2205.05198), Table 2: what is kept is listed tensor by tensor, so
gated feed-forwards, grouped-query attention, fused attention and experts follow from the same list.
"""

from dataclasses import dataclass, replace

from shoal.core.errors import RequestError
from shoal.costs.layers import Layer, LayerKind, ModelCosts, Op, OpKind, SavedBytes, TensorSplit


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The numbers of a decoder."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    kv_heads: int | None = None
    ffn: int | None = None
    """Four times ``hidden`` when left out."""
    head_size: int | None = None
    is_gated: bool = False
    """SwiGLU: three matrices in the feed-forward, RMSNorm and no biases. Otherwise GELU with two, LayerNorm and biases."""
    tied: bool = True
    """The output layer reads the embedding's matrix."""
    dropout: bool = True
    fused_attention: bool = False
    """One kernel that never writes the scores."""
    fused_loss: bool = False
    """One kernel that reads the output layer's scores once, and writes their gradient over them."""
    fused_pointwise: bool = True
    """What stands between two products is one kernel, by hand or by a compiler. If not, a gated block, whose norms, rotations and
    activations are written as several operations, reads and writes for each of them (``_Unfused``)."""
    experts: int = 1
    chosen_experts: int = 1
    """Experts that a token goes to."""
    expert_ffn: int | None = None
    shared_ffn: int = 0
    """Width of the expert that every token goes to."""
    dense_layers: int = 0
    """Blocks at the beginning that have a plain feed-forward, where the rest have experts."""
    query_rank: int = 0
    """Multi-head latent attention: features that queries are compressed to; 0 without compression."""
    kv_rank: int = 0
    """Multi-head latent attention: features that keys and values are compressed to; 0 for ordinary attention."""
    rope_size: int = 64
    """Features of a head that carry the position, with latent attention."""
    item_bytes: int = 2
    learned_positions: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "sequence"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} of a transformer is {getattr(self, name)}; give 1 or more")
        if self.heads % self.num_kv_heads:
            raise RequestError(
                f"{self.num_kv_heads} key-value heads do not divide the {self.heads} heads; give a number that does"
            )
        if self.chosen_experts > self.experts:
            raise RequestError(
                f"a token goes to {self.chosen_experts} experts, and there are {self.experts}; lower the one or raise the other"
            )

    @property
    def num_kv_heads(self) -> int:
        """As many as heads when left out."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def features(self) -> float:
        """Of one head."""
        return self.hidden / self.heads if self.head_size is None else self.head_size

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: a multiple of 128, as every software pads it, because tensor cores want it so."""
        return -(-self.vocab // 128) * 128

    @property
    def ffn_size(self) -> int:
        """Of a block without experts."""
        return 4 * self.hidden if self.ffn is None else self.ffn


def transformer_costs(shape: TransformerShape, *, name: str = "transformer") -> ModelCosts:
    """Embedding, blocks, and the output layer with its loss."""
    dense = _block(shape, experts=False)
    routed = _block(shape, experts=True) if shape.experts > 1 else dense
    num_dense = shape.dense_layers if shape.experts > 1 else shape.layers
    blocks = [
        replace(dense, name=f"block {at}") if at < num_dense else replace(routed, name=f"block {at}")
        for at in range(shape.layers)
    ]
    return ModelCosts(
        name=name,
        layers=(_embedding(shape), *blocks, _head(shape)),
        tokens=float(shape.sequence),
        item_bytes=shape.item_bytes,
        heads=shape.heads,
        kv_heads=shape.num_kv_heads,
        experts=shape.experts,
    )


def _embedding(shape: TransformerShape) -> Layer:
    positions, hidden, item = float(shape.sequence), float(shape.hidden), shape.item_bytes
    output = positions * hidden * item
    mask = positions * hidden if shape.dropout else 0.0
    return Layer(
        name="embedding",
        kind=LayerKind.EMBEDDING,
        ops=(Op(kind=OpKind.MEMORY, num_bytes=3 * output + mask),),
        whole_weights=positions * hidden if shape.learned_positions else 0.0,
        split_weights=float(shape.padded_vocab) * hidden,
        # Token numbers (8 bytes) and the dropout mask: Megatron's own count.
        kept=SavedBytes(whole=mask + 8 * positions, boundary=8 * positions),
        output_bytes=output,
        num_pairs=1,
        pair_bytes=output,
        # No product of its own says what its matrix is like.
        parameters=(
            ("embedding.tokens", (shape.padded_vocab, shape.hidden)),
            *((("embedding.positions", (shape.sequence, shape.hidden)),) if shape.learned_positions else ()),
        ),
    )


def _head(shape: TransformerShape) -> Layer:
    positions, hidden, vocab, item = (
        float(shape.sequence),
        float(shape.hidden),
        float(shape.padded_vocab),
        shape.item_bytes,
    )
    scores = positions * vocab
    return Layer(
        name="head",
        kind=LayerKind.HEAD,
        ops=(
            Op(kind=OpKind.MEMORY, num_bytes=2 * positions * hidden * item),
            Op(kind=OpKind.MATMUL, rows=positions, inner=hidden, outer=vocab, cut=TensorSplit.COLUMNS),
            # The loss: scores are read and written in float32, for their largest, their exponentials and their sum; or read once.
            Op(
                kind=OpKind.MEMORY, num_bytes=scores * (item if shape.fused_loss else item + 3 * 4), cut=TensorSplit.ALL
            ),
        ),
        whole_weights=hidden * (1 if shape.is_gated else 2),
        split_weights=0.0 if shape.tied else vocab * hidden,
        # The final norm's input and the product's input, and the float32 probabilities that the loss keeps.
        kept=SavedBytes(whole=2 * positions * hidden * item, split=scores * 4, boundary=positions * hidden * item),
        num_pairs=0,
        pair_bytes=positions * hidden * item,
        tied_to="embedding" if shape.tied else None,
    )


def _block(shape: TransformerShape, *, experts: bool) -> Layer:
    positions, hidden, item = float(shape.sequence), float(shape.hidden), shape.item_bytes
    width = positions * hidden * item
    mask = positions * hidden if shape.dropout else 0.0
    attention = _latent_attention(shape) if shape.kv_rank else _attention(shape)
    forward = _expert_forward(shape) if experts else _dense_forward(shape, float(shape.ffn_size))
    unfused = _unfused(shape)
    norms = Op(kind=OpKind.MEMORY, num_bytes=2 * width + unfused.norm, count=2)
    sums = Op(kind=OpKind.MEMORY, num_bytes=3 * width + mask, count=2)
    norm_weights = 2 * hidden * (1 if shape.is_gated else 2)
    return Layer(
        name="block",
        kind=LayerKind.BLOCK,
        ops=(norms, *attention.ops, *forward.ops, sums),
        whole_weights=norm_weights + attention.whole_weights + forward.whole_weights,
        split_weights=attention.split_weights + forward.split_weights,
        expert_weights=forward.expert_weights,
        # Inputs of the two norms, and the masks of the two dropouts after them (4 s b h and 2 s b h of the paper).
        kept=SavedBytes(whole=2 * width + 2 * mask + 2 * unfused.norm_kept, boundary=width)
        + attention.kept
        + forward.kept,
        output_bytes=width,
        num_pairs=2,
        pair_bytes=width,
        routed_bytes=forward.routed_bytes,
        kv_bytes=attention.kv_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class _Unfused:
    """Bytes that one sample moves or leaves behind beyond those of fused kernels, where every operation is one of its own."""

    norm: float = 0.0
    """Of one norm: RMSNorm casts to float32, squares, averages, scales, casts back and weights, each of which reads and writes
    all elements but for the average (pytorch 2.5: aten/src/ATen/native/layer_norm.cpp, rms_norm)."""
    norm_kept: float = 0.0
    """For its backward pass: its input in float32, and its result before the weights."""
    rotation: float = 0.0
    """Queries and keys are cast to float32, multiplied as complex numbers, and cast back (torchtitan: apply_rotary_emb)."""


def _unfused(shape: TransformerShape) -> _Unfused:
    if shape.fused_pointwise or not shape.is_gated:
        return _Unfused()
    item, elements = shape.item_bytes, float(shape.sequence) * shape.hidden
    rotated = float(shape.sequence) * (shape.heads + shape.num_kv_heads) * shape.features
    return _Unfused(
        # A fused one reads and writes once, as the last of these does.
        norm=elements * ((item + 4) + (4 + 4) + 4 + (4 + 4) + (4 + item)),
        norm_kept=elements * (4 + item),
        rotation=rotated * ((item + 4) + (4 + 4) + (4 + item)),
    )


@dataclass(frozen=True, kw_only=True)
class _Half:
    """One half of a block, between a norm and a residual sum."""

    ops: tuple[Op, ...]
    kept: SavedBytes
    whole_weights: float = 0.0
    split_weights: float = 0.0
    expert_weights: float = 0.0
    routed_bytes: float = 0.0
    kv_bytes: float = 0.0


def _attention(shape: TransformerShape) -> _Half:
    positions, hidden, item = float(shape.sequence), float(shape.hidden), shape.item_bytes
    queries = shape.heads * shape.features
    keys = shape.num_kv_heads * shape.features
    biases = 0.0 if shape.is_gated else queries + 2 * keys
    core, scores = _core(shape, shape.features, shape.features)
    return _Half(
        ops=(
            Op(kind=OpKind.MATMUL, rows=positions, inner=hidden, outer=queries + 2 * keys, cut=TensorSplit.COLUMNS),
            *_rotation(shape),
            *core,
            Op(kind=OpKind.MATMUL, rows=positions, inner=queries, outer=hidden, cut=TensorSplit.ROWS),
        ),
        whole_weights=0.0 if shape.is_gated else hidden,
        split_weights=hidden * (queries + 2 * keys) + queries * hidden + biases,
        # The input of the first product; queries, keys, values; the output of the attention, which is the input of the second.
        kept=SavedBytes(
            whole=positions * hidden * item,
            split=positions * (2 * queries + 2 * keys) * item + _statistics(shape),
            scores=scores,
        ),
        kv_bytes=2 * positions * keys * item,
    )


def _rotation(shape: TransformerShape) -> tuple[Op, ...]:
    moved = _unfused(shape).rotation
    return (Op(kind=OpKind.MEMORY, num_bytes=moved, cut=TensorSplit.ALL),) if moved else ()


def _core(shape: TransformerShape, of_keys: float, of_values: float) -> tuple[tuple[Op, ...], float]:
    """Scores, their softmax, and their product with the values; and the bytes of scores that are kept."""
    positions, item = float(shape.sequence), shape.item_bytes
    scores = shape.heads * positions * positions
    core = Op(
        kind=OpKind.ATTENTION,
        rows=positions,
        inner=(of_keys + of_values) / 2,
        outer=positions,
        heads=shape.heads,
        cut=TensorSplit.ALL,
        is_fused=shape.fused_attention,
        # Not fused: scores written; read, scaled, masked, softmax written; read, dropped, written with a mask; read.
        num_bytes=0.0 if shape.fused_attention else scores * (6 * item + (1 if shape.dropout else 0)),
    )
    # Softmax's output, dropout's output and its mask (5 a s s b of the paper); a fused kernel keeps none of them.
    kept = 0.0 if shape.fused_attention else scores * (item + (item + 1 if shape.dropout else 0))
    return (core,), kept


def _statistics(shape: TransformerShape) -> float:
    """The float32 log-sum of every row of scores, which a fused attention keeps in their place."""
    return 4.0 * shape.heads * shape.sequence if shape.fused_attention else 0.0


def _latent_attention(shape: TransformerShape) -> _Half:
    """Multi-head latent attention, as in DeepSeek-V2 (arXiv:2405.04434), section 2.1."""
    positions, hidden, item = float(shape.sequence), float(shape.hidden), shape.item_bytes
    features = float(shape.head_size or 128)
    of_keys, rank = features + shape.rope_size, float(shape.query_rank)
    queries, values = shape.heads * of_keys, shape.heads * features
    core, scores = _core(shape, of_keys, features)
    down = (rank if rank else 0.0) + shape.kv_rank + shape.rope_size
    from_query = rank if rank else hidden
    ops = (
        Op(kind=OpKind.MATMUL, rows=positions, inner=hidden, outer=down),
        Op(kind=OpKind.MEMORY, num_bytes=2 * positions * down * item),
        Op(kind=OpKind.MATMUL, rows=positions, inner=from_query, outer=queries, cut=TensorSplit.COLUMNS),
        Op(
            kind=OpKind.MATMUL,
            rows=positions,
            inner=float(shape.kv_rank),
            outer=shape.heads * 2 * features,
            cut=TensorSplit.COLUMNS,
        ),
        # Rotation of the positional part, and keys put together of their two parts.
        Op(kind=OpKind.MEMORY, num_bytes=4 * positions * queries * item, cut=TensorSplit.ALL),
        *core,
        Op(kind=OpKind.MATMUL, rows=positions, inner=values, outer=hidden, cut=TensorSplit.ROWS),
    )
    kept = (hidden + 2 * down) * positions * item
    return _Half(
        ops=ops,
        whole_weights=hidden * down + rank + shape.kv_rank,
        split_weights=from_query * queries + shape.kv_rank * shape.heads * 2 * features + values * hidden,
        kept=SavedBytes(
            whole=kept, split=positions * (2 * queries + 2 * values) * item + _statistics(shape), scores=scores
        ),
        kv_bytes=positions * (queries + values) * item,
    )


def _dense_forward(shape: TransformerShape, ffn: float) -> _Half:
    positions, hidden, item = float(shape.sequence), float(shape.hidden), shape.item_bytes
    first = 2 * ffn if shape.is_gated else ffn
    # Of a gate that is not fused with its product, what goes from one to the other is written, read, and kept.
    between = ffn if shape.is_gated and not shape.fused_pointwise else 0.0
    return _Half(
        ops=(
            Op(kind=OpKind.MATMUL, rows=positions, inner=hidden, outer=first, cut=TensorSplit.COLUMNS),
            Op(kind=OpKind.MEMORY, num_bytes=positions * (first + ffn + 2 * between) * item, cut=TensorSplit.ALL),
            Op(kind=OpKind.MATMUL, rows=positions, inner=ffn, outer=hidden, cut=TensorSplit.ROWS),
        ),
        whole_weights=0.0 if shape.is_gated else hidden,
        split_weights=hidden * first + ffn * hidden + (0.0 if shape.is_gated else ffn),
        # The input of the first product, of the activation and of the second product (2 + 8 + 8 s b h of the paper).
        kept=SavedBytes(whole=positions * hidden * item, split=positions * (first + ffn + between) * item),
    )


def _expert_forward(shape: TransformerShape) -> _Half:
    positions, hidden, item = float(shape.sequence), float(shape.hidden), shape.item_bytes
    chosen, ffn = float(shape.chosen_experts), float(shape.expert_ffn or shape.ffn_size)
    rows = positions * chosen
    first = 2 * ffn if shape.is_gated else ffn
    shared = _dense_forward(shape, float(shape.shared_ffn)) if shape.shared_ffn else _Half(ops=(), kept=SavedBytes())
    ops = (
        Op(kind=OpKind.MATMUL, rows=positions, inner=hidden, outer=float(shape.experts)),
        # Tokens put into the order of experts and back, before and after they travel: each time read and written.
        Op(kind=OpKind.MEMORY, num_bytes=2 * rows * hidden * item, count=4),
        Op(kind=OpKind.MATMUL, rows=rows, inner=hidden, outer=first, cut=TensorSplit.COLUMNS, experts=shape.experts),
        Op(kind=OpKind.MEMORY, num_bytes=rows * (first + ffn) * item, cut=TensorSplit.ALL),
        Op(kind=OpKind.MATMUL, rows=rows, inner=ffn, outer=hidden, cut=TensorSplit.ROWS, experts=shape.experts),
    )
    return _Half(
        ops=(*ops, *shared.ops),
        whole_weights=hidden * shape.experts + shared.whole_weights,
        split_weights=shared.split_weights,
        expert_weights=shape.experts * (hidden * first + ffn * hidden),
        # The router's input; tokens in the order of experts; what goes into the activation and into the second product.
        kept=SavedBytes(
            whole=positions * (hidden * item + shape.experts * 4), split=rows * (hidden + first + ffn) * item
        )
        + shared.kept,
        routed_bytes=rows * hidden * item,
    )
