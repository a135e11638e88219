"""Ten models as people write them, with nothing of Shoal in them; recipes name them as ``families.plain:function``."""

import torch
import torch.nn.functional as F
from torch import nn

from families.data import CLASSES, SEQUENCE, VOCAB


class Residual(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Residual(width, width, 1), Residual(width, width, 1))
        self.layer2 = nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1))
        self.fc = nn.Linear(2 * width, CLASSES)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Dlrm(nn.Module):
    """Naumov et al. 2019: tables and a network below, products of all pairs, a network above."""

    def __init__(self, dense=4, tables=3, width=8):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCAB, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 2))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, numbers, categories):
        dense = self.bottom(numbers)
        rows = [table(categories[:, place]) for place, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *rows], 1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], 1))


class Lstm(nn.Module):
    def __init__(self, width=32, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        states, _ = self.lstm(self.embed(tokens))
        return self.out(states)


class VitBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        read = self.norm1(x)
        x = x + self.attention(read, read, read, need_weights=False)[0]
        # One dropout for both ends, as many write it.
        return x + self.drop(self.down(self.drop(F.gelu(self.up(self.norm2(x))))))


class Vit(nn.Module):
    def __init__(self, width=32, heads=4, layers=2, patch=4, size=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(VitBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def _twice(inner, outer):
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU(), nn.Conv2d(outer, outer, 3, padding=1), nn.ReLU()
    )


class Unet(nn.Module):
    """Ronneberger et al. 2015: down, up, and what was seen on the way down."""

    def __init__(self, width=8):
        super().__init__()
        self.down1, self.down2 = _twice(3, width), _twice(width, 2 * width)
        self.middle = _twice(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join2 = _twice(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join1 = _twice(2 * width, width)
        self.out = nn.Conv2d(width, CLASSES, 1)

    def forward(self, image):
        high = self.down1(image)
        low = self.down2(F.max_pool2d(high, 2))
        x = self.middle(F.max_pool2d(low, 2))
        x = self.join2(torch.cat([self.up2(x), low], 1))
        x = self.join1(torch.cat([self.up1(x), high], 1))
        return self.out(x).permute(0, 2, 3, 1)


class Encoder(nn.Module):
    """torch's own encoder between an embedding and a layer for the classes."""

    def __init__(self, width=32, heads=4, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(SEQUENCE, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.out(self.encoder(self.embed(tokens) + self.positions(places)).mean(1))


class TwoTower(nn.Module):
    """A network for the user, one for the item, and the product of what they put out."""

    def __init__(self, width=16):
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(VOCAB, width), nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))
        self.item = nn.Sequential(nn.Embedding(VOCAB, width), nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))

    def forward(self, user, item):
        return (F.normalize(self.user(user), dim=-1) * F.normalize(self.item(item), dim=-1)).sum(-1)


class Lora(nn.Module):
    """A frozen layer and a small one beside it, as Hu et al. 2021."""

    def __init__(self, layer, rank=4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(rank, layer.in_features))
        self.up = nn.Parameter(0.1 * torch.randn(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


class Autoencoder(nn.Module):
    def __init__(self, features=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 12), nn.ReLU(), nn.Linear(12, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, features))

    def forward(self, x):
        return self.decoder(self.encoder(x))


class GraphLayer(nn.Module):
    """A mean over neighbours, as Kipf & Welling 2017, with what the node itself is."""

    def __init__(self, inner, outer):
        super().__init__()
        self.own, self.others = nn.Linear(inner, outer), nn.Linear(inner, outer, bias=False)

    def forward(self, nodes, joined):
        shares = joined / joined.sum(-1, keepdim=True).clamp(min=1)
        return torch.relu(self.own(nodes) + shares @ self.others(nodes))


class GraphNet(nn.Module):
    def __init__(self, features=8, width=16):
        super().__init__()
        self.layers = nn.ModuleList([GraphLayer(features, width), GraphLayer(width, width), GraphLayer(width, width)])
        self.out = nn.Linear(width, CLASSES)

    def forward(self, nodes, joined):
        for layer in self.layers:
            nodes = layer(nodes, joined)
        return self.out(nodes.mean(1))


def resnet():
    return ResNet()


def dlrm():
    return Dlrm()


def lstm():
    return Lstm()


def vit():
    return Vit()


def unet():
    return Unet()


def transformer_encoder():
    return Encoder()


def two_tower():
    return TwoTower()


def lora():
    """The encoder above, frozen, with something to train beside the layers of its feed-forward networks and its classes."""
    model = Encoder().requires_grad_(False)
    for layer in model.encoder.layers:
        layer.linear1, layer.linear2 = Lora(layer.linear1), Lora(layer.linear2)
    model.out.requires_grad_()
    return model


def autoencoder():
    return Autoencoder()


def graph_network():
    return GraphNet()


class Gru(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.gru = nn.GRU(width, width, 2, batch_first=True)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        return self.out(self.gru(self.embed(tokens))[1][-1])


class MixerBlock(nn.Module):
    """Tolstikhin et al. 2021: a network over places, then one over features."""

    def __init__(self, places, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.features = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.features(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width=32, patch=4, size=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(MixerBlock((size // patch) ** 2, width) for _ in range(2)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image):
        return self.head(self.blocks(self.patches(image).flatten(2).transpose(1, 2)).mean(1))


def gru():
    return Gru()


def mlp_mixer():
    return Mixer()


class Blocks(nn.Module):
    """The blocks of the ViT above on tokens."""

    def __init__(self, width=32, heads=4, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(VitBlock(width, heads) for _ in range(layers))
        self.out = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def blocks():
    return Blocks()


def mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )
