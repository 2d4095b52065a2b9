"""Recordings with their texts, for speech to text, read and analysed in windows on access; sound files as waves and log-mel spectrograms."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np

from systolic.core.errors import DataError, NotFoundError, OptionError, extra
from systolic.core.files import as_paths, lines_of
from systolic.core.ranges import COUNT, Range, check
from systolic.data.input_files import SIDE, pack
from systolic.data.random_access import Picks, Table
from systolic.data.text.text_data import FILL
from systolic.data.text.tokenizer import Tokenizer
from systolic.job import Data, Field, Read, Split
from systolic.job.data import MASK, Batches, Contents, OnError

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


def read_sound(
    source: Path | bytes, name: str = "", most_seconds: float | None = None
) -> np.ndarray:
    """f32[samples] in -1 to 1: channels averaged, resampled to :data:`RATE`; any format of libsndfile (WAV, FLAC, Ogg, MP3).

    A file that is cut short is found by its headers, since libsndfile reads what is there and says nothing.

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
    """Log-mel spectrogram f32[frames, mels] of a wave f32[samples], silence after its end, as Whisper reads it (Radford et al. 2022, section 2.2).

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """Tokens that the text of a recording starts and ends with, and those that it never has."""

    prompt: tuple[int, ...] = ()
    """Start of every text: start of transcript, and where a model knows several, language, task and no timestamps."""
    end: int = 0
    """End of every text."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never written: marks of speakers and of noise."""
    suppressed_first: tuple[int, ...] = ()
    """Tokens that no text starts with: a space, and the end."""
    silence: int | None = None
    """Token of no speech, whose probability is read after the first token of the prompt; None for a model without one."""
    no_speech: float = 0.6
    """Probability of it above which an unlikely text is left out (the default of OpenAI's whisper/transcribe.py)."""
    likely: float = -1.0
    """Mean log probability of the tokens of a text, its end included, from which it is kept all the same (as above)."""
    assumed: str = ""
    """Language that is written because the files name none, such as ``English``; empty where they name one."""


class Window(NamedTuple):
    """A part of a recording that a model hears at once."""

    features: "np.ndarray"
    """f32[2 x frames, mels]: its spectrogram, silence at the end."""
    start_seconds: float
    end_seconds: float


