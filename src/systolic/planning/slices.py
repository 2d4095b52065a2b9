"""Slices that a plan is over: names, chips that stand for all of their slices, and ``any``."""

from collections.abc import Sequence

from systolic.chips import ChipKind, Slice, chips, named_slices, slice
from systolic.core.errors import OptionError
from systolic.core.units import plural
from systolic.planning.goal import PriceTerm, hourly

ANY = "any"


def all_slices(
    on: str | Slice | Sequence[str | Slice], max_chips: int, price: PriceTerm | None
) -> list[Slice]:
    """Slices that are given, and those that names stand for, each once.

    Raises: as :func:`slices_of`.
    """
    slices: dict[str, Slice] = {}
    for part in [on] if isinstance(on, str | Slice) else on:
        meant = slices_of(part, max_chips, price) if isinstance(part, str) else [part]
        slices |= {place.name: place for place in meant}
    return list(slices.values()) or slices_of("", max_chips, price)


def slices_of(text: str, max_chips: int, price: PriceTerm | None) -> list[Slice]:
    """The slices of a list of names, of chips and of ``any`` (those with a price, where ``price`` is given); each once, as given.

    Raises:
        NotFoundError: a name that is neither a slice nor a chip.
        OptionError: nothing is left below ``max_chips``.
    """
    slices: dict[str, Slice] = {}
    for word in (part.strip() for part in text.split(",")):
        if word:
            slices |= {on.name: on for on in _meant(word, max_chips, price)}
    if not slices:
        raise OptionError("--on names no slice; give v5e-16,v5p-8, a chip such as v5e, or any")
    return list(slices.values())


def _meant(word: str, max_chips: int, price: PriceTerm | None) -> list[Slice]:
    """The slices that one word of the list stands for."""
    tpus = [chip for chip in chips() if chip.kind is ChipKind.tpu and chip.slice_rule is not None]
    if word.lower() == ANY:
        slices = [
            on
            for chip in tpus
            for on in named_slices(chip)
            if price is None or hourly(on, price) is not None
        ]
        what = "of TPUs" if price is None else f"with a price {price.value}"
    else:
        meant = [chip for chip in tpus if word.lower() in (chip.name, *chip.aliases)]
        if not meant:
            on = slice(word)
            if on.platform == "cpu":
                raise OptionError(
                    f"{on.name} is this machine: plan is for TPU and GPU slices; systolic forecast --on {on.name} shows one layout"
                )
            return [on]
        slices, what = named_slices(meant[0]), f"of {meant[0].name}"
    small = [on for on in slices if on.num_chips <= max_chips]
    if not small:
        raise OptionError(
            f"no slice {what} has {plural(max_chips, 'chip')} or fewer; raise --max-chips or name a slice"
        )
    return small
