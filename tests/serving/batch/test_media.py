"""Files of strangers: what is read, how large it may be, and what is no picture, sound or text."""

import io
import struct
import time
import zlib
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from systolic.core.errors import DataError, OptionError
from systolic.data.audio import read_sound
from systolic.data.image.pictures import Preparation, check_picture
from systolic.formats.hugging_face.preprocessor import OutsidePictures
from systolic.serving.batch.buckets import InputLimits
from systolic.serving.batch.intake import ImageIntake, SpeechIntake, TextIntake
from systolic.serving.request import RefusedError

DATA = OutsidePictures(preparation=Preparation(side=8, shorter=9), classes=("a", "b"))
LIMITS = InputLimits(pixels=10_000, bytes=50_000, seconds=2.0, examples=4)


class Form:
    """A form with nothing but the data of its job."""

    def __init__(self, data: Any) -> None:
        self.steps: Any = type("", (), {"job": type("", (), {"data": data})})


@pytest.fixture
def pictures() -> ImageIntake:
    form: Any = Form(DATA)
    return ImageIntake(form, LIMITS)


def encoded(kind: str, size: tuple[int, int] = (20, 12), **more: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **more)
    return out.getvalue()


def objects(*values: Any) -> np.ndarray:
    made = np.empty(len(values), object)
    made[:] = values
    return made


def read(intake: Any, name: str, *values: Any) -> list[Any]:
    inputs = {name: objects(*values)}
    assert intake.check(inputs) == len(values)
    return [example for part in intake.parts(inputs) for example in part()]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_pictures_get_the_preparation_of_the_model(
    pictures: ImageIntake, kind: str, tmp_path: Any
) -> None:
    content = encoded(kind)
    (example,) = read(pictures, "image", content)
    file = tmp_path / f"a.{kind.lower()}"
    file.write_bytes(content)
    wanted = DATA.load(file)["image"]
    np.testing.assert_array_equal(example.rows[0].arrays["image"], wanted)
    assert wanted.shape == (8, 8, 3)


def test_pixels_are_taken_as_they_are(pictures: ImageIntake) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3)).astype(np.uint8)
    inputs = {"image": pixels}
    assert pictures.check(inputs) == 3
    found = [example for part in pictures.parts(inputs) for example in part()]
    np.testing.assert_array_equal([one.rows[0].arrays["image"] for one in found], pixels)
    for wrong in (pixels.astype(np.float32), pixels[:, :7], pixels[:0]):
        with pytest.raises(OptionError, match=r"give files, or uint8\[examples, 8, 8, 3\]"):
            pictures.check({"image": wrong})


