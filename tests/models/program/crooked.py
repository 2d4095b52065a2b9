"""PyTorch modules that differ from plain layers in what PyTorch trains of them."""

import torch
from torch import nn


class Linears(nn.Module):
    """Two layers with a step between."""

    def __init__(self):
        super().__init__()
        self.back, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.between(self.back(x)))

    def between(self, h):
        return h


class Constant(Linears):
    def forward(self, x):
        with torch.no_grad():
            h = self.back(x)
        return self.head(h)


class Decorated(Linears):
    @torch.no_grad()
    def between(self, h):
        return torch.relu(h)


class Data(Linears):
    def between(self, h):
        return h.data


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Square(torch.autograd.Function):
    """Its backward is the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Flipped(Linears):
    def between(self, h):
        return Flip.apply(h)


class Rounded(Linears):
    def between(self, h):
        return Rounding.apply(3 * h)


class Squared(Linears):
    def between(self, h):
        return Square.apply(h)


class Hooked(Linears):
    def between(self, h):
        if h.requires_grad:
            h.register_hook(lambda gradient: 10 * gradient)
        return h


class Clamped(Linears):
    def between(self, h):
        self.head.weight.data.clamp_(-0.1, 0.1)
        return h


class Averaged(Linears):
    """Keeps a running mean as a constant."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def between(self, h):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.to(h.dtype).mean(0), alpha=0.1)
        return h - self.mean


class Noisy(Linears):
    def between(self, h):
        return h * torch.rand(len(h), 1) if self.training else h


class Unused(Linears):
    def forward(self, x):
        return self.back(x)


def spectral():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))


def dropped():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.4, batch_first=True)
    return nn.Sequential(nn.Unflatten(0, (1, -1)), layer, nn.Flatten(0, 1))


def rows():
    return torch.randn(5, 4)


def repeated():
    return torch.tensor([[1, 2], [1, 3]])
