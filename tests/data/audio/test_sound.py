"""Sound files to waves of 16 kHz, windows and log-mel spectrograms."""

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import transformers

from systolic.core.errors import DataError, NotFoundError
from systolic.data.audio import cut, log_mel, num_samples, read_sound
from tests.speech import needs_recordings, recording


def tone(hertz: int, seconds: float = 1.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * hertz)) / hertz)


@pytest.mark.parametrize(
    ("name", "hertz", "subtype"),
    [
        ("a.wav", 8_000, "PCM_16"),
        ("a.wav", 16_000, "PCM_U8"),
        ("a.wav", 48_000, "FLOAT"),
        ("a.flac", 44_100, "PCM_24"),
    ],
)
def test_any_rate_depth_and_channels_become_mono_of_16_khz(
    tmp_path: Path, name: str, hertz: int, subtype: str
) -> None:
    wave = tone(hertz)
    # The mean of the channels is the tone.
    soundfile.write(tmp_path / name, np.stack([1.5 * wave, 0.5 * wave], axis=1), hertz, subtype)
    read = read_sound(tmp_path / name)
    assert (read.dtype, len(read)) == (np.float32, 16_000)
    assert num_samples(tmp_path / name) == 16_000
    inner = slice(400, -400)  # A filter rings at the ends.
    np.testing.assert_allclose(read[inner], tone(16_000)[inner], atol=0.01)


def test_a_file_that_is_no_sound_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_text("no sound")
    soundfile.write(tmp_path / "b.wav", np.zeros(0), 8_000)
    for name, kind, says in (
        ("a.wav", DataError, "can't be read as sound"),
        ("b.wav", DataError, "has no sound"),
        ("c.wav", NotFoundError, "is not a file"),
    ):
        with pytest.raises(kind, match=says) as caught:
            read_sound(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert num_samples(tmp_path / "a.wav") == 0


NOISE = np.random.default_rng(0).normal(scale=0.1, size=16_000 * 6).astype(np.float32)


def encoded(kind: str, subtype: str, wave: np.ndarray = NOISE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, 16_000, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [
        ("MP3", "MPEG_LAYER_III"),
        ("WAV", "PCM_16"),
        ("WAVEX", "PCM_24"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("FLAC", "PCM_16"),
        ("AIFF", "PCM_16"),
    ],
)
def test_a_file_that_lacks_its_end_is_refused(tmp_path: Path, kind: str, subtype: str) -> None:
    whole = encoded(kind, subtype)
    assert len(read_sound(whole, "the audio")) == len(NOISE)
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    for source in (whole[: len(whole) // 2], whole[: len(whole) * 9 // 10], tmp_path / "cut"):
        with pytest.raises(DataError, match="the audio") as caught:
            read_sound(source, "the audio")
        assert "\n" not in str(caught.value)


def test_a_wave_from_a_pipe_has_no_size_and_is_read() -> None:
    """Whoever writes to a pipe does not know the length when it writes the header."""
    whole = encoded("WAV", "PCM_16")
    at = whole.index(b"data") + 4
    for unknown in (0xFFFFFFFF, 0x7FFFF000):
        size = unknown.to_bytes(4, "little")
        piped = whole[:4] + size + whole[8:at] + size + whole[at + 4 :]
        assert len(read_sound(piped, "the audio")) == len(NOISE)


def test_a_tag_after_the_last_page_is_no_sound() -> None:
    for kind, subtype in (("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III"), ("WAV", "PCM_16")):
        tagged = encoded(kind, subtype) + b"TAG" + bytes(125)
        assert len(read_sound(tagged, "the audio")) == len(NOISE)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_no_numbers_are_refused(value: float) -> None:
    wave = NOISE.copy()
    wave[70_000] = value
    with pytest.raises(DataError, match="the audio has NaN or infinite samples"):
        read_sound(encoded("WAV", "FLOAT", wave), "the audio")


@pytest.mark.parametrize("mels", [80, 128])
def test_spectrograms_of_noise_are_those_of_transformers(mels: int) -> None:
    wave = np.random.default_rng(0).normal(scale=0.1, size=50_000).astype(np.float32)
    check(wave, mels)


@needs_recordings
def test_spectrograms_of_speech_are_those_of_transformers() -> None:
    check(read_sound(recording("agent-alreadyon")), 80)


def check(wave: np.ndarray, mels: int) -> None:
    extract = transformers.WhisperFeatureExtractor(feature_size=mels)
    expected = extract(wave, sampling_rate=16_000, return_tensors="np").input_features[0]
    found = log_mel(wave, 3000, mels)
    assert (found.shape, found.dtype) == ((3000, mels), np.float32)
    np.testing.assert_allclose(found, expected.T, atol=1e-4)


def test_long_recordings_are_cut_where_it_is_quiet() -> None:
    wave = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    wave[44_000:47_000] = 0.0
    parts = list(cut(wave, 48_000))
    assert 44_000 <= len(parts[0]) <= 47_000
    assert all(len(part) <= 48_000 for part in parts)
    np.testing.assert_array_equal(np.concatenate(parts), wave)
    assert [len(part) for part in cut(wave[:48_000], 48_000)] == [48_000]
