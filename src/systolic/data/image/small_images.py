"""Small images in memory, shifted and mirrored at random while training."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from systolic.core.errors import DataError, NotFoundError
from systolic.core.files import nearest_file
from systolic.data.random_access import Picks, Table, uniform

if TYPE_CHECKING:
    import numpy as np


class SmallImages(Table):
    """Images and labels; one gather picks, shifts and mirrors a whole batch.

    Changes depend on ``seed`` and an example's position in the stream only, so a resumed stream is
    the same stream.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        seed: int,
        shift: int = 0,
        flip: bool = False,
    ) -> None:
        """images uint8[n, height, width, channels], labels int32[n].

        ``shift`` is the most pixels an image moves along each dim (zeros come in), ``flip``
        mirrors every other image left to right.
        """
        self._size = images.shape[1:3]
        margin = ((0, 0), (shift, shift), (shift, shift), (0, 0))
        self._images = np.pad(images, margin) if shift else images
        self._labels, self._seed, self._shift, self._flip = labels, seed, shift, flip

    def __len__(self) -> int:
        return len(self._labels)

    def take(self, picks: Picks) -> dict[str, np.ndarray]:
        """image uint8[n, height, width, channels] and label int32[n]."""
        labels = self._labels[picks.indices]
        if not self._shift and not self._flip:
            return {"image": self._images[picks.indices], "label": labels}
        chance = uniform(self._seed, picks.positions, 3)
        moves = (chance[:, :2] * (2 * self._shift + 1)).astype(np.int64)
        rows = np.arange(self._size[0]) + moves[:, :1]
        columns = np.arange(self._size[1])[None, :].repeat(len(rows), axis=0)
        if self._flip:
            columns = np.where(chance[:, 2:] < 0.5, columns[:, ::-1], columns)
        columns = columns + moves[:, 1:2]
        index = picks.indices[:, None, None]
        return {
            "image": self._images[index, rows[:, :, None], columns[:, None, :]],
            "label": labels,
        }


def hold_out(labels: np.ndarray, shares: tuple[float, ...]) -> list[np.ndarray]:
    """Splits examples with every class in the same shares, identically on every machine.

    Args:
        labels: integers[n].
        shares: of each part but the first, which gets the rest.

    Returns:
        int64[...] for each part: the rest, then one for each share; sorted, disjoint, together all.
    """
    parts: list[list[np.ndarray]] = [[] for _ in range(len(shares) + 1)]
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(uniform(int(label), members, 1)[:, 0], kind="stable")]
        start = 0
        for part, share in zip(parts[1:], shares, strict=True):
            count = round(len(members) * share)
            part.append(members[start : start + count])
            start += count
        parts[0].append(members[start:])
    return [np.sort(np.concatenate(part)) if part else np.zeros(0, np.int64) for part in parts]


def read_picture(path: Path, size: int, channels: int, share: float = 1.0) -> np.ndarray:
    """A picture file (PNG, JPEG, ...) or a .npy array as uint8[size, size, channels].

    Pictures of another size are cropped to the centred square whose side is ``share`` of the
    shorter side, and resized.

    Raises:
        NotFoundError: there is no such file.
        DataError: it is not a picture, or an array of other numbers than bytes or 0 to 1.
        MissingExtraError: Pillow is not installed and the file needs it.
    """
    if not path.is_file():
        raise NotFoundError(
            f"{path} is not a file{nearest_file(path)}; give a picture (.png, .jpg) or a .npy array"
        )
    from systolic.data.image.pictures import as_image, centre, decode

    if path.suffix != ".npy":
        return centre(decode(path), size, channels, share, str(path))
    array = _bytes(path)
    if array.shape == (size, size, channels):
        return array
    return centre(as_image(array), size, channels, share, str(path))


def _bytes(path: Path) -> np.ndarray:
    """uint8[height, width, channels] of a .npy file."""
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(
            f"{path} is not a .npy array of numbers; write it with numpy.save"
        ) from error
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3) or 0 in array.shape:
        raise DataError(
            f"{path} has shape {array.shape}; a picture is [height, width] or [height, width, 1 or 3]"
        )
    if array.dtype.kind == "f" and array.min() >= 0 and array.max() <= 1:
        array = np.round(array * 255)
    elif array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
        raise DataError(
            f"{path} holds {array.dtype} from {array.min():g} to {array.max():g}; give bytes 0 to 255 or floats 0 to 1"
        )
    return array.astype(np.uint8)
