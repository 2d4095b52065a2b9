"""Forecasts need shapes only, and strings and dotted names mean from Python what they mean on the command line."""

import importlib
import json
import pkgutil
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import systolic
from systolic import recipes
from systolic.compiling import JobProgram
from systolic.core.errors import NotFoundError, OptionError
from systolic.job import (
    Adapter,
    AdapterKind,
    Dtypes,
    Layout,
    Optimizer,
    OptimizerKind,
    Precision,
    Remat,
)
from systolic.job.precision import Stored
from systolic.models.decoder.config import Decoder
from systolic.models.families import published
from systolic.planning.analytic import facts_of
from systolic.recipes.image import CLASSES, image
from systolic.recipes.jobs import source_of
from systolic.recipes.lm import lm
from systolic.recipes.sft import sft

CONFIG = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
    **{"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
}
NEEDED: dict[str, dict[str, Any]] = {"sft": {"from_": "smollm2-135m"}}
"""Options of shipped recipes without which there are no shapes."""


@pytest.mark.parametrize("name", recipes.shipped())
def test_every_recipe_has_shapes_without_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = source_of(name, {**NEEDED.get(name, {}), "steps": 3}).job
    assert JobProgram(job=job).key() is not None
    assert facts_of(job).job == job


@pytest.mark.slow
def test_a_fine_tune_begins_with_a_config_or_a_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    by_folder = sft(from_=tmp_path)
    assert isinstance(by_folder.model, Decoder)
    assert (by_folder.model.d_model, by_folder.model.layers) == (64, 2)
    assert sft(from_=tmp_path / "config.json").model == by_folder.model
    wanted = published()["smollm2-135m"]
    for name in ("smollm2-135m", wanted.hub, str(tmp_path / "smollm2-135m")):
        assert sft(from_=Path(name)).model == wanted.model()
    with pytest.raises(NotFoundError, match="nothing does not exist, and no published model has"):
        sft(from_=Path("nothing"))
    pytest.importorskip("libtpu")
    made = systolic.forecast("sft", from_=tmp_path, adapter="qlora", on="v5e-1", quick=True)
    assert made.fits
    assert made.unit == "tokens"
    assert made.units == 4 * 1024


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("sft", {"from_": "smollm2-135m"}, "add --data with JSONL, one conversation a line"),
        ("sft", {"from_": "smollm2-135m", "data": "x.jsonl"}, "has no tokenizer.json, which only"),
        ("image", {}, "add --path with a folder that has one folder of pictures a class"),
    ],
)
def test_training_says_what_is_missing(
    name: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=told):
        systolic.train(name, run=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_pictures_have_the_classes_of_imagenet_without_a_folder() -> None:
    assert image().model.num_classes == CLASSES  # ty: ignore[unresolved-attribute]
    assert image(model="vit-b", classes=3).model.num_classes == 3  # ty: ignore


def test_text_stands_for_a_member_of_an_enum() -> None:
    assert lm(precision="int8").precision is Precision.int8  # ty: ignore[invalid-argument-type]
    assert Layout(remat="full").remat is Remat.full  # ty: ignore[invalid-argument-type]
    assert Layout(remat="Save_Names").remat is Remat.save_names  # ty: ignore
    assert Optimizer(kind="muon").kind is OptimizerKind.muon  # ty: ignore[invalid-argument-type]
    assert Adapter(kind="qlora").kind is AdapterKind.qlora  # ty: ignore[invalid-argument-type]
    assert Dtypes(moments="bf16").moments is Stored.bf16  # ty: ignore[invalid-argument-type]
    assert replace(lm(), precision="f32").precision is Precision.f32
    for make, told in (
        (lambda: lm(precision="int9"), "precision is 'int9'; did you mean int8?; it takes auto,"),
        (lambda: Layout(remat="ful"), "layout.remat is 'ful'; did you mean full?; it takes none,"),
        (lambda: Layout(remat=True), "layout.remat is True; it takes none,"),
        (lambda: replace(lm(), precision=None), "precision is None; it takes auto,"),
    ):
        with pytest.raises(systolic.SystolicError) as raised:
            make()
        assert told in str(raised.value)


def enums_of(kind: Any) -> list[str]:
    hints = get_type_hints(kind)
    return [
        one.name
        for one in fields(kind)
        if any(
            isinstance(k, type) and issubclass(k, Enum)
            for k in (hints[one.name], *get_args(hints[one.name]))
        )
    ]


def records() -> list[Any]:
    """Frozen records of jobs, data, models and tasks that can be made without arguments and have a field of an enum."""
    found = []
    for part in ("job", "data", "models", "steps.tasks"):
        package = importlib.import_module(f"systolic.{part}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for kind in vars(importlib.import_module(module.name)).values():
                own = isinstance(kind, type) and kind.__module__ == module.name
                if own and is_dataclass(kind) and kind.__dataclass_params__.frozen:  # ty: ignore
                    try:
                        kind()
                    except (TypeError, OptionError):
                        continue
                    if enums_of(kind):
                        found.append(kind)
    return found


def test_every_record_takes_text_for_its_enums() -> None:
    kinds = records()
    assert len(kinds) > 15
    for kind in kinds:
        made = kind()
        for name in enums_of(kind):
            value = getattr(made, name)
            if isinstance(value, Enum):
                assert getattr(replace(made, **{name: value.value}), name) is value, (kind, name)
            with pytest.raises(systolic.SystolicError, match="it takes "):
                replace(made, **{name: "no such word"})


def test_dotted_names_are_fields_of_options() -> None:
    options = {"model.layers": 5, "layout.fsdp": 8, "layout.remat": "full", "batch-per-device": 2}
    job = source_of("lm", options).job
    assert (job.model.layers, job.layout.fsdp, job.layout.remat) == (5, 8, Remat.full)  # ty: ignore
    assert job.batch.per_device == 2
    # One field may need another, so all are changed at once; and they change what is given beside them.
    scaling = {"model.rope-scaling.kind": "linear", "model.rope_scaling.factor": 2.0}
    made = source_of("lm", {**scaling, "model": Decoder(layers=3)}).job.model
    assert (made.layers, made.rope_scaling.factor) == (3, 2.0)  # ty: ignore[unresolved-attribute]
    assert source_of(lm(), {"layout.tensor": 4, "steps": 7}).job.layout.tensor == 4
    assert source_of("llama-3.1-8b", {"layout.fsdp": 8}).job.layout.remat is Remat.full
    for wrong, told in (
        ({"model.layer": 3}, "lm has no option 'model.layer'; did you mean model.layers?"),
        ({"modell": 3}, "lm has no option 'modell'; did you mean model?"),
        ({"model.layers": "x"}, "model.layers is 'x'; it takes a whole number"),
        ({"layout.remat": "ful"}, "layout.remat is 'ful'; did you mean full?"),
        ({"steps.x": 1}, "lm has no option 'steps.x'"),
    ):
        with pytest.raises(systolic.SystolicError) as raised:
            source_of("lm", wrong)
        assert told in str(raised.value)
