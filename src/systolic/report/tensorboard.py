"""A watcher that writes TensorBoard events: scalars of training and evaluation, samples as text."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.report import figures

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

_TRAIN = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "grad_norm": "train/gradient_norm",
    "tokens_per_second": "speed/tokens_per_second",
    "examples_per_second": "speed/examples_per_second",
    "step_seconds": "speed/step_seconds",
    "mfu": "speed/mfu",
    "data_wait": "speed/data_wait",
    "memory_bytes": "memory/bytes",
}


class TensorBoard:
    """Writes events into ``folder`` (``RUN/tensorboard``) from the first record on.

    A resumed run adds a file that hides what an earlier one wrote after the step it resumed from.
    A disk that fills up ends the events, not the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._closed = False

    def see(self, record: dict[str, Any]) -> None:
        """Queues a record's values; a thread of the writer's own puts them on disk."""
        if self._closed:
            return
        try:
            self._write(record)
        except OSError:
            self._closed = True

    def close(self) -> None:
        """Flushes and closes the file; records that still come are forgotten."""
        if self._writer is not None and not self._closed:
            self._writer.close()
        self._closed = True

    def _write(self, record: dict[str, Any]) -> None:
        kind = record.get("kind")
        step, when = record.get("step") or 0, record.get("time")
        if self._writer is None:
            self._writer = self._open(record)
        if kind == "train":
            values = {tag: figures.number(record.get(key)) for key, tag in _TRAIN.items()}
            values |= {f"train/{name}": value for name, value in figures.terms(record).items()}
        elif kind == "eval":
            split = record.get("split") or "validation"
            metrics = record.get("metrics") or {}
            values = {f"{split}/{name}": figures.number(value) for name, value in metrics.items()}
        else:
            values = {}
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, step, walltime=when)
        if kind == "train" and record.get("loss", 0.0) is None:
            self._writer.add_scalar("train/loss", math.nan, step, walltime=when)
        if kind == "sample":
            text = _as_markdown(f"{record.get('text') or ''}")
            self._writer.add_text("sample", text, step, walltime=when)

    def _open(self, record: dict[str, Any]) -> "SummaryWriter":
        from tensorboardX import SummaryWriter

        resumed_from = record.get("resumed_from")
        return SummaryWriter(
            str(self._folder),
            purge_step=None if resumed_from is None else int(resumed_from) + 1,
            max_queue=1000,
            flush_secs=10,
        )


def _as_markdown(text: str) -> str:
    """Text as an indented block: TensorBoard renders markdown, a sample means its characters."""
    return "\n".join(f"    {line}" for line in text.splitlines())
