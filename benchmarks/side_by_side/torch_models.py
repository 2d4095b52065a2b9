"""The two models in plain PyTorch."""

from collections.abc import Mapping

import numpy as np
import torch
from sizes import IGNORED, Language, Vision
from torch import nn
from torch.nn import functional as F

Weights = Mapping[str, np.ndarray]


def put(parameter: torch.Tensor, value: np.ndarray) -> None:
    """Sets a parameter."""
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, d = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, d // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(d, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Tokens and targets int64[batch, sequence] to the mean loss."""

    def __init__(self, sizes: Language) -> None:
        super().__init__()
        d = sizes.d_model
        self.embedding = nn.Embedding(sizes.vocab, d)
        self.positions = nn.Parameter(torch.zeros(sizes.sequence, d))
        self.blocks = nn.ModuleList([Block(d, sizes.heads) for _ in range(sizes.layers)])
        self.norm = nn.LayerNorm(d)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def load(self, weights: Weights) -> None:
        """Systolic's first weights."""
        put(self.embedding.weight, weights["embedding"])
        put(self.positions, weights["positions"])
        norms = {"norm": self.norm}
        for index, block in enumerate(self.blocks):
            norms |= {f"blocks/{index}/{name}": getattr(block, name) for name in ("norm1", "norm2")}
            for name in ("qkv", "out", "up", "down"):
                linear = getattr(block, name)
                put(linear.weight, weights[f"blocks/{index}/{name}/kernel"].T)
                put(linear.bias, weights[f"blocks/{index}/{name}/bias"])
        for name, norm in norms.items():
            put(norm.weight, weights[f"{name}/scale"])
            put(norm.bias, weights[f"{name}/bias"])


class ConvNorm(nn.Sequential):
    """Convolution without bias, then batch norm."""

    def __init__(self, given: int, made: int, kernel: int, stride: int) -> None:
        conv = nn.Conv2d(given, made, kernel, stride, padding=kernel // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(made))

    def load(self, weights: Weights, name: str) -> None:
        put(self[0].weight, weights[f"{name}/kernel"].transpose(3, 2, 0, 1))
        put(self[1].weight, weights[f"{name}/norm/scale"])
        put(self[1].bias, weights[f"{name}/norm/bias"])


class Residual(nn.Module):
    """Two 3x3 convolutions added to the (projected) input."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([ConvNorm(given, made, 3, stride), ConvNorm(made, made, 3, 1)])
        self.shortcut = ConvNorm(given, made, 1, stride) if stride > 1 or given != made else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return F.relu(self.convs[1](F.relu(self.convs[0](x))) + shortcut)


class ResNet18(nn.Module):
    """Images uint8[batch, size, size, 3] and labels int64[batch] to the mean loss."""

    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.stem = ConvNorm(3, sizes.width, 3, 1)
        blocks, given = [], sizes.width
        for stage in range(4):
            made = sizes.width * 2**stage
            for index in range(2):
                blocks.append(Residual(given, made, 2 if stage and not index else 1))
                given = made
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(given, sizes.classes)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        # A view of channels-last bytes as [batch, 3, size, size] is channels-last in PyTorch's sense.
        x = (image.permute(0, 3, 1, 2).float() - 127.5) * (1 / 63.75)
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), label)

    def load(self, weights: Weights) -> None:
        """Systolic's first weights."""
        self.stem.load(weights, "stem")
        for index, block in enumerate(self.blocks):
            for place, conv in enumerate(block.convs):
                conv.load(weights, f"blocks/{index}/convs/{place}")
            if block.shortcut is not None:
                block.shortcut.load(weights, f"blocks/{index}/shortcut")
        put(self.head.weight, weights["head/kernel"].T)
        put(self.head.bias, weights["head/bias"])
