"""Full-size published models by name, from ``published.toml``; imports without jax."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from systolic.core.errors import misspelt, nearest
from systolic.job import Model
from systolic.models.families import Config, family

FAMILY = 6
"""Models of a family that a message names."""


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A published model: its configuration and its parameters, each with its source."""

    name: str
    """``llama-3.1-70b``."""
    hub: str
    """Its name on Hugging Face."""
    config: Config
    """Fields of its config.json that say what it computes."""
    config_source: str
    parameters: int
    """Parameters as published, embeddings included; of the text model."""
    counted_by: str
    """Source of the number of parameters."""
    exact: bool
    """Whether it is published to the digit; else ``parameters`` is what transformers 5.23 counts."""

    def model(self) -> Model:
        """The model of its configuration."""
        return family(self.config, self.name).model(self.config)


@cache
def published() -> Mapping[str, PublishedModel]:
    """All published models, by name."""
    text = files("systolic.models").joinpath("published.toml").read_text(encoding="utf-8")
    models: dict[str, PublishedModel] = {}
    for kin in tomllib.loads(text)["family"]:
        for name, fields in kin["models"].items():
            models[name] = PublishedModel(
                name=name,
                hub=fields["hub"],
                config={**kin["config"], **fields["config"]},
                config_source=kin["config_source"],
                parameters=fields["parameters"],
                counted_by=fields.get("counted_by", kin["counted_by"]),
                exact=kin.get("exact", True),
            )
    return models


def find_published(target: str) -> PublishedModel | None:
    """The published model of a name here or on Hugging Face, in any case; ``None`` if there is none."""
    known = published()
    lowered = target.lower()
    if lowered in known:
        return known[lowered]
    return next((model for model in known.values() if model.hub.lower() == lowered), None)


def near_published(target: str, others: Sequence[str] = ()) -> str:
    """Models, and other names, that may be meant: one that is misspelt, else those of the same family."""
    models = list(published())
    alike, typed = _of_family(target, models), target.lower()
    for model in alike:
        if len(model) == len(typed) and sum(a != b for a, b in zip(model, typed, strict=True)) == 1:
            return f"; did you mean {model}?"
    if typo := misspelt(target, [*others, *models]):
        return typo
    if not alike:
        return nearest(target, [*others, *models])
    shown = ", ".join(alike[:FAMILY]) + (" …" if len(alike) > FAMILY else "")
    return f"; of that family it knows {shown}, and takes the config.json of any other"


def _of_family(name: str, models: Sequence[str]) -> list[str]:
    """Models that begin with the same word: the sizes of llama-3.1 for ``llama`` or ``Llama-2-7b``."""
    word = re.match(r"[a-z]*", name.lower().rpartition("/")[2])
    first = word[0] if word else ""
    return [model for model in models if len(first) > 2 and re.split(r"[^a-z]", model)[0] == first]
