"""Quantization of runs: trained with rounded matrices, with data that has moved; and budgets that are not met."""

import html
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import systolic
from systolic.cli.main import main
from systolic.core.errors import OptionError
from systolic.formats.matrices import _matrices, formats_of
from systolic.inference.model import TrainedModel, set_up_here
from systolic.job import Job, MatrixFormat, Precision, WeightFormat
from systolic.models.decoder.config import Decoder
from systolic.quantizing.quantize import Evaluated, QuantizedModel, _notes, quantize
from systolic.quantizing.rounder import Rounder
from systolic.quantizing.sensitivity import Choice, Measure, Quality, choose, quality_of
from systolic.quantizing.view import _over, _share, fallen
from systolic.runs.weights import Weights
from tests.quantizing.test_quantizing import Given, matrices
from tests.runs import bundled

INT8 = MatrixFormat(format=WeightFormat.int8)
INT4 = MatrixFormat(format=WeightFormat.int4, group=64)
FINER = MatrixFormat(format=WeightFormat.int4, group=32)
WIDE = Decoder(layers=1, d_model=64, d_ff=64, heads=1, kv_heads=1, head_dim=64, vocab=384)
"""Groups of 64 inputs are whole."""


def in_memory(job: Job, precision: Precision) -> TrainedModel:
    """A model with random weights, so large that rounding them shows."""
    setup = set_up_here(replace(job, precision=precision))
    rng, steps = np.random.default_rng(0), setup.steps
    drawn = {
        path: rng.normal(size=shape.shape).astype(np.float32) / 2
        for path, shape in steps.network.params.items()
    }
    params = jax.device_put(drawn, dict(steps.shardings.params))
    weights = Weights(step=0, params=params, model_state={}, skipped=[])
    return TrainedModel(Path("nowhere"), setup, weights, None)


def test_losses_are_measured_as_the_bundle_computes(tmp_path: Path) -> None:
    """Which rounds what its formats say and nothing else."""
    job = bundled.job("lm", tmp_path)
    trained, plain = (in_memory(job, one) for one in (Precision.qat_int4, Precision.bf16))
    measure, bundle = (Measure(model, None, 1) for model in (trained, plain))
    known = _matrices(job.model, trained.setup.steps.network, {})
    asked = formats_of(known, INT4, ())
    rounder = Rounder(known, trained=INT4)
    assert all(rounder.trained(path, how) for path, how in asked.items())
    # As trained: nothing is lost but the order of a scale and a product in bfloat16.
    assert abs(measure.lost(rounder, asked)) < 2e-3
    assert abs(measure.before.value / bundle.before.value - 1) > 0.01
    alone = {"blocks/out": asked["blocks/out"]}
    for formats in ({"blocks/out": INT8}, alone):
        rounded = rounder.rounded(trained.weights, formats)
        assert measure.of(rounded) == bundle.of(rounded)
    # Of another platform, dtype or rows of a batch they are others.
    assert measure.where == ("bfloat16", "cpu", 4)
    # What a matrix costs alone is beside a model in which no other is rounded.
    few = measure.fewer(1)
    assert few.lost(rounder, alone) == bundle.lost(rounder, alone)
    assert measure.lost(rounder, alone) != few.lost(rounder, alone)


def test_other_groups_than_those_of_training_are_fitted() -> None:
    known = matrices(a=128)
    value = jax.random.normal(jax.random.key(0), (128, 128))

    def codes(how: MatrixFormat, trained: MatrixFormat | None) -> np.ndarray:
        (made,) = Rounder(known, trained=trained).codes("a", how, [value])
        return np.asarray(made.codes)

    assert (codes(INT4, INT4) != codes(INT4, None)).any()
    np.testing.assert_array_equal(codes(FINER, INT4), codes(FINER, None))


class Broken(Given):
    """One matrix that makes losses no numbers in 4 bits."""

    def lost(self, rounder: Any, formats: Mapping[str, MatrixFormat]) -> float:
        lost = super().lost(rounder, formats)
        return math.nan if formats.get("b") == FINER else lost


def test_a_loss_that_is_no_number_keeps_no_budget() -> None:
    known = matrices(a=64, b=64, c=64)
    asked = formats_of(known, FINER, ())
    given = Broken({"a": 0.001, "b": 0.1, "c": 0.002})
    made = choose(given, Rounder(known), asked, 0.006)
    assert made.formats == {**asked, "b": INT8}
    assert made.sensitivities[0].path == "b"

    class Never(Given):
        def lost(self, rounder: Any, formats: Mapping[str, MatrixFormat]) -> float:
            return math.nan

    with pytest.raises(OptionError, match="no matrix can be quantized within --budget"):
        choose(Never({}), Rounder(known), asked, 0.5)


def result(before: Quality | None, after: Quality | None, **more: Any) -> QuantizedModel:
    """What a quantization found."""
    sizes = {"bytes_before": 2, "bytes_after": 1, "matrices": (), "left": (), "outputs": None}
    answers: Any = {"answers_before": {}, "answers_after": {}}
    about: Any = {"path": Path("out"), "asked": INT4, **sizes, **answers, **more}
    return QuantizedModel(before=before, after=after, **about)


