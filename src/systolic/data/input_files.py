"""Inputs from files for a model that takes arrays by name; it brings no data of its own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.files import nearest_file
from systolic.job.data import Batches, Data, Field, Read, Split

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFiles(Data):
    """``.npz`` files with an array for each input, all examples of a file first; every split is empty."""

    inputs: Mapping[str, Field]
    """By name, without the batch dim."""
    repeated: tuple[str, ...] = ()
    """Inputs that are the same for all examples, and have no batch dim in a file."""
    together: int = 1
    """Examples that the model computes together, because they depend on each other: a file has a multiple of it."""

    unread: tuple[str, ...] = ()
    """Other arrays that a file may have, which are left out."""

    def fields(self) -> Mapping[str, Field]:
        """The inputs."""
        return dict(self.inputs)

    def size(self, split: Split) -> int:
        """0: there are no examples."""
        del split
        return 0

    def open(self, read: Read) -> Batches:
        """Refuses.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            f"an imported program brings no {read.split.value} data; train it in a recipe of your own, with systolic.data.arrays.Arrays"
        )

    def load(self, path: Path) -> dict[str, Any]:
        """The one example of a file; raises as :meth:`examples`."""
        found = list(self.examples(path))
        if len(found) != 1:
            raise DataError(f"{path} has {len(found)} examples; give a file with one")
        return found[0]

    def examples(self, path: Path) -> "Iterator[dict[str, np.ndarray]]":
        """Examples of a ``.npz`` file, or of a ``.npy`` file where there is one input.

        Raises:
            NotFoundError: there is no such file.
            DataError: it is no file of numpy's, or an input is missing, unknown, or of another shape or kind.
        """
        arrays = self._arrays(path)
        count = next((len(one) for name, one in arrays.items() if name not in self.repeated), 0)
        if count % self.together:
            raise DataError(
                f"{path} has {count} examples, and the model's outputs for one depend on the others of its batch of {self.together}; give a multiple of {self.together}, or import the model again with another example batch"
            )
        for number in range(count):
            yield {
                name: one if name in self.repeated else one[number] for name, one in arrays.items()
            }

    def _arrays(self, path: Path) -> "dict[str, np.ndarray]":
        import numpy as np

        try:
            found = np.load(path, allow_pickle=False)
        except FileNotFoundError as error:
            raise NotFoundError(
                f"{path} is not a file{nearest_file(path)}; check the path"
            ) from error
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} is no .npz file of arrays; write it with numpy.savez"
            ) from error
        if isinstance(found, np.ndarray):
            given = dict(zip(self.inputs, [found], strict=False))
        else:
            with found:
                given = {name: one for name, one in found.items() if name not in self.unread}
        unknown, missing = (
            sorted(set(given) - set(self.inputs)),
            sorted(set(self.inputs) - set(given)),
        )
        if unknown or missing:
            raise DataError(
                f"{path} has the arrays {', '.join(sorted(given)) or 'none'}, and the model takes {self._wanted()}; name them so with numpy.savez"
            )
        arrays = {name: self._checked(path, name, given[name]) for name in self.inputs}
        if len({len(one) for name, one in arrays.items() if name not in self.repeated}) > 1:
            raise DataError(
                f"the arrays of {path} differ in their first dim; it is the number of examples"
            )
        return arrays

    def _checked(self, path: Path, name: str, array: "np.ndarray") -> "np.ndarray":
        import numpy as np

        field = self.inputs[name]
        own = array.shape if name in self.repeated else array.shape[1:]
        if own != tuple(field.shape) or (array.ndim == 0 and name not in self.repeated):
            raise DataError(
                f"{name} in {path} is {list(array.shape)}, and the model takes {self._wanted()}; change its shape"
            )
        kinds = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}
        if array.dtype.kind not in kinds.get(np.dtype(field.dtype).kind, "f"):
            raise DataError(
                f"{name} in {path} is {array.dtype}, and the model takes {field.dtype}; convert it"
            )
        return array.astype(field.dtype)

    def _wanted(self) -> str:
        def one(name: str, field: Field) -> str:
            batch = [] if name in self.repeated else ["examples"]
            return f"{name} {field.dtype}[{', '.join(map(str, [*batch, *field.shape]))}]"

        return ", ".join(one(name, field) for name, field in self.inputs.items())
