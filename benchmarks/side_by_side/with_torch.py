"""PyTorch: a plain loop, eager or compiled by Inductor."""

from itertools import cycle
from typing import Any

import torch
from contender import Log
from sizes import ADAMW, Language, Work
from torch_models import GPT2, ResNet18


def make(sizes: Any, work: Work) -> tuple[torch.nn.Module, list[str]]:
    """The model with the first weights, and the names of a batch's arrays in the order it takes them."""
    if isinstance(sizes, Language):
        model: Any = GPT2(sizes)
        names = ["tokens", "targets"]
    else:
        # Convolutions on a CPU are faster so; measured with the sizes of this benchmark.
        model = ResNet18(sizes).to(memory_format=torch.channels_last)
        names = ["image", "label"]
    model.load(work.weights())
    return model, names


def batches(work: Work, names: list[str]) -> list[tuple[torch.Tensor, ...]]:
    """All batches as tensors, ids as int64."""
    arrays = [torch.from_numpy(work.batches()[name]) for name in names]
    arrays = [a.long() if a.dtype == torch.int32 else a for a in arrays]
    return list(zip(*arrays, strict=True))


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Parameters for AdamW: vectors are not decayed."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": ADAMW.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def count(model: torch.nn.Module) -> int:
    """Parameters, a tied one once."""
    return sum(p.numel() for p in model.parameters())


def run(name: str, sizes: Any, work: Work, log: Log) -> None:
    """Trains until killed."""
    torch.set_num_threads(2)
    model, names = make(sizes, work)
    feed = cycle(batches(work, names))
    optimizer = torch.optim.AdamW(
        groups(model),
        lr=ADAMW.learning_rate,
        betas=(ADAMW.b1, ADAMW.b2),
        eps=ADAMW.eps,
        fused=True,
    )
    log.start(count(model), {"torch": torch.__version__})
    forward = torch.compile(model) if name == "compiled" else model
    while True:
        loss = forward(*next(feed))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.step(loss.item())