def bomb(side: int) -> bytes:
    """A PNG of a few kilobytes with ``side`` x ``side`` black pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((side // 8 + 1) * min(side, 2000)), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_pixels_are_counted_before_they_are_decoded(pictures: ImageIntake) -> None:
    for side, says in (
        (104, "104 x 104 pixels, and at most 10000"),
        (12_000, "pixels"),
        (60_000, "too many pixels"),
    ):
        content = bomb(side)
        assert len(content) < 20_000
        start = time.perf_counter()
        with pytest.raises(DataError, match=says):
            read(pictures, "image", content)
        assert time.perf_counter() - start < 0.5
    assert len(read(pictures, "image", encoded("PNG", (100, 100)))) == 1


def test_what_is_no_picture_is_one_line(pictures: ImageIntake) -> None:
    whole = encoded("PNG")
    for content in (
        b"",
        b"GIF89a",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"\xff" * 100,
        whole[:40],
        encoded("TIFF"),
    ):
        with pytest.raises(DataError) as caught:
            read(pictures, "image", content)
        assert "the image is not a picture that can be read; give JPEG, PNG" in str(caught.value)
    with pytest.raises(DataError, match="the image is damaged"):
        read(pictures, "image", encoded("JPEG", (100, 100))[:-2000])
    with pytest.raises(DataError, match="image 1 is not a picture"):
        read(pictures, "image", whole, b"no")
    with pytest.raises(RefusedError, match="has 50001 bytes, and at most 50000"):
        pictures.check({"image": objects(bytes(50_001))})
    with pytest.raises(RefusedError, match="5 examples, and at most 4"):
        pictures.check({"image": objects(*[whole] * 5)})
    with pytest.raises(OptionError, match="has a int; give bytes"):
        pictures.check({"image": objects(3)})


def test_random_bytes_of_pictures_raise_nothing_else() -> None:
    draw = np.random.default_rng(0)
    form: Any = Form(DATA)
    intake = ImageIntake(form, InputLimits())
    failed = 0
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP"):
        whole = bytearray(encoded(kind))
        for _ in range(40):
            damaged = bytearray(whole)
            for place in draw.integers(0, len(damaged), 4):
                damaged[place] = draw.integers(256)
            try:
                check_picture(bytes(damaged), 10_000, "it")
            except DataError:
                failed += 1
    assert failed
    assert intake.labels == ("a", "b")


def sound(seconds: float, rate: int = 8_000, channels: int = 1, kind: str = "WAV") -> bytes:
    wave = np.random.default_rng(0).normal(scale=0.1, size=(int(seconds * rate), channels))
    out = io.BytesIO()
    soundfile.write(out, wave, rate, format=kind)
    return out.getvalue()


class Waves:
    """A reader that keeps the wave."""

    form = None

    def prompt(self, language: str) -> np.ndarray:
        return np.zeros(1, np.int32)

    def read(self, wave: np.ndarray, prompt: np.ndarray) -> np.ndarray:
        return wave


@pytest.fixture
def recordings() -> SpeechIntake:
    reader: Any = Waves()
    return SpeechIntake(reader, LIMITS)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
def test_sound_of_bytes_is_that_of_a_file(
    recordings: SpeechIntake, kind: str, tmp_path: Any
) -> None:
    content = sound(0.25, 44_100, 2, kind)
    (tmp_path / "a").write_bytes(content)
    (wave,) = read(recordings, "audio", content)
    np.testing.assert_array_equal(wave, read_sound(tmp_path / "a"))
    assert len(wave) == 4_000


def test_a_recording_is_not_decoded_past_the_limit(recordings: SpeechIntake) -> None:
    (whole,) = read(recordings, "audio", sound(2.0))
    assert len(whole) == 32_000
    # Silence of minutes in a few hundred bytes.
    out = io.BytesIO()
    soundfile.write(out, np.zeros(8_000 * 600), 8_000, format="FLAC")
    assert len(out.getvalue()) < 50_000
    with pytest.raises(DataError, match="the audio is longer than 2 s"):
        read(recordings, "audio", out.getvalue())
    with pytest.raises(RefusedError, match="audio has 3 s, and at most 2 s"):
        recordings.check({"audio": np.zeros((1, 48_000), np.float32)})
    for wrong in (np.zeros((1, 10)), np.zeros(10, np.float32), np.zeros((0, 10), np.float32)):
        with pytest.raises(
            OptionError, match=r"give files, or float32\[examples, samples\] of 16000 Hz"
        ):
            recordings.check({"audio": wrong})


def test_what_is_no_sound_is_one_line(recordings: SpeechIntake) -> None:
    whole = sound(0.5)
    for content in (b"", b"RIFF", b"\0" * 100, b"fLaC" + bytes(50), whole[:30]):
        with pytest.raises(DataError) as caught:
            read(recordings, "audio", content)
        assert "the audio" in str(caught.value)
        assert "\n" not in str(caught.value)


class Letters:
    """A reader whose model takes ten letters."""

    form, most = None, 10

    def ids(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array([ord(one) for one in text]) for text in texts]

    def of(self, ids: np.ndarray) -> list[int]:
        return ids[: self.most].tolist()


def test_a_text_that_is_longer_than_the_model_reads_is_refused() -> None:
    intake = TextIntake(Letters(), 300, LIMITS)  # ty: ignore[invalid-argument-type]
    assert read(intake, "text", "a" * 10, [97] * 10) == [[97] * 10] * 2
    for long in ("a" * 11, [97] * 11):
        with pytest.raises(
            OptionError,
            match="text 1 has 11 tokens, and the model reads up to 10; shorten or split it",
        ):
            read(intake, "text", "a", long)


def test_what_is_no_text_is_one_line() -> None:
    intake = TextIntake(Letters(), 300, LIMITS)  # ty: ignore[invalid-argument-type]
    assert read(intake, "text", "a", b"b", "ü".encode()) == [[97], [98], [252]]
    with pytest.raises(DataError, match="text 1 is not UTF-8"):
        read(intake, "text", "a", b"\xff\xfe")
    with pytest.raises(RefusedError, match="at most 50000"):
        intake.check({"text": objects("a" * 50_001)})