class Utterance(NamedTuple):
    """A line of a manifest."""

    audio: Path
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recordings(Data):
    """Recordings named by a manifest: features f32[2 x frames, mels], tokens and targets int32[sequence].

    A manifest has a JSON object {"audio": PATH, "text": TEXT} a line, or the two separated by a tab; paths
    are relative to it. The targets are the tokens of the text and its end; the prompt has none.
    """

    path: Path | None = None
    """Manifest; without one the training and validation splits are empty."""
    validation: Path | None = None
    """Manifest of the validation split; None takes a share of the lines."""
    validation_share: Annotated[float, Range(least=0, below=0.5)] = 0.1
    """Share of the lines, evenly spaced, for validation where it has no manifest."""
    tokenizer: Path | None = None
    """A ``tokenizer.json`` or its folder; None reads bytes."""
    writing: Writing = field(default_factory=Writing)
    sequence: Annotated[int, Range(least=2, most=2**20)] = 448
    """Tokens of a text, prompt and end included."""
    frames: Annotated[int, COUNT] = 1500
    """Positions of the model's encoder, 20 ms each."""
    mels: Annotated[int, COUNT] = 80
    """Mel bins."""
    joined: bool = False
    """Whether recordings that follow each other in the manifest share a window, as many as fit."""
    on_error: OnError = OnError.skip
    """Handling of a recording that can't be read or is too long, or whose text is."""

    def __post_init__(self) -> None:
        as_paths(self, "path", "validation", "tokenizer")
        check(self)

    @property
    def samples(self) -> int:
        """Samples of a window."""

        return 2 * self.frames * HOP

    def fields(self) -> Mapping[str, Field]:
        """features, tokens and targets."""
        text = Field(shape=(self.sequence,), dtype="int32", axes=("sequence",))
        sound = Field(shape=(2 * self.frames, self.mels), dtype="float32")
        return {"features": sound, "tokens": text, "targets": text}

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the texts."""
        return Tokenizer(path=self.tokenizer)

    def encoding(self) -> Sequence[str]:
        """Encoding of the tokenizer."""
        return self.get_tokenizer().about()

    def with_tokenizer(self, path: Path) -> "Recordings":
        """The same data with the tokenizer in a folder."""
        return replace(self, tokenizer=path)

    def lines(self, split: Split) -> list[Utterance]:
        """Lines of a split, in the order of the manifest.

        Raises:
            NotFoundError: no such manifest.
            DataError: a line that is neither form, or has no text.
        """
        if split is Split.test:
            return []
        if self.validation is not None:
            path = self.path if split is Split.train else self.validation
            return [] if path is None else read_manifest(path)
        if self.path is None:
            return []
        lines, share = read_manifest(self.path), self.validation_share
        held = [int((i + 1) * share) > int(i * share) for i in range(len(lines))]
        wanted = split is Split.validation
        return [line for line, own in zip(lines, held, strict=True) if own is wanted]

    def size(self, split: Split) -> int | None:
        """Recordings in a split; ``None`` where several share a window."""
        count = len(self.lines(split))
        return None if self.joined and count else count

    def contents(self, split: Split) -> Contents | None:
        """Fingerprint of the split's manifest."""
        from systolic.data.fingerprint import of_files

        own = self.validation if split is Split.validation else self.path
        return None if own is None or split is Split.test else of_files(own.parent, [own])

    def files(self, split: Split) -> Sequence[Path]:
        """The recordings of a split."""
        return [line.audio for line in self.lines(split)]

    def notes(self) -> tuple[str, ...]:
        """A line where the language is not known."""
        if not self.writing.assumed:
            return ()
        return (
            f"the model knows many languages, and its files ask to find out which is spoken, which is not done: {self.writing.assumed} is written; give another as language in its generation_config.json, such as german",
        )

    def lasting(self) -> frozenset[str]:
        """Settings that decide which recordings make a window."""
        return frozenset(("validation_share", "sequence", "frames", "mels", "joined"))

    def at(self, path: Path) -> "Recordings":
        """See :class:`Data`."""
        return replace(self, path=None, validation=path)

    def open(self, read: Read) -> Batches:
        """Batches of a split.

        Raises:
            NotFoundError: no such manifest.
            DataError: no recording in the split, or one that can't be read where these are not skipped.
            MissingExtraError: the extra ``audio`` is not installed.
        """
        from systolic.data.random_access import open_table

        lines = self.lines(read.split)
        if not lines:
            raise DataError(
                f"{self.path or self.validation} has no recording for {read.split.value}; give a manifest with some"
            )
        tokens = self.get_tokenizer().encode_all([f" {line.text}" for line in lines])
        return open_table(
            Spoken(self, lines, tokens, groups(self, lines, tokens)), read, self.fields(), FILL
        )

    def windows(self, wave: "np.ndarray") -> "list[Window]":
        """Windows of a recording f32[samples] (:func:`systolic.data.audio.read_sound`), in order."""

        windows, at = [], 0
        for part in cut(wave, self.samples):
            features = log_mel(part, 2 * self.frames, self.mels)
            windows.append(Window(features, at / RATE, (at + len(part)) / RATE))
            at += len(part)
        return windows


