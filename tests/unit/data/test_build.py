"""What is built is what the check announced, for every source."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.core.errors import RequestError
from shoal.data.build import build_splits
from shoal.data.check import check_data
from shoal.data.config import (
    AnyDataConfig,
    DigitsConfig,
    StdlibConfig,
    SyntheticConfig,
    TextConfig,
    TokensConfig,
)

torch.set_num_threads(1)


def _configs(folder: Path) -> list[AnyDataConfig]:
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"the number {i}. " * 30)
    np.save(folder / "ids.npy", np.arange(3000) % 50)
    return [
        StdlibConfig(sequence=32, limit_bytes=200_000),
        TextConfig(path=str(folder), pattern="*.txt", sequence=16),
        TextConfig(path=str(folder / "3.txt"), sequence=16),
        TokensConfig(path=str(folder / "ids.npy"), sequence=16),
        TokensConfig(path=str(folder / "ids.npy"), vocab=60, sequence=16, validation=0, test=0),
        SyntheticConfig(kind="tokens", samples=100),
        SyntheticConfig(kind="classes", samples=100, features=(1, 8, 8)),
        SyntheticConfig(kind="regression", samples=100),
        SyntheticConfig(kind="reverse", samples=100),
        DigitsConfig(),
    ]


@pytest.mark.parametrize("number", range(10))
def test_the_check_announces_what_is_built(tmp_path: Path, number: int) -> None:
    config = _configs(tmp_path)[number]
    summary, splits = check_data(config), build_splits(config, seed=1)
    assert (summary.train, summary.validation, summary.test) == (
        len(splits.train),
        len(splits.validation),
        len(splits.test),
    )
    assert summary.spec is not None
    for name in ("kind", "vocab", "sequence", "features", "classes", "outputs", "tokens_per_sample"):
        assert getattr(summary.spec, name) == getattr(splits.spec, name), name
    items = splits.train.collate([0, len(splits.train) - 1])
    if splits.train.uniform_weight is not None:
        assert items.weight == 2 * splits.train.uniform_weight
    if splits.spec.vocab is not None:
        assert int(items.targets.max()) < splits.spec.vocab
    if splits.spec.kind == "tokens":
        assert items.inputs[0].shape == (2, splits.spec.sequence)


def test_text_knows_its_baseline_and_nothing_else_does(tmp_path: Path) -> None:
    for config in _configs(tmp_path):
        baseline = build_splits(config, seed=1).spec.baseline_loss
        is_text = isinstance(config, StdlibConfig | TextConfig)
        assert (baseline is not None and baseline > 0) == is_text


def test_the_seed_makes_synthetic_data_and_leaves_real_data_alone(tmp_path: Path) -> None:
    configs = _configs(tmp_path)
    for config in (configs[0], configs[9], configs[5]):
        one, two = (build_splits(config, seed=seed).train.collate([0, 1, 2]).inputs[0] for seed in (1, 2))
        assert torch.equal(one, two) != isinstance(config, SyntheticConfig)


def test_a_token_file_too_short_is_refused_by_check_and_build(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(20))
    config = TokensConfig(path=str(tmp_path / "ids.npy"), sequence=32)
    for function in (check_data, lambda config: build_splits(config, 0)):
        with pytest.raises(RequestError, match="has 20 token ids and one sequence of 32 needs 33"):
            function(config)
