"""Windows of recordings by number, read and analysed on access."""

from collections.abc import Sequence

import numpy as np

from systolic.core.errors import DataError, NotFoundError
from systolic.data.audio.recordings import Recordings, Utterance
from systolic.data.audio.sound import log_mel, num_samples, read_sound
from systolic.data.random_access import Picks, Table
from systolic.data.skipped_files import SIDE, pack
from systolic.job.data import MASK, OnError


def groups(
    data: Recordings, lines: Sequence[Utterance], tokens: Sequence[np.ndarray]
) -> list[range]:
    """Numbers of the lines of each window: one, or as many in a row as fit where windows are shared."""
    if not data.joined:
        return [range(i, i + 1) for i in range(len(lines))]
    found, start, sound = [], 0, 0
    text = room = data.sequence - len(data.writing.prompt)
    for number, (line, ids) in enumerate(zip(lines, tokens, strict=True)):
        length = num_samples(line.audio)
        if number > start and (sound + length > data.samples or len(ids) > text):
            found.append(range(start, number))
            start, sound, text = number, 0, room
        sound, text = sound + length, text - len(ids)
    return [*found, range(start, len(lines))]


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
