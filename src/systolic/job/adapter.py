"""Trained part of a model: all of it, or small matrices beside frozen weights."""

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from systolic.core.dependent_options import Needs, check_needs
from systolic.core.errors import OptionError, nearest
from systolic.core.ranges import POSITIVE, Range, check


class AdapterKind(enum.Enum):
    """Kind of fine-tuning."""

    none = "none"
    """All weights train."""
    lora = "lora"
    """Low-rank matrices beside frozen weights train (LoRA, Hu et al. 2021)."""
    qlora = "qlora"
    """LoRA whose frozen matrices beside them are stored in 4 bits (nf4; QLoRA, Dettmers et al. 2023)."""


ADAPTS = Needs(
    "--adapter lora", "all weights train", lambda adapter: adapter.kind is not AdapterKind.none
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Adapters of a model's matrices: x W + scale (x A) B, where only A [inputs, rank] and B [rank, outputs] train.

    B starts at zero, so that training begins with the model as it was.

    Raises:
        OptionError: a number outside its range, or a setting without adapters.
    """

    kind: AdapterKind = AdapterKind.none
    rank: Annotated[int, Range(least=1, most=2**14), ADAPTS] = 16
    """Columns of A and rows of B."""
    alpha: Annotated[float, POSITIVE, ADAPTS] = 32.0
    """The products are scaled by alpha / rank."""
    targets: Annotated[tuple[str, ...], ADAPTS] = ()
    """Names of the matrices that get adapters; () for all of attention and MLP."""

    def __post_init__(self) -> None:
        check(self)
        check_needs(self, "adapter")

    def __bool__(self) -> bool:
        """Whether weights are frozen and adapters train."""
        return self.kind is not AdapterKind.none

    @property
    def scale(self) -> float:
        """Factor of (x A) B."""
        return self.alpha / self.rank

    def check(self, model: str, names: Collection[str]) -> None:
        """Checks the targets against the matrices of a model that can have adapters.

        Args:
            model: Name of the model's class.
            names: Of its matrices.

        Raises:
            OptionError: it has none, or a target is none of them.
        """
        if not self:
            return
        if not names:
            raise OptionError(
                f"adapter is {self.kind.value}, and {model} has no matrices that take adapters; train all of it with --adapter none"
            )
        for target in self.targets:
            if target not in names:
                raise OptionError(
                    f"adapter targets have {target!r}{nearest(target, names)}; {model} has {', '.join(sorted(names))}"
                )
