"""A network of PyTorch, for ``systolic import torch_net.py:model``."""

import torch
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(2, 3)
