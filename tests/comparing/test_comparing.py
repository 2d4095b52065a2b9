"""Two models side by side."""

import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import systolic
from systolic.cli.main import main
from systolic.comparing.comparison import ComparedModel, Comparison, shared_inputs
from systolic.comparing.view import lines
from systolic.core.errors import OptionError
from systolic.inference.latency import TimedCall, medians
from systolic.runs.bundle.record import EvaluationRecord
from systolic.runs.weights import sizes_of
from tests.runs import bundled


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of a small language model and its Bundle."""
    folder = tmp_path_factory.mktemp("language")
    run = bundled.run("lm", folder)
    systolic.export(run, folder / "bundle", to="bundle")
    return run, folder / "bundle"


@pytest.mark.slow
def test_a_run_and_its_bundle_are_the_same_model(
    language: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, bundle = language
    text = run.parent / "text"
    words = ["--data", str(text), "--prompt-tokens", "20", "--output-tokens", "4"]
    sizes = ["--repeats", "2", "--rows", "2"]
    assert main(["compare", str(run), str(bundle), *words, *sizes, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    one, other = made["a"], made["b"]
    assert one["parameters"] == other["parameters"] == bundled.DECODER_PARAMETERS
    assert one["bytes_by_dtype"] == other["bytes_by_dtype"]
    assert one["bytes_by_dtype"] == {"float32": 4 * one["parameters"]}
    weights = bundle / "weights.safetensors"
    assert (one["file_bytes"], other["file_bytes"]) == (None, weights.stat().st_size)
    assert one["evaluations"] == other["evaluations"]
    assert [each["on"] for each in one["evaluations"]] == ["validation"]
    assert main(["eval", str(bundle), "--path", str(text), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)["metrics"][str(text)]
    for side in (one, other):
        assert side["measured"] == pytest.approx(evaluated, rel=1e-6)
        assert set(side["seconds"]) == {"prefill", "decode"}
        assert min(side["seconds"].values()) > 0
        assert re.fullmatch(r"prefill 1 x \d+, \d+ pages; .*decode \d+, \d+ pages", side["program"])
        assert side["device"] == "1 x cpu"
    assert made["agreement"]["same_best"] == 1.0
    assert made["agreement"]["max_abs"] == pytest.approx(0, abs=1e-6)
    assert made["timed"] == {"rows": 2, "prompt_tokens": 20, "output_tokens": 4, "repeats": 2}


def test_a_comparison_in_a_notebook_and_adapters_beside_their_model(tmp_path: Path) -> None:
    recorded = [EvaluationRecord(on="test", metrics={"loss": 0.5, "top_5": None}, step=3)]

    def side(name: str, adapters: int) -> ComparedModel:
        sizes = {"parameters": 100, "adapter_parameters": adapters, "bytes_by_dtype": {}}
        about: Any = {"kind": "Decoder", "task": "LanguageModel", "precision": "f32", **sizes}
        return ComparedModel(path=tmp_path / name, file_bytes=None, recorded=recorded, **about)

    told: Any = {"agreement": None, "disagreement": "other inputs", "device": "cpu"}
    made = Comparison(a=side("a", 12), b=side("b", 0), timed={}, data=None, on=(), **told)
    shown = html.unescape(re.sub("<[^>]+>", "", made._repr_html_()))
    assert [line.rstrip() for line in shown.strip("\n").splitlines()] == lines(made)
    assert [line.split() for line in lines(made) if "adapters" in line] == [
        ["of", "its", "adapters", "12", "0"]
    ]
    assert not any("adapters" in line for line in lines(replace(made, a=made.b)))
    assert repr(made) == f"<Comparison of {tmp_path / 'a'} and {tmp_path / 'b'}: other inputs>"
    assert ["test", "loss", "on", "record", "0.5000", "0.5000"] in [
        line.split() for line in lines(made)
    ]
    assert made.to_json()["a"]["adapter_parameters"] == 12
    assert made.to_json()["b"]["evaluations"][0]["metrics"] == {"loss": 0.5, "top_5": None}


@pytest.mark.slow
def test_another_task_is_refused_in_one_line(
    language: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = bundled.run("cnn", tmp_path)
    assert main(["compare", str(language[1]), str(other), "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.strip().splitlines()
    assert "is a Decoder for LanguageModel" in line
    assert "is a CNN for Classification; compare two models of one task" in line


@pytest.mark.slow
def test_two_networks_for_the_same_pictures(tmp_path: Path) -> None:
    for kind in ("cnn", "vit"):
        (tmp_path / kind).mkdir()
        bundled.run(kind, tmp_path / kind)
    made = systolic.compare_models(
        tmp_path / "cnn/run", tmp_path / "vit/run", repeats=1, rows=4, on="cpu", quick=True
    )
    assert made.agreement is not None
    assert made.agreement.positions == 4
    assert made.agreement.max_abs > 0
    assert set(made.a.speeds.seconds) == {"call"}
    assert made.timed == {"rows": 4, "repeats": 1}
    for side in (made.a, made.b):
        assert side.speeds.forecasts["cpu"].step_seconds > 0
    shown = "\n".join(lines(made))
    assert "CNN, f32 here" in shown
    assert "step on cpu" in shown
    assert "validation accuracy on record" in shown


@pytest.mark.slow
def test_a_server_is_forecast_for_language_models(language: tuple[Path, Path]) -> None:
    made = systolic.compare_models(
        *language, repeats=0, prompt_tokens=16, output_tokens=8, on="cpu, v5e-1", quick=True
    )
    for side in (made.a, made.b):
        assert list(side.speeds.forecasts) == ["cpu", "v5e-1"]
        forecast = side.speeds.forecasts["cpu"]
        (point,) = forecast.points
        assert point.concurrency == 1
        assert forecast.weights_bytes == side.bytes
    shown = "\n".join(lines(made))
    assert "new tokens/s on cpu" in shown
    assert "per token on v5e-1" in shown


class Turns(TimedCall):
    """Notes whose turn it is; takes the next of its times."""

    def __init__(self, name: str, times: list[float], now: list[float], seen: list[str]) -> None:
        self.name, self.times, self.now, self.seen = name, times, now, seen

    def seconds(self, clock: Callable[[], float]) -> dict[str, float]:
        start = clock()
        self.seen.append(self.name)
        self.now[0] += self.times.pop(0)
        return {"call": clock() - start}

    def sizes(self) -> dict[str, int]:
        return {"rows": 1}


def test_calls_take_turns_and_the_first_of_each_does_not_count() -> None:
    now, seen = [0.0], list[str]()
    a = Turns("a", [90.0, 1.0, 5.0, 2.0], now, seen)
    b = Turns("b", [80.0, 7.0, 3.0, 4.0], now, seen)
    assert medians([a, b], 3, lambda: now[0]) == [{"call": 2.0}, {"call": 4.0}]
    assert seen == ["a", "b", "a", "b", "b", "a", "a", "b"]


def test_sizes_count_bits_and_leave_scales_out() -> None:
    import jax.numpy as jnp

    arrays = {
        "up/codes": jnp.zeros((4, 6), jnp.int4),
        "up/scales": jnp.zeros((1, 6), jnp.bfloat16),
        "norm": jnp.zeros(3, jnp.float32),
    }
    found = sizes_of(arrays)
    assert found.elements == 24 + 3
    assert found.bytes_by_dtype == {"int4": 12, "bfloat16": 12, "float32": 12}


def test_models_that_read_different_things_are_not_compared(tmp_path: Path) -> None:
    one = bundled.job("cnn", tmp_path)
    pixels = replace(bundled.PIXELS, size=16)
    from systolic.data.image.pictures import Preparation
    from systolic.formats.hugging_face.preprocessor import OutsidePictures

    data = OutsidePictures(preparation=Preparation(side=16), channels=1)
    model: Any = one.model
    other = replace(one, model=replace(model, pixels=pixels), data=data)
    assert "images have different sizes, [8, 8, 1] and [16, 16, 1]" in shared_inputs(one, other)
    found = shared_inputs(one, one)
    assert not isinstance(found, str)
    assert found[0]["image"].shape == (4, 8, 8, 1)
    assert found[0]["image"].dtype == np.uint8


@pytest.mark.parametrize("field", ["rows", "prompt_tokens", "output_tokens"])
def test_a_count_that_is_none(field: str) -> None:
    with pytest.raises(OptionError, match="0"):
        systolic.compare_models("a", "b", **{field: 0})


@pytest.mark.parametrize(
    ("slow", "fast", "before", "counted"), [(12, 7, 12, 5), (300, 200, 1, 5), (2000, 1800, 1, 1)]
)
def test_a_turn_of_a_runtime_counts_no_call_before_the_cores_are_awake(
    slow: int, fast: int, before: int, counted: int
) -> None:
    """Calls of so many ms: 4 x 12 + 8 x 7 are more than 100, and five of 200 are one second."""
    path = Path(__file__).parents[2] / "benchmarks" / "runtimes.py"
    spec = spec_from_file_location("runtimes", path)
    assert spec is not None
    assert spec.loader is not None
    runtimes = module_from_spec(spec)
    spec.loader.exec_module(runtimes)
    ms = [0]

    def call() -> dict[str, float]:
        ms.append(slow if sum(ms) < 40 else fast)
        return {"call": ms[-1] / 1000}

    calls = runtimes.turn(call, lambda: sum(ms) / 1000, lambda: 2 * sum(ms) / 1000)
    assert len(ms) - 1 == before + counted
    assert len(calls) == counted
    assert {stages["call"] for stages in calls} == {fast / 1000}
    assert calls[0]["cpu"] == pytest.approx(2 * fast / 1000)
