"""Sound files as mono waves of 16 kHz and their log-mel spectrograms, as Whisper reads them (Radford et al.

2022, section 2.2). A file that is cut short is found by its headers, since libsndfile reads what is there and says
nothing.
"""

import io
from collections.abc import Iterator
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from systolic.core.errors import DataError, NotFoundError, extra

BYTE_ORDERS = {b"RIFF": "little", b"FORM": "big"}
"""Byte order of the sizes in files of chunks, by their first bytes."""
SAMPLES = (b"data", b"SSND")
"""Names of the chunk of samples."""
UNKNOWN = 0x7FFF_0000
"""Sizes from here on stand for one that was not known, as when a pipe was written to."""
SLACK = 64
"""Bytes by which headers are wrong that count themselves."""
PAGE = 27
"""Bytes of an Ogg page before its table of segments, whose size is the last of them."""


def lacks_end(file: BinaryIO) -> bool:
    """Whether the file says that it is longer than it is."""
    size = file.seek(0, 2)
    file.seek(0)
    first = file.read(4)
    if first == b"OggS":
        # Whether the last page goes on after the file's end.
        at = 0
        while at < size:
            file.seek(at)
            page = file.read(PAGE)
            if not page.startswith(b"OggS"):
                return b"OggS".startswith(page)  # else a tag
            segments = file.read(page[-1]) if len(page) == PAGE else b""
            at += PAGE + page[-1] + sum(segments)
        return at > size
    return first in BYTE_ORDERS and _chunk_lacks_end(file, size, BYTE_ORDERS[first] == "little")


def _chunk_lacks_end(file: BinaryIO, size: int, little: bool) -> bool:
    """Whether the chunk of samples goes on after the file's end."""
    at = 12
    while at + 8 <= size:
        file.seek(at)
        name, length = file.read(4), int.from_bytes(file.read(4), "little" if little else "big")
        at += 8
        if name in SAMPLES:
            return length < UNKNOWN and at + length > size + SLACK
        at += length + length % 2
    return False


RATE = 16_000
"""Samples a second."""
WINDOW = 400
"""Samples of a frame: 25 ms."""
HOP = 160
"""Samples between frames: 10 ms."""
FLOOR = 1e-10
"""Least power before the logarithm."""
DYNAMIC_RANGE = 8.0
"""Powers of ten below the loudest bin, at which a spectrogram is cut."""
BLOCK = 1 << 16
"""Samples that are decoded at once."""
SLACK_SECONDS = 0.1
"""By which the length in an MP3's header is wrong: a few of its frames."""
QUIET = 1600
"""Samples, 0.1 s, of the stretches among which a cut looks for the quietest."""
SEARCHED = 6
"""A cut lies in the last of so many parts of a window: the last 5 s of 30."""

KNEE, LINEAR_STEP, LOG_STEP = 1000.0, 200.0 / 3, float(np.log(6.4) / 27)
"""The mel scale, in hertz: linear up to 1 kHz and logarithmic above (Slaney, Auditory Toolbox, 1998)."""