def test_a_model_that_fell_far_is_said() -> None:
    def of(name: str, *values: float) -> QuantizedModel:
        return result(*(Quality(name=name, value=one) for one in values))

    fell = [of("accuracy", 0.7, 0.55), of("perplexity", 10.0, 12.5), of("loss", 1.0, math.nan)]
    fell += [of("perplexity", 10.0, math.inf), result(None, None, apart=0.61)]
    assert [one.fell for one in fell] == [True] * 5
    kept = of("accuracy", 0.7, 0.65), of("perplexity", 10.0, 11.9), result(None, None, apart=0.1)
    assert not any(one.fell for one in kept)
    said = fallen(fell[1])
    assert "out is hardly the same model: perplexity fell far, from 10 to 12.5; give --cal" in said
    assert "outputs of a probe are 61% of their own spread away" in fallen(fell[-1])


def test_another_format_than_that_of_training_is_said(tmp_path: Path) -> None:
    job = bundled.job("lm", tmp_path)
    assert _notes(job, INT8) == ()
    trained = replace(job, precision=Precision.qat_int4)
    assert _notes(trained, INT4) == ()
    for how in (INT8, FINER):
        (said,) = _notes(trained, how)
        assert said.startswith(
            "trained with qat-int4, which rounds weights to int4 in groups of 64"
        )
        assert said.endswith("--to int4 writes those that it was trained with")


def test_no_loss_has_no_sign() -> None:
    for name, shown in (("accuracy", "+0.00 points"), ("perplexity", "+0.00%")):
        value = Quality(name=name, value=0.9)
        assert _share(result(value, value)) == shown


def test_a_loss_beyond_all_perplexities_is_infinite(tmp_path: Path) -> None:
    found = quality_of(bundled.job("lm", tmp_path), {"loss": 1e4})
    assert found.value == math.inf
    assert found.lost(Quality(name="perplexity", value=10.0)) == math.inf


@pytest.mark.parametrize(("value", "met"), [(10.04, True), (10.06, False), (math.nan, False)])
def test_a_budget_that_the_bundle_does_not_keep_is_said(value: float, met: bool) -> None:
    before, after = (Quality(name="perplexity", value=one) for one in (10.0, value))
    choice = Choice(formats={}, sensitivities=(), lost=0.004, budget=0.005)
    made = result(before, after, choice=choice)
    assert made.to_json()["budget_met"] is met
    said = _over(made)
    assert len(said) == (not met)
    page = html.unescape(made._repr_html_())
    assert "out: no matrix in int4" in page
    assert all(line in page for line in said)
    assert all("the budget of 0.500% was not met: the Bundle is at" in line for line in said)


@pytest.mark.slow
def test_a_run_trained_with_rounded_matrices_loses_nothing(tmp_path: Path) -> None:
    """Codes are those that it was trained with, whatever others have a smaller error."""
    job = replace(bundled.job("lm", tmp_path), model=WIDE, precision=Precision.qat_int4)
    systolic.train(job, run=tmp_path / "run")
    made = quantize(tmp_path / "run", tmp_path / "out", to=INT4, budget=0.005)
    assert made.lost is not None
    assert made.choice is not None
    # In bfloat16, in which scales are applied before or after a product.
    assert abs(made.lost) < 2e-3
    assert abs(made.choice.lost) < 2e-3
    assert made.budget_met
    assert {one.chosen for one in made.choice.sensitivities} == {"int8", str(INT4)}
    (tmp_path / "other.txt").write_text("the capital of Spain is Madrid, yes or no " * 80)
    on = Evaluated(calibration=tmp_path / "other.txt")
    with pytest.raises(OptionError, match="trained as int4 in groups of 64 rounds them"):
        quantize(tmp_path / "run", tmp_path / "other", to=INT4, on=on)
    finer = quantize(tmp_path / "run", tmp_path / "finer", to=FINER, on=on)
    assert finer.path.is_dir()


def test_a_run_whose_data_has_moved_is_quantized_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = bundled.run("lm", tmp_path)
    gone = (tmp_path / "text").rename(tmp_path / "elsewhere").with_name("text")
    int8 = ["quantize", str(run), "--to", "int8", "--out", str(tmp_path / "int8")]
    for more, said in (
        (["--auto"], "a budget needs data to measure the loss on: give it with --data"),
        (["--activations"], "will see with --calibrate"),
        (["--keep", "nothing"], "--keep nothing fits none of the matrices"),
    ):
        assert main([*int8, *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()  # before weights are read
        assert said in line
    assert main([*int8, "--repeats", "0"]) == 0
    shown = capsys.readouterr().out
    assert f"quality was not measured (data moved: {gone} does not exist): give the" in shown
    kept = json.loads((tmp_path / "int8" / "bundle.json").read_text())["source"]
    assert (kept["kind"], kept["name"]) == ("run", "run")
    assert main(["compare", str(run), str(tmp_path / "int8"), "--repeats", "0"]) == 0
    assert "same greedy token at" in capsys.readouterr().out
    again = ["--to", "bundle", "--out", str(tmp_path / "again")]
    assert main(["export", str(tmp_path / "int8"), *again]) == 2
    assert "int8 is a Bundle already; copy its folder to" in capsys.readouterr().err
    assert {one.name for one in tmp_path.iterdir()} == {"run", "int8", "elsewhere"}


@pytest.mark.slow
def test_a_run_of_bytes_is_exported_to_transformers_where_its_data_has_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = bundled.run("lm", tmp_path)
    (tmp_path / "text").rename(tmp_path / "elsewhere")
    assert main(["export", str(run), "--out", str(tmp_path / "hf")]) == 0
    shown = capsys.readouterr().out
    assert "no tokenizer is in it: the model reads bytes" in shown
    assert "parity with the source over" in shown
