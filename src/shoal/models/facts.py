"""The numbers of a shipped model that a plan depends on, from its config alone: no torch, so a wrong plan is refused at once.

What is said here must be what ``parallel.find`` sees in the built module; a test compares the two.
"""

from shoal.core.facts import ModelFacts, Width
from shoal.models.config import AnyModelConfig, CnnConfig, GptConfig, MlpConfig, OwnModelConfig, Seq2SeqConfig
from shoal.models.shape import DataShape


def facts_of(config: AnyModelConfig, spec: DataShape) -> ModelFacts | None:
    """The facts of a shipped model; None for the user's own, which only building and tracing it can tell."""
    if isinstance(config, OwnModelConfig):
        return None
    if isinstance(config, GptConfig):
        return _transformer_facts(config, spec, num_blocks=config.layers, num_pairs=2 * config.layers)
    if isinstance(config, Seq2SeqConfig):
        return _transformer_facts(config, spec, num_blocks=2 * config.layers, num_pairs=5 * config.layers)
    if isinstance(config, CnnConfig):
        width = Width(name="model.hidden", size=config.hidden)
        return ModelFacts(
            name="the cnn", num_pairs=1, widths=(width,), has_batch_norm=True, keeps_statistics=True, num_units=8
        )
    return _mlp_facts(config)


def _transformer_facts(
    config: GptConfig | Seq2SeqConfig, spec: DataShape, *, num_blocks: int, num_pairs: int
) -> ModelFacts:
    kv_heads = config.num_kv_heads if isinstance(config, GptConfig) else config.heads
    return ModelFacts(
        name=f"the {config.name}",
        num_blocks=num_blocks,
        num_pairs=num_pairs,
        widths=(Width(name="the feed-forward layer (model.ffn)", size=config.ffn_size),),
        heads=((config.heads, kv_heads),),
        has_attention=True,
        sequence=spec.sequence,
        has_sequence=True,
        # What lies before and after the blocks of a gpt: embedding, its dropout, norm and head.
        num_units=num_blocks + 4 if isinstance(config, GptConfig) else None,
        tied_ends="embedding.weight" if isinstance(config, GptConfig) and config.tied else "",
    )


def _mlp_facts(config: MlpConfig) -> ModelFacts:
    # Batch norm lies between every two linear layers and has a weight per feature, so no pair is left.
    num_pairs = 0 if config.batch_norm else (config.layers + 1) // 2
    return ModelFacts(
        name="the mlp",
        num_blocks=config.layers,
        num_pairs=num_pairs,
        widths=(Width(name="model.hidden", size=config.hidden),) if num_pairs else (),
        has_batch_norm=config.batch_norm,
        keeps_statistics=config.batch_norm,
        num_units=config.layers + 1,
        note="batch norm lies between its layers" if config.batch_norm else "",
    )