def read_sound(
    source: Path | bytes, name: str = "", most_seconds: float | None = None
) -> np.ndarray:
    """f32[samples] in -1 to 1: channels averaged, resampled to :data:`RATE`; any format of libsndfile (WAV, FLAC, Ogg, MP3).

    Args:
        source: A file, or its content.
        name: What messages call it; by default its path.
        most_seconds: Refuses a longer recording; decodes no more than that, whatever its header says.

    Raises:
        NotFoundError: no such file.
        DataError: the file is no sound, empty, cut off, or too long, or has samples that are no numbers.
        MissingExtraError: the extra ``audio`` is not installed.
    """
    library, name = _soundfile(), name or str(source)
    if isinstance(source, Path) and not source.is_file():
        raise NotFoundError(f"{name} is not a file; check the path")
    try:
        with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as content:
            whole = not lacks_end(content)
        with library.SoundFile(source if isinstance(source, Path) else io.BytesIO(source)) as file:
            rate, says = file.samplerate, file.frames
            most = None if most_seconds is None else int(most_seconds * rate)
            parts, count = [], 0
            # Blocks are mixed down at once: a file of many channels takes no more memory than its wave.
            size = max(BLOCK // file.channels, 1)
            while len(block := file.read(size, dtype="float32", always_2d=True)):
                parts.append(block.mean(axis=1))
                count += len(block)
                if most is not None and count > most:
                    raise DataError(
                        f"{name} is longer than {most_seconds:g} s, the most for a recording; send it in parts"
                    )
    except (library.LibsndfileError, OSError) as error:
        raise DataError(
            f"{name} can't be read as sound ({error}); give WAV, FLAC, Ogg or MP3"
        ) from error
    if not count:
        raise DataError(f"{name} has no sound; give a longer recording")
    if not whole or count + int(SLACK_SECONDS * rate) < says:
        raise DataError(
            f"{name} lacks its end: there are {count / rate:.1f} s, and its header says more; give the whole file"
        )
    wave = np.concatenate(parts)
    if not np.isfinite(wave).all():
        raise DataError(f"{name} has NaN or infinite samples; give -1 to 1")
    if rate == RATE:
        return wave
    from scipy.signal import resample_poly

    common = gcd(RATE, rate)
    return resample_poly(wave, RATE // common, rate // common).astype(np.float32)


def num_samples(path: Path) -> int:
    """Samples that :func:`read_sound` returns, from the file's header; 0 if it can't be read."""
    library = _soundfile()
    try:
        about = library.info(path)
    except (library.LibsndfileError, OSError):
        return 0  # Reading it says why.
    return -(-about.frames * RATE // about.samplerate)


def _soundfile() -> Any:
    with extra("reading sound", "audio"):
        import soundfile
    return soundfile


def cut(wave: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Consecutive parts of at most ``most`` samples, cut in the quietest 0.1 s of the last sixth of each."""
    while len(wave) > most:
        first = most - most // SEARCHED
        stretch = max(1, min(QUIET, most // SEARCHED))
        count = (most - first) // stretch
        blocks = wave[first : first + count * stretch].reshape(count, stretch)
        quietest = int(np.argmin(np.square(blocks).sum(axis=1)))
        at = first + quietest * stretch + stretch // 2
        yield wave[:at]
        wave = wave[at:]
    yield wave


def log_mel(wave: np.ndarray, frames: int, mels: int) -> np.ndarray:
    """Log-mel spectrogram f32[frames, mels] of a wave f32[samples], silence after its end.

    Args:
        wave: At most ``frames`` x :data:`HOP` samples; more are dropped.
        frames: Frames, 10 ms each.
        mels: Mel bins.
    """
    half = WINDOW // 2
    whole = np.zeros(frames * HOP, np.float64)
    whole[: len(wave)] = wave[: len(whole)]
    # Frames are centred; the last, at the very end, is dropped.
    padded = np.pad(whole, half, mode="reflect")
    cuts = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:frames]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(cuts * hann, axis=1)) ** 2
    logs = np.log10(np.maximum(power @ mel_filters(mels), FLOOR))
    return ((np.maximum(logs, logs.max() - DYNAMIC_RANGE) + 4.0) / 4.0).astype(np.float32)


@lru_cache(maxsize=4)
def mel_filters(mels: int) -> np.ndarray:
    """f64[WINDOW / 2 + 1, mels]: triangles evenly spaced on the mel scale, of equal area."""
    edges = _hertz(np.linspace(0.0, _mel(RATE / 2), mels + 2))
    bins = np.linspace(0.0, RATE / 2, WINDOW // 2 + 1)[:, None]
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (bins - low) / (centre - low), (high - bins) / (high - centre)
    return np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (high - low)


def _mel(hertz: float) -> float:
    """Mels of a frequency above 1 kHz."""
    return KNEE / LINEAR_STEP + float(np.log(hertz / KNEE)) / LOG_STEP


def _hertz(mel: np.ndarray) -> np.ndarray:
    """Frequencies of mels."""
    linear, knee = mel * LINEAR_STEP, KNEE / LINEAR_STEP
    return np.where(mel < knee, linear, KNEE * np.exp(LOG_STEP * (mel - knee)))
