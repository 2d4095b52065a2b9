"""Manifests of recordings as batches."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from systolic.core.errors import DataError, NotFoundError
from systolic.data.audio import Recordings, Writing, log_mel, read_manifest, read_sound
from systolic.data.input_files import FILES
from systolic.job import Read, Split
from systolic.job.data import MASK, OnError

WRITING = Writing(prompt=(300, 301, 302), end=303)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Ten recordings of 0.1 to 1 s; a window of 30 positions is 0.6 s."""
    rng, rows = np.random.default_rng(0), []
    for number in range(10):
        wave = rng.normal(scale=0.1, size=800 * (number + 1))
        soundfile.write(tmp_path / f"{number}.wav", wave, 8_000)
        rows.append(json.dumps({"audio": f"{number}.wav", "text": f" n{number} \n"}))
    (tmp_path / "all.jsonl").write_text("\n".join(rows))
    return tmp_path / "all.jsonl"


def data(path: Path, **changes: object) -> Recordings:
    given = {"path": path, "writing": WRITING, "sequence": 12, "frames": 30, "mels": 20}
    return Recordings(**{**given, **changes})


def read(split: Split = Split.train, **changes: object) -> Read:
    return Read(**{"split": split, "batch": 3, "shuffle": False, "epochs": 1, **changes})


def test_a_batch_has_spectrogram_prompt_text_and_end(manifest: Path) -> None:
    of = data(manifest, validation_share=0.2)
    batch = next(of.open(read()))
    assert {name: (a.shape, a.dtype.name) for name, a in batch.items() if name != MASK} == {
        name: ((3, *field.shape), field.dtype) for name, field in of.fields().items()
    }
    wave = read_sound(manifest.parent / "1.wav")
    np.testing.assert_array_equal(batch["features"][1], log_mel(wave, 60, 20))
    text = list(b" n1")
    assert batch["tokens"][1].tolist() == [300, 301, 302, *text, 0, 0, 0, 0, 0, 0]
    assert batch["targets"][1].tolist() == [-1, -1, *text, 303, -1, -1, -1, -1, -1, -1]
    assert (of.size(Split.train), of.size(Split.validation), of.size(Split.test)) == (8, 2, 0)


def test_recordings_and_texts_that_are_too_long_are_named_and_have_no_weight(
    manifest: Path,
) -> None:
    FILES.clear()
    of = data(manifest, validation_share=0.0)
    masks = np.concatenate([batch[MASK] for batch in of.open(read())])
    # Those of 0.7 to 1 s exceed the window; 12 places in batches of 3.
    assert masks.tolist() == [1] * 6 + [0] * 6
    assert "6.wav has 11200 samples at 16 kHz and a window 9600" in FILES.take()[0]
    short = data(manifest, validation_share=0.0, sequence=5, on_error=OnError.stop)
    with pytest.raises(DataError, match="has 3 tokens after a prompt of 3, and a row 5"):
        next(short.open(read()))
    FILES.clear()


def test_neighbours_share_a_window(manifest: Path) -> None:
    of = data(manifest, validation_share=0.0, joined=True)
    batch = next(of.open(read()))
    # 0.1 + 0.2 + 0.3 s fill a window of 0.6 s.
    waves = [read_sound(manifest.parent / f"{number}.wav") for number in range(3)]
    np.testing.assert_array_equal(batch["features"][0], log_mel(np.concatenate(waves), 60, 20))
    assert bytes(batch["tokens"][0][3:].tolist()).decode() == " n0 n1 n2"
    assert bytes(batch["tokens"][1][3:6].tolist()).decode() == " n3"


def test_a_saved_position_continues(manifest: Path) -> None:
    of = data(manifest, validation_share=0.0)
    batches = of.open(read(epochs=None, shuffle=True, seed=3))
    next(batches)
    state, expected = batches.get_state(), next(batches)
    again = of.open(read(epochs=None, shuffle=True, seed=3))
    again.set_state(state)
    found = next(again)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    for one in (batches, again):
        one.close()
    FILES.clear()


def test_manifests_are_json_lines_or_tabs_and_mistakes_have_a_line(tmp_path: Path) -> None:
    file = tmp_path / "m.tsv"
    file.write_text('a.wav\tIt\'s "so".\n\n/b.flac\tYes\n')
    assert read_manifest(file) == [(tmp_path / "a.wav", 'It\'s "so".'), (Path("/b.flac"), "Yes")]
    file.write_text("a.wav\tone\nb.wav two\n")
    with pytest.raises(DataError, match=r"line 2 of .*m.tsv is no recording \(1 columns\)"):
        read_manifest(file)
    file.write_text('{"audio": "a.wav"}')
    with pytest.raises(DataError, match=r"line 1 .*'text'"):
        read_manifest(file)
    with pytest.raises(NotFoundError, match="can't be read"):
        read_manifest(tmp_path / "none")
    with pytest.raises(DataError, match="has no recording for test"):
        data(file.with_name("x")).open(read(Split.test))
    assert Recordings(path=None).size(Split.train) == 0
    elsewhere = data(file).at(tmp_path / "other")
    assert (elsewhere.path, elsewhere.validation) == (None, tmp_path / "other")


def test_lines_of_manifests_end_at_line_feeds_alone(tmp_path: Path) -> None:
    file = tmp_path / "manifest.tsv"
    file.write_bytes('a.wav\tone\u2028two\r\n{"audio": "b.wav", "text": "c\x85d"}\n'.encode())
    assert [row.audio.name for row in read_manifest(file)] == ["a.wav", "b.wav"]
    file.write_bytes(b"a.wav\tna\xefve\n")
    with pytest.raises(DataError, match=r"manifest.tsv is not UTF-8 text"):
        read_manifest(file)
