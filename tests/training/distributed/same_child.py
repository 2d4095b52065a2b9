"""One of two processes of a job that have different data or checkpoints, as the arguments say; prints a JSON object a case.

``FOLDER`` holds a text for each process, ``0/text.txt`` and ``1/text.txt``, and tokenizers beside it: ``same``,
``other`` ones, and ``marks`` of which the tokens around a text differ.
"""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from systolic.core.errors import SystolicError
from systolic.data.arrays import Arrays
from systolic.data.input_files import Skipped
from systolic.data.text.documents import Documents
from systolic.data.text.instructions import Instructions
from systolic.data.text.text_data import Packing
from systolic.job import Data, Layout, Read, Split
from systolic.setup import set_up
from systolic.steps.programs import training
from systolic.training import distributed
from systolic.training.distributed.consistency import (
    SameBatches,
    require_same_data,
    require_same_job,
)
from systolic.training.evaluate import evaluate
from tests.steps import tiny
from tests.training import restore_child
from tests.training.distributed.hosts_child import DATA, EXAMPLES, tokens

FROM = 5
"""The first training batch that differs, where any does."""


@dataclass(frozen=True)
class Untold(Data):
    """Data that can't tell its contents: tokens that are others in process 1, from a batch on."""

    split: Split

    def fields(self) -> Any:
        return DATA.fields()

    def size(self, split: Split) -> int | None:
        return DATA.size(split)

    def open(self, read: Read) -> Any:
        batches = DATA.open(read)
        if read.split is not self.split or jax.process_index() != 1:
            return batches
        return Other(batches, 0 if read.split is Split.validation else FROM)


class Other:
    def __init__(self, batches: Any, since: int):
        self.batches, self.since, self.number = batches, since, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self.batches)
        self.number += 1
        return {**batch, "tokens": batch["tokens"] ^ (self.number > self.since)}

    def get_state(self) -> bytes:
        return self.batches.get_state()

    def close(self) -> None:
        self.batches.close()


def refusal(of: Any) -> str:
    try:
        of()
    except SystolicError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Own(Untold):
    """A user's data, with a path that is text and a value that has no plain form."""

    where: str
    change: Any


def settings(mine: Path) -> dict[str, Data]:
    """Data that differs in one setting, by its name."""
    number = int(mine.name)
    text = Documents(path=mine / "text.txt", tokenizer=mine / "other")
    chat = Instructions(path=mine, tokenizer=mine, template="{{ text }}" * 20 + f" {number}")
    return {
        "data.field": replace(text, field=("text", "body")[number]),
        "data.packing": replace(text, packing=tuple(Packing)[number]),
        "data.validation": replace(text, validation=(None, mine)[number]),
        "data.template": chat,
        "data.type": (text, chat)[number],
        "paths": text,
        "own paths": Own(Split.train, where=str(mine), change=lambda: None),
    }


def tokenized(folder: Path, tokenizer: Path) -> Documents:
    return Documents(path=folder / "0" / "text.txt", tokenizer=tokenizer)


def told(folder: Path) -> dict[str, Any]:
    mine = folder / str(jax.process_index())
    arrays = {"train": tokens(EXAMPLES, 0), "validation": tokens(20, jax.process_index())}
    size = Arrays.of(train=tokens(EXAMPLES - jax.process_index(), 0))
    setup = set_up(tiny.job(layout=Layout(tensor=2, fsdp=1), data=Untold(Split.validation)))
    training_job = replace(setup.job, data=Untold(Split.train))
    seen = []
    process, job = jax.process_index(), setup.job
    others = {
        "same job": setup,
        "seed": replace(setup, job=replace(job, seed=process)),
        "optimizer.learning_rate": replace(
            setup,
            job=replace(job, optimizer=replace(job.optimizer, learning_rate=(1 + process) / 10)),
        ),
        "flags": set_up(job, flags=["--xla_cpu_enable_fast_math=true"] * process),
        **{
            name: replace(setup, job=replace(job, data=data))
            for name, data in settings(mine).items()
        },
    }

    def train() -> None:
        same = SameBatches(every=4)
        with training(training_job, setup.steps, 0) as feed:
            for batch in feed:
                same.check(batch)
                seen.append(1)

    def evaluation() -> None:
        evaluate(setup.job, setup.steps, None, None, None, Split.validation)

    lines = Skipped()
    lines.note(["both", f"process {jax.process_index()}"])
    return {name: refusal(partial(require_same_job, one)) for name, one in others.items()} | {
        "tokenizer": refusal(lambda: require_same_data(tokenized(folder, mine / "other"))),
        "marks": refusal(lambda: require_same_data(tokenized(folder, mine / "marks"))),
        "same tokenizer": refusal(lambda: require_same_data(tokenized(folder, mine / "same"))),
        "text": refusal(lambda: require_same_data(Documents(path=mine / "text.txt"))),
        "same text": refusal(lambda: require_same_data(Documents(path=folder / "0" / "text.txt"))),
        "gone": refusal(
            lambda: require_same_data(Documents(path=folder / "1" / f"gone{mine.name}.txt"))
        ),
        "arrays": refusal(lambda: require_same_data(Arrays.of(**arrays))),
        "size": refusal(lambda: require_same_data(size)),
        "untold": refusal(lambda: require_same_data(setup.job.data)),
        "evaluation": refusal(evaluation),
        "training": refusal(train),
        "trained": len(seen),
        "shared": distributed.share(f"said by {jax.process_index()}, é"),
        "skipped": distributed.share_lines(lines),
        "again": distributed.share_lines(lines),
        "damaged": restore_child.answer("flip", folder / "checkpoints"),
    }


if __name__ == "__main__":
    distributed.join()
    print(json.dumps(told(Path(sys.argv[1]))), flush=True)
