"""Rows of many windows at a time: mixed from the first batch on, each once an epoch, resumable anywhere."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from systolic.core.errors import DataError
from systolic.data.text.documents import Documents
from systolic.data.text.rows import Rounds, WindowBatches
from systolic.data.text.text_data import Packing
from systolic.job import Read, Split

FILES, LINES, SEQUENCE = 60, 100, 64


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Long files, each of one character only, so that a row shows which file it is of."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number:03d}.txt").write_text((chr(33 + number) * 79 + "\n") * LINES)
    return folder


def data(path: Path, **changes) -> Documents:
    return Documents(path=path, sequence=SEQUENCE, validation_share=0, **changes)


def endless(of: Documents, **changes) -> WindowBatches:
    batches = of.open(Read(**{"split": Split.train, "batch": 16, "seed": 3, **changes}))
    assert isinstance(batches, WindowBatches)
    return batches


def files_of(batch: dict[str, np.ndarray]) -> set[int]:
    tokens = batch["tokens"]
    return {*np.unique(tokens[(tokens > 32) & (tokens < 256)]).tolist()}


def test_a_batch_comes_from_many_files_and_the_mix_moves_slowly(corpus: Path) -> None:
    """A window holds the text of two files. Batches of one window know only these, and jump to the next two."""
    one, many = endless(data(corpus, shuffle_windows=1)), endless(data(corpus))
    assert one.windows.documents == 2
    assert max(len(files_of(next(one))) for _ in range(40)) <= 4
    seen = [files_of(next(many)) for _ in range(460)]
    assert min(map(len, seen)) >= 6, "from the first batch on"
    around = [set.union(*seen[at : at + 20]) for at in range(0, 460, 20)]
    kept = [len(a & b) / len(a | b) for a, b in pairwise(around)]
    assert min(kept) > 0.5, "no stretch begins with other files than the one before"
    assert len(set.union(*seen)) == FILES
    for opened in (one, many):
        opened.close()


@pytest.mark.parametrize(("windows", "mixed"), [(1, 1), (5, 1), (5, 5), (7, 3), (40, 16), (17, 16)])
def test_rounds_hold_every_row_once(windows: int, mixed: int) -> None:
    rounds = Rounds(windows=windows, mixed=mixed)
    heights = [7 + 3 * (number % 4) for number in range(windows)]
    taken = [np.zeros(height, int) for height in heights]
    done = 0.0
    for at in range(rounds.count):
        assert rounds.before(at) == pytest.approx(done)
        for window in range(at, at + mixed):
            span = rounds.span(at, window, heights[window])
            taken[window][span] += 1
            shares = rounds.span(at, window, mixed)
            done += (shares.stop - shares.start) / mixed
    assert done == pytest.approx(windows) == rounds.before(rounds.count)
    assert all((rows == 1).all() for rows in taken)


@pytest.mark.parametrize("mixed", [1, 3, 16, 100])
def test_every_byte_comes_once_an_epoch(corpus: Path, mixed: int) -> None:
    read = Read(split=Split.train, batch=16, seed=1, epochs=1)
    counts = np.zeros(512, int)
    for batch in data(corpus, shuffle_windows=mixed).open(read):
        counts += np.bincount(batch["targets"][batch["targets"] >= 0], minlength=512)
    assert counts[33 : 33 + FILES].tolist() == [79 * LINES] * FILES


@pytest.mark.parametrize("shard", [0, 1])
def test_it_resumes_bit_for_bit_within_a_round(corpus: Path, shard: int) -> None:
    of = data(corpus, shuffle_windows=5)
    whole = endless(of, shards=2, shard=shard)
    states, batches = [], []
    for _ in range(320):
        states.append(whole.get_state())
        batches.append(next(whole))
    assert json.loads(states[-1])["first"] >= whole.windows.per_epoch, "into the second epoch"
    for start in (0, 1, 37, 160, 201, 290, 310):
        again = endless(of, shards=2, shard=shard)
        again.set_state(states[start])
        assert again.get_state() == states[start]
        for want in batches[start : start + 6]:
            have = next(again)
            assert all(np.array_equal(have[name], want[name]) for name in want)
        again.close()
    whole.close()


def test_epochs_count_rows_not_whole_windows(corpus: Path) -> None:
    of = data(corpus, shuffle_windows=4)
    batches, rows = endless(of), 0
    total = sum(int(b["mask"].sum()) for b in of.open(Read(split=Split.train, batch=16, epochs=1)))
    assert of.epochs(batches.get_state()) == 0
    while rows < 1.5 * total:
        next(batches)
        rows += 16
        assert of.epochs(batches.get_state()) == pytest.approx(rows / total, abs=0.02)
    batches.close()


def test_row_groups_are_shuffled_together(tmp_path: Path) -> None:
    """A file that is sorted, in groups of one subject each: the text of a batch is of several."""
    import pyarrow
    import pyarrow.parquet

    content = [(chr(33 + number // 40) * 50) for number in range(40 * 12)]
    file = tmp_path / "sorted.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": content}), file, row_group_size=40)
    batches = endless(data(file, shuffle_windows=1))
    assert len(files_of(next(batches))) >= 3
    batches.close()
    counts = np.zeros(512, int)
    for batch in data(file, shuffle_windows=1).open(Read(split=Split.train, batch=8, epochs=1)):
        counts += np.bincount(batch["targets"][batch["targets"] >= 0], minlength=512)
    assert counts[33:45].tolist() == [40 * 50] * 12


def test_one_validation_document_and_sorted_groups_are_reported(
    corpus: Path, tmp_path: Path
) -> None:
    import pyarrow
    import pyarrow.parquet

    assert data(corpus).notes() == ()
    small = tmp_path / "small"
    small.mkdir()
    for number in range(4):
        (small / f"{number}.txt").write_text("some text\n" * 20)
    (note,) = Documents(path=small).notes()
    assert note.startswith(f"the validation split of {small} is 1 document, ")
    notes = replace(data(corpus), validation=corpus).notes()
    assert notes[-1].startswith("60 of 60 files of --validation are in --data too, first ")
    rows = {
        "text": ["some text"] * 400,
        "id": [*range(400)],
        "subject": [n // 25 for n in range(400)],
    }
    table = pyarrow.table(rows)
    files = {name: tmp_path / f"{name}.parquet" for name in ("sorted", "mixed", "few")}
    pyarrow.parquet.write_table(table, files["sorted"], row_group_size=20)
    turn = np.random.default_rng(0).permutation(400)
    pyarrow.parquet.write_table(table.take(turn), files["mixed"], row_group_size=20)
    pyarrow.parquet.write_table(table, files["few"], row_group_size=200)
    found = {name: data(file).notes() for name, file in files.items()}
    assert (found["mixed"], found["few"]) == ((), ())
    assert (
        "is sorted by its column 'subject' and read a few row groups at a time"
        in found["sorted"][0]
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sequence": 32}, "windows of 2 documents, the data now has windows of 1 documents"),
        ({"packing": Packing.cut}, "rows packed by fit, the data now has rows packed by cut"),
        ({"shuffle_windows": 3}, "16 windows mixed, the data now has 3 windows mixed"),
        ({"validation_share": 0.5}, "60 documents, the data now has "),
    ],
)
def test_a_position_of_other_data_is_refused_in_words(
    corpus: Path, changes: dict[str, Any], told: str
) -> None:
    before = endless(data(corpus))
    now = endless(replace(data(corpus), **changes))
    with pytest.raises(DataError) as raised:
        now.set_state(before.get_state())
    assert str(raised.value).startswith(f"the checkpoint was saved with {told}")
    assert str(raised.value).endswith("the run began with, or start a new run")
