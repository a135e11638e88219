"""``shoal sample``: let a trained language model continue a text."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, write_result

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
_Prompt = Annotated[str, typer.Option("--prompt", metavar="TEXT", help="The text to continue.")]
_Tokens = Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="Tokens to generate.")]
_Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token every time.")]
_TopK = Annotated[
    int, typer.Option("--top-k", metavar="K", min=0, help="Draw from the K likeliest tokens; 0: from all.")
]
_Seed = Annotated[int, typer.Option("--seed", help="Seed of the draw.")]


def sample(
    run: _Run,
    prompt: _Prompt = "def ",
    tokens: _Tokens = 256,
    temperature: _Temperature = 0.8,
    top_k: _TopK = 40,
    seed: _Seed = 1,
    json_file: JsonFile = None,
) -> None:
    """Generate text from the newest whole checkpoint of RUN."""
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.trainer.inspect import sample_run

    check_result_file(json_file)
    result = sample_run(run, prompt=prompt, num_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    print(result["text"])
    write_result(json_file, result)