def read_manifest(path: Path) -> list[Utterance]:
    """Lines of a manifest.

    Raises:
        NotFoundError: no such file.
        DataError: it is not UTF-8, or a line that is neither form, or has no text.
    """
    try:
        rows = lines_of(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise NotFoundError(f"{path} can't be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}); write it in UTF-8") from error
    utterances = []
    for number, row in enumerate(rows, 1):
        try:
            line = json.loads(row) if row.lstrip().startswith("{") else _tabbed(row)
            audio, text = line["audio"], line["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'line {number} of {path} is no recording ({error}); write {{"audio": PATH, "text": TEXT}}, or the two with a tab between'
            ) from error
        utterances.append(Utterance(path.parent / str(audio), " ".join(str(text).split())))
    return utterances


def _tabbed(row: str) -> dict[str, str]:
    cells = row.split("\t")
    if len(cells) != 2:
        raise ValueError(f"{len(cells)} columns")
    return {"audio": cells[0], "text": cells[1]}


def checked_prompt(writing: Writing, vocab: int) -> None:
    """Refuses tokens that a model does not have.

    Raises:
        OptionError: one is beyond its vocabulary, or there is no prompt.
    """
    silence = () if writing.silence is None else (writing.silence,)
    others = (*writing.suppressed, *writing.suppressed_first, *silence)
    used = (*writing.prompt, writing.end, *others)
    if not writing.prompt or max(used) >= vocab or min(used) < 0:
        raise OptionError(
            f"texts start with the tokens {writing.prompt} and use ids {min(used)} to {max(used)}, and the model has {vocab}; give the tokenizer that belongs to it"
        )


def groups(
    data: Recordings, lines: Sequence[Utterance], tokens: Sequence[np.ndarray]
) -> list[range]:
    """Numbers of the lines of each window: one, or as many in a row as fit where windows are shared."""
    if not data.joined:
        return [range(i, i + 1) for i in range(len(lines))]
    ranges, start, sound = [], 0, 0
    text = room = data.sequence - len(data.writing.prompt)
    for number, (line, ids) in enumerate(zip(lines, tokens, strict=True)):
        length = num_samples(line.audio)
        if number > start and (sound + length > data.samples or len(ids) > text):
            ranges.append(range(start, number))
            start, sound, text = number, 0, room
        sound, text = sound + length, text - len(ids)
    return [*ranges, range(start, len(lines))]


class Spoken(Table):
    """Spectrograms and texts of windows.

    Args:
        data: Its sizes and prompt.
        lines: Recordings.
        tokens: Of each recording's text, int32[n].
        windows: Numbers of the recordings of each window.
    """

    def __init__(
        self,
        data: Recordings,
        lines: Sequence[Utterance],
        tokens: Sequence[np.ndarray],
        windows: Sequence[range],
    ) -> None:
        self._data, self._lines, self._tokens, self._windows = data, lines, tokens, windows

    def __len__(self) -> int:
        return len(self._windows)

    def take(self, picks: Picks) -> dict[str, np.ndarray]:
        """features f32[n, 2 x frames, mels], tokens and targets int32[n, sequence]; mask f32[n] and reasons where some can't be read.

        Raises:
            DataError: a recording that can't be read or is too long, under the rule ``stop``.
        """
        data, count = self._data, len(picks.indices)
        arrays = {
            "features": np.zeros((count, 2 * data.frames, data.mels), np.float32),
            "tokens": np.zeros((count, data.sequence), np.int32),
            "targets": np.full((count, data.sequence), -1, np.int32),
        }
        mask, reasons = np.ones(count, np.float32), []
        for row, index in enumerate(picks.indices):
            try:
                arrays["features"][row] = self._features(self._windows[index])
                tokens, targets = self._text(self._windows[index])
            except (DataError, NotFoundError) as error:
                if data.on_error is OnError.stop:
                    raise
                mask[row] = 0
                reasons.append(str(error))
                continue
            arrays["tokens"][row, : len(tokens)] = tokens
            arrays["targets"][row, : len(tokens)] = targets
        return arrays | ({MASK: mask, SIDE: pack(reasons)} if reasons else {})

    def _features(self, numbers: range) -> np.ndarray:
        wave = np.concatenate([read_sound(self._lines[n].audio) for n in numbers])
        if len(wave) > self._data.samples:
            raise DataError(
                f"{self._lines[numbers[0]].audio} has {len(wave)} samples at 16 kHz and a window {self._data.samples}; cut it and its text into parts"
            )
        return log_mel(wave, 2 * self._data.frames, self._data.mels)

    def _text(self, numbers: range) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of a window, the prompt's without a loss."""
        writing = self._data.writing
        ids = np.concatenate([self._tokens[n] for n in numbers])
        if len(writing.prompt) + len(ids) > self._data.sequence:
            raise DataError(
                f"the text of {self._lines[numbers[0]].audio} has {len(ids)} tokens after a prompt of {len(writing.prompt)}, and a row {self._data.sequence}; cut the recording into parts"
            )
        before = len(writing.prompt) - 1
        tokens = np.concatenate([np.array(writing.prompt), ids])
        return tokens, np.concatenate([np.full(before, -1), ids, [writing.end]])
