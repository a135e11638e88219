"""The user's own dataset was cut into its head and its tail.

A dataset of two spirals, listed from the inside out, trained to a loss of 0.5 and had an accuracy of 0.0 on its test split:
the test split was the outer end of both arms, which training never saw. Datasets are often sorted, so the cut is made after
a fixed shuffle.
"""

from shoal.data.config import OwnDataConfig
from shoal.data.sources.own import build_own


def test_every_split_of_a_sorted_dataset_has_both_classes(monkeypatch, tmp_path):
    (tmp_path / "sorted_data.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def dataset():\n    return TensorDataset(torch.arange(1000.0).unsqueeze(1), torch.arange(1000) // 500)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    splits = build_own(OwnDataConfig(build="sorted_data:dataset", validation=0.1, test=0.1), seed=1)
    for split in (splits.train, splits.validation, splits.test):
        share = split.collate(range(len(split))).targets.float().mean()
        assert 0.3 < float(share) < 0.7
