"""Text out of a trained model, one token at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.core.errors import RequestError


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_tokens: Sequence[int],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    context: int | None = None,
) -> list[int]:
    """The tokens that follow a prompt.

    Args:
        model: takes tokens (1, L) and gives logits (1, L, vocab).
        prompt_tokens: at least one token; only the last ``context`` of them are seen.
        num_tokens: how many to draw.
        temperature: below 1 the likely tokens become likelier; 0 takes the likeliest.
        top_k: draw among this many likeliest tokens only.
        generator: where the draws come from; torch's own when left out.
        context: the longest sequence the model takes; its attribute ``sequence`` when left out.

    Raises:
        RequestError: there is no prompt, or a number is out of range.
    """
    if not prompt_tokens:
        raise RequestError("the prompt has 0 tokens; give at least 1")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise RequestError(f"temperature {temperature} must be 0 or more, and top_k {top_k} must be 1 or more")
    longest = context if context is not None else getattr(model, "sequence", None)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    tokens = list(prompt_tokens)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for _ in range(num_tokens):
            seen = tokens[-longest:] if longest is not None else tokens
            logits = model(torch.tensor([seen], device=device))[0, -1]
            tokens.append(_draw(logits.float(), temperature, top_k, generator))
    finally:
        for module, was_training in modes:
            module.training = was_training
    return tokens[len(prompt_tokens) :]


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        lowest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    chances = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(chances, 1, generator=generator))
