"""Picture files for a model whose training pictures are elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from systolic.core.errors import OptionError
from systolic.core.ranges import Range, check
from systolic.data.image.images import Images
from systolic.data.image.preparation import Preparation
from systolic.job import Data, Field, Read, Split
from systolic.job.data import Batches


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsidePictures(Data):
    """Pictures given one by one; all splits are empty."""

    preparation: Preparation
    channels: Annotated[int, Range(least=1, most=3)] = 3
    classes: tuple[str, ...] = ()
    """Names of the classes in label order; () where none are known."""

    def __post_init__(self) -> None:
        check(self)

    def fields(self) -> Mapping[str, Field]:
        """image uint8[side, side, channels] and label int32[]."""
        side = self.preparation.side
        return {
            "image": Field(shape=(side, side, self.channels), dtype="uint8"),
            "label": Field(shape=(), dtype="int32"),
        }

    def size(self, split: Split) -> int:
        """0: there are no pictures."""
        del split
        return 0

    def labels(self) -> tuple[str, ...]:
        """See :class:`Data`."""
        return self.classes

    def notes(self) -> tuple[str, ...]:
        """That labels are numbers, where names are not known."""
        if self.classes:
            return ()
        return ("the model does not say the names of its classes; labels are their numbers",)

    def open(self, read: Read) -> Batches:
        """Refuses.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            f"an imported model brings no {read.split.value} pictures; give a folder of pictures with --path"
        )

    def load(self, path: Path) -> dict[str, Any]:
        """A picture, or a .npy array, as image uint8[side, side, channels]; see :meth:`Images.load`."""
        return self._images(path.parent).load(path)

    def read(self, content: bytes, name: str) -> dict[str, Any]:
        """A picture's content; see :meth:`Images.read`."""
        return self._images(Path()).read(content, name)

    def at(self, path: Path) -> Images:
        """Class folders at a path, named by the classes.

        Raises:
            OptionError: the names of the classes are not known.
            DataError: a class folder that the model does not know, or folders of splits.
        """
        if not self.classes:
            raise OptionError(
                f"--path is {path}, but the model does not say the names of its classes; add id2label to its config.json"
            )
        return self._images(path).at(path)

    def _images(self, path: Path) -> Images:
        side = self.preparation.side
        return Images(
            path=path,
            side=side,
            channels=self.channels,
            classes=self.classes,
            preparation=self.preparation,
        )

    def with_labels(self, labels: tuple[str, ...]) -> "OutsidePictures":
        """See :class:`Data`."""
        return replace(self, classes=labels)
