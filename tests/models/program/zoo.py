"""Models of other frameworks as a user writes them, in one file that an import can be given."""

import torch
import transformers
from torch import nn


def cnn():
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(256, 10),
    )
    return net, torch.randn(2, 1, 8, 8)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.places = torch.sin(torch.arange(8.0)[:, None] * torch.arange(32.0))
        self.register_buffer("scale", torch.tensor(2.0))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, mask=None):
        order = torch.arange(tokens.shape[1])
        x = self.embed(tokens) * self.scale + self.places[order]
        hidden = self.layers(x, src_key_padding_mask=mask)
        return {"logits": self.head(hidden), "pooled": (hidden.mean(1), hidden[:, 0])}


def encoder():
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[1, 6:] = True
    return Encoder(), {"tokens": torch.randint(0, 50, (2, 8)), "mask": mask}


def bloom():
    config = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4)
    tokens = torch.randint(3, 99, (2, 12))
    return transformers.BloomForCausalLM(config), {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "use_cache": False,
    }


class Coupled(nn.Module):
    """Sees the other examples of its batch."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


def coupled():
    return Coupled(), torch.randn(4, 3)


def coupled_by_three():
    return Coupled(), torch.randn(3, 3)


class Scaled(nn.Module):
    """Divides by the largest of the batch, which the rows of a rotated copy share."""

    def forward(self, x):
        return x / x.abs().max()


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean()


class Normed(nn.Module):
    """Batch norm without running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x):
        return self.norm(x)


class Averaged(nn.Module):
    def forward(self, x):
        return {"each": 2 * x, "mean": x.mean()}


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return {"each": x * self.scale, "scale": self.scale}


class Sequence(nn.Module):
    """Its output is [sequence, batch, size]."""

    def forward(self, x):
        return x.transpose(0, 1)


class SequenceOfTwo(nn.Module):
    """The same, for two examples only."""

    def forward(self, x):
        return x.reshape(2, 2, 3).transpose(0, 1)


class Tokens(nn.Module):
    """Its output is [batch * sequence, size]."""

    def forward(self, x):
        return x.flatten(0, 1)


def sequential():
    import keras
    from keras import layers

    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(10),
        ]
    )


def functional():
    import keras
    from keras import layers

    image, size = keras.Input((8, 8, 1), name="image"), keras.Input((3,), name="size")
    x = layers.BatchNormalization()(layers.Conv2D(4, 3)(image))
    x = layers.concatenate([layers.GlobalAveragePooling2D()(x), layers.Dense(4)(size)])
    return keras.Model([image, size], {"label": layers.Dense(3)(x), "bound": layers.Dense(1)(x)})


# Mistakes


def no_tensor():
    class Says(nn.Module):
        def forward(self, x):
            return "no"

    return Says(), torch.zeros(2, 3)


def dynamic():
    class Turned(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    return nn.Sequential(nn.Linear(3, 3), Turned()), torch.zeros(2, 3)


def unsupported():
    class Factors(nn.Module):
        def forward(self, x):
            return torch.geqrf(x)[0]

    return nn.Sequential(nn.Linear(3, 3), Factors()), torch.zeros(2, 3)


def only_module():
    return nn.Linear(3, 3)


def structure():
    class Joined(nn.Module):
        def forward(self, x, rest):
            return x + rest["y"]

    return Joined(), {"x": torch.zeros(2, 3), "rest": {"y": torch.zeros(2, 3)}}


def wrong_inputs():
    return nn.Linear(3, 3), {"image": torch.zeros(2, 3)}


def fails():
    raise ValueError("no such checkpoint")


def dies():
    import os
    import signal

    os.kill(os.getpid(), signal.SIGSEGV)
