"""The plan's word for a codec: it round-trips, and a wrong one is one message."""

import pytest

from shoal.core.compressrule import CompressRule
from shoal.core.errors import RequestError

WORDS = [
    "fp16", "bf16", "fp8", "int8", "int8:64", "int4", "int4:32@5", "topk:0.01", "randk:0.3", "threshold:0.001", "dgc:0.001@10",
    "sign", "onebit@100", "powersgd:4@30", "qsgd:4", "natural", "topk:1", "threshold:1e-05",
]  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_a_word_round_trips(word):
    assert str(CompressRule.parse(word)) == word


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("topkk:0.1", ("topkk", "topk")),
        ("8bit", ("did you mean 'int8'?",)),
        ("bfloat16@3", ("did you mean 'bf16'?",)),
        ("fp32", ("natural, none, onebit",)),
        ("topk", ("topk:0.01",)),
        ("topk:0", ("'0'", "at most 1")),
        ("topk:1.5", ("'1.5'", "at most 1")),
        ("randk:nan", ("'nan'",)),
        ("powersgd:0", ("'0'", "1 or more")),
        ("qsgd:3", ("'3'", "2, 4 or 8")),
        ("threshold:-1", ("'-1'", "above 0")),
        ("threshold:inf", ("'inf'",)),
        ("int8:4", ("'4'", "8 or more")),
        ("int8:", ("''",)),
        ("sign:3", ("no number",)),
        ("int8@-1", ("'-1'", "0 or more")),
        ("int8@", ("''",)),
    ],
)
def test_a_wrong_word_is_one_message(word, parts):
    with pytest.raises(RequestError) as caught:
        CompressRule.parse(word)
    assert all(part in str(caught.value) for part in (repr(word), *parts))
