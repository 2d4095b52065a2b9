"""Text with tokens hidden: which, as what, and the same again after a resume."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers

from systolic.core.errors import OptionError
from systolic.data.text.documents import Documents, StandardLibrary
from systolic.data.text.masked import Masked
from systolic.data.text.tokenizer import Tokenizer
from systolic.job import Layout, Read, Split
from systolic.job.data import MASK


def text(folder: Path, **more) -> Masked:
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    (folder / "b.txt").write_text("pack my box with five dozen liquor jugs\n" * 400)
    data = Documents(path=folder, validation=folder, sequence=64, shuffle_windows=2)
    return Masked(text=data, predictions=9, **more)


def read(data: Masked, count: int, state: bytes = b"", **more):
    stream = data.open(Read(split=Split.train, batch=16, **more))
    if state:
        stream.set_state(state)
    try:
        return [next(stream) for _ in range(count)], stream.get_state()
    finally:
        stream.close()


def test_masked_rows_by_their_rules(tmp_path: Path) -> None:
    data = text(tmp_path)
    assert (data.mask, data.vocab_size()) == (257, 258)
    (batches, _), (plain, _) = read(data, 8), read(data.text, 8)
    turned = {"mask": 0, "other": 0, "same": 0}
    for batch, before in zip(batches, plain, strict=True):
        assert set(batch) == {*data.fields(), MASK}
        for row in range(16):
            labels, places = batch["labels"][row], batch["places"][row]
            given = labels >= 0
            original, now = before["tokens"][row], batch["tokens"][row]
            allowed = (before["segments"][row] > 0) & (original != 256)
            # 15 % of the tokens, at most 9, each at a place of its own and never a mark of documents.
            assert given.sum() == min(max(round(0.15 * allowed.sum()), 1), 9)
            assert allowed[places[given]].all()
            assert len(set(places[given])) == given.sum()
            assert (original[places[given]] == labels[given]).all()
            rest = np.delete(np.arange(64), places[given])
            assert (now[rest] == original[rest]).all()
            for place, label in zip(places[given], labels[given], strict=True):
                kind = {257: "mask", label: "same"}.get(now[place], "other")
                turned[kind] += 1
    total = sum(turned.values())
    assert turned["mask"] / total == pytest.approx(0.8, abs=0.05)
    assert turned["other"] / total == pytest.approx(0.1, abs=0.03)
    assert turned["same"] / total == pytest.approx(0.1, abs=0.03)


def test_masks_follow_from_the_position_and_change_with_the_pass(tmp_path: Path) -> None:
    data = text(tmp_path)
    (batches, _), (_, at) = read(data, 6, seed=3), read(data, 3, seed=3)
    again, _ = read(data, 3, at, seed=3)
    for name in data.fields():
        for one, other in zip(batches[3:], again, strict=True):
            np.testing.assert_array_equal(one[name], other[name])
    assert not np.array_equal(read(data, 1, seed=4)[0][0]["places"], batches[0]["places"])
    # Rows come again in the passes after the first, with other tokens hidden.
    many, _ = read(data, 120, seed=3)
    seen: dict[bytes, set[bytes]] = {}
    for batch in many:
        tokens = batch["tokens"].copy()
        for row in range(16):
            given = batch["labels"][row] >= 0
            tokens[row, batch["places"][row][given]] = batch["labels"][row][given]
            seen.setdefault(tokens[row].tobytes(), set()).add(batch["places"][row].tobytes())
    assert max(map(len, seen.values())) > 1


def test_an_evaluation_hides_the_same_tokens_whatever_its_batch(tmp_path: Path) -> None:
    data = text(tmp_path)

    def places(size: int) -> np.ndarray:
        read = Read(split=Split.validation, batch=size, epochs=1, shuffle=False)
        stream = data.open(read)
        found = [batch["places"][batch[MASK] > 0] for batch in stream]
        stream.close()
        return np.concatenate(found)

    np.testing.assert_array_equal(places(16), places(5))


def test_the_tokenizers_own_mask_is_used(tmp_path: Path) -> None:
    names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {name: number for number, name in enumerate([*names, "a", "b"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[PAD]"))
    made.add_special_tokens(names)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(path=tmp_path)
    assert (tokenizer.mask, tokenizer.vocab_size) == (3, 6)
    assert (tokenizer.start, tokenizer.end) == (1, 2)
    data = Masked(text=Documents(path=tmp_path, tokenizer=tmp_path, sequence=64), predictions=3)
    assert (data.mask, data.vocab_size()) == (3, 6)
    assert Tokenizer().mask is None


def test_rehearsals_and_other_text_keep_the_share(tmp_path: Path) -> None:
    data = Masked(text=StandardLibrary(sequence=512))
    small = data.shrink(Layout(context=2))
    assert (small.sequence, small.predictions) == (128, 19)
    other = data.at(tmp_path)
    assert isinstance(other.text, Documents)
    assert other.predictions == 76
    with pytest.raises(OptionError, match="predictions is 76 and a row has 64 tokens"):
        Masked(text=StandardLibrary(sequence=64))
