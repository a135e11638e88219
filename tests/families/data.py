"""Small datasets that the models of this folder are tried on; recipes name them as ``families.data:function``.

Sample i is drawn from a generator of its own, so that every process has the same one.
"""

import torch
from torch.utils.data import Dataset

SAMPLES, SEQUENCE, VOCAB, CLASSES = 32, 16, 64, 4


class Drawn(Dataset):
    """Samples that a function draws, each from its own seed."""

    def __init__(self, draw, **facts):
        self._draw = draw
        self.__dict__.update(facts)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self._draw(torch.Generator().manual_seed(index))


def _splits(draw, **facts):
    """All samples are for training: a proof asks for nothing else."""
    return {"train": Drawn(draw, **facts)}


def next_tokens():
    """Tokens, and for every one of them the token after it."""

    def draw(generator):
        tokens = torch.randint(2, VOCAB, (SEQUENCE + 1,), generator=generator)
        return tokens[:-1], tokens[1:]

    return _splits(draw, vocab=VOCAB)


def masked_tokens():
    """Tokens of which a quarter is hidden and to be found; the others count for nothing."""

    def draw(generator):
        tokens = torch.randint(4, VOCAB, (SEQUENCE,), generator=generator)
        hidden = torch.rand(SEQUENCE, generator=generator) < 0.25
        hidden[0] = True
        return torch.where(hidden, 3, tokens), torch.where(hidden, tokens, -100)

    return _splits(draw, vocab=VOCAB)


def labelled_tokens():
    """Tokens and a class."""

    def draw(generator):
        tokens = torch.randint(2, VOCAB, (SEQUENCE,), generator=generator)
        return tokens, tokens.sum() % CLASSES

    return _splits(draw, vocab=VOCAB, classes=CLASSES)


def translations():
    """A source, the target so far, and the target's next tokens."""

    def draw(generator):
        source = torch.randint(2, VOCAB, (SEQUENCE,), generator=generator)
        target = torch.cat([torch.ones(1, dtype=torch.long), source.flip(0)])
        return (source, target[:-1]), target[1:]

    return _splits(draw, vocab=VOCAB)


def speech(bins=8):
    """Frames of sound, (bins, frames), the text so far, and the text's next tokens."""

    def draw(generator):
        frames = torch.randn(bins, 2 * SEQUENCE, generator=generator)
        text = torch.randint(2, VOCAB, (SEQUENCE + 1,), generator=generator)
        return (frames, text[:-1]), text[1:]

    return _splits(draw, vocab=VOCAB)


def named_translations():
    """The translations above as ``transformers`` has them: a dict, in which ``labels`` make the model's own loss."""

    def draw(generator):
        source = torch.randint(2, VOCAB, (SEQUENCE,), generator=generator)
        return {"input_ids": source, "labels": source.flip(0)}

    return _splits(draw, vocab=VOCAB)


def named_speech(bins=8):
    """The speech above as ``transformers`` has it: a dict, in which ``labels`` make the model's own loss."""

    def draw(generator):
        frames = torch.randn(bins, 2 * SEQUENCE, generator=generator)
        return {"input_features": frames, "labels": torch.randint(2, VOCAB, (SEQUENCE,), generator=generator)}

    return _splits(draw, vocab=VOCAB)


def images(channels=3, size=16):
    """Images and a class."""

    def draw(generator):
        image = torch.randn(channels, size, size, generator=generator)
        return image, (image.mean() > 0).long()

    return _splits(draw, classes=CLASSES)


def segments(channels=3, size=16):
    """Images, and a class for every one of their points."""

    def draw(generator):
        image = torch.randn(channels, size, size, generator=generator)
        return image, (image.sum(0) > 0).long()

    return _splits(draw, classes=CLASSES)


def captions(channels=3, size=16):
    """Images with a text each, and whether the two belong together."""

    def draw(generator):
        image = torch.randn(channels, size, size, generator=generator)
        text = torch.randint(2, VOCAB, (SEQUENCE,), generator=generator)
        return (image, text), text.sum() % 2

    return _splits(draw, vocab=VOCAB, classes=2)


def vectors(features=16):
    """Vectors that are their own targets."""

    def draw(generator):
        vector = torch.randn(features, generator=generator)
        return vector, vector

    return _splits(draw)


def clicks(dense=4, tables=3):
    """Numbers and categories of an advertisement, and whether it was clicked."""

    def draw(generator):
        numbers = torch.randn(dense, generator=generator)
        categories = torch.randint(0, VOCAB, (tables,), generator=generator)
        return (numbers, categories), categories.sum() % 2

    return _splits(draw, vocab=VOCAB, classes=2)


def couples():
    """A user, an item, and how much the one likes the other."""

    def draw(generator):
        user, item = torch.randint(0, VOCAB, (2,), generator=generator)
        return (user, item), torch.randn((), generator=generator)

    return _splits(draw, vocab=VOCAB)


def graphs(nodes=8, features=8):
    """Nodes with features, which of them are joined, and a class of the whole."""

    def draw(generator):
        values = torch.randn(nodes, features, generator=generator)
        joined = (torch.rand(nodes, nodes, generator=generator) < 0.4).float()
        return (values, torch.maximum(joined, joined.T)), joined.sum().long() % CLASSES

    return _splits(draw, classes=CLASSES)


def named_clicks(dense=4, tables=3):
    """The clicks above as people log them: a dict of features, and whether it was clicked."""

    def draw(generator):
        numbers = torch.randn(dense, generator=generator)
        categories = torch.randint(0, VOCAB, (tables,), generator=generator)
        return {"numbers": numbers, "categories": categories}, categories.sum() % 2

    return _splits(draw, vocab=VOCAB, classes=2)
