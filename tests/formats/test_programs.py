"""Exported programs: the framework's numbers at any batch, gradients, and files that are refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from systolic.core.errors import DataError, NotFoundError, OptionError, RunError
from systolic.data.input_files import InputFiles
from systolic.formats.program.description import PROGRAM
from systolic.formats.program.export import relative_error, write_program
from systolic.formats.program.exported import differences, exported_function
from systolic.formats.program.model import ExportedProgram
from systolic.job import Batch, Field, Job, Precision
from systolic.job import data as job_data
from systolic.models.program.config import made_by
from systolic.models.program.function import MASK
from systolic.models.program.torch_function import torch_function
from systolic.runs.job_record import job_from_json, types_of
from systolic.steps.tasks import ArrayOutputs
from tests.models.program import zoo

CNN_FLOPS = 2 * (8 * 8 * 16 * 9 + 256 * 10)
"""A 3x3 convolution of 1 to 16 channels on 8 x 8, and a layer of 256 to 10."""


def exported(make: Any, folder: Path) -> Any:
    """The framework's function, the program's, and its description."""
    there = torch_function(made_by(make, "torch", "zoo.py"), "zoo.py")
    about = write_program(there, folder)
    return there, exported_function(folder, about), about


def run(function: Any, inputs: Any) -> dict[str, np.ndarray]:
    call = jax.jit(lambda t, s, x: function.call(t, s, x, False, None)[0])
    return jax.device_get(call(dict(function.trained), dict(function.state), inputs))


def test_any_batch_and_gradients(tmp_path: Path) -> None:
    there, here, about = exported(zoo.cnn, tmp_path)
    assert about.batch is None
    assert about.platforms == ("cpu", "tpu", "cuda")
    assert about.flops_per_example == CNN_FLOPS
    assert about.parameters == 16 * 9 + 16 + 32 + 2560 + 10
    for count in (1, 7):
        x = np.random.default_rng(count).normal(size=(count, 1, 8, 8)).astype(np.float32)
        assert (
            relative_error(run(here, {"input": x})["output"], there.source({"input": x})["output"])
            < 1e-6
        )

    def gradients(function: Any) -> Any:
        def loss(trained: Any) -> jax.Array:
            made = function.call(trained, dict(function.state), there.example, False, None)[0]
            return (made["output"] ** 2).sum()

        return jax.jit(jax.grad(loss))(dict(function.trained))

    wanted, made = gradients(there), gradients(here)
    for name, one in wanted.items():
        np.testing.assert_allclose(made[name], one, rtol=1e-5, atol=1e-6)


def test_examples_that_depend_on_each_other_keep_their_batch(tmp_path: Path) -> None:
    _, here, about = exported(zoo.coupled, tmp_path)
    assert about.batch == 4
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    wanted = np.concatenate([x[:4] - x[:4].mean(0), x[4:] - x[4:].mean(0)])
    np.testing.assert_allclose(run(here, {"x": x})["output"], wanted, atol=1e-6)


def module(make: Any, *shape: int) -> Any:
    return lambda: (make(), torch.randn(*shape))


@pytest.mark.parametrize(
    ("make", "count"), [(zoo.Scaled, 1), (zoo.Centred, 1), (zoo.Centred, 3), (zoo.Normed, 3)]
)
def test_examples_that_depend_on_each_other_are_never_padded(
    make: Any, count: int, tmp_path: Path
) -> None:
    """Statistics of a batch that a permutation of one row keeps, from an example of one row too."""
    there, here, about = exported(module(make, count, 3), tmp_path)
    assert (about.batch, about.independent) == (count, False)
    x = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    for rows in [x[:count], *([x[: 2 * count]] if count == 1 else [])]:
        (name,) = there.example
        wanted = np.concatenate([there.source({name: one})["output"] for one in np.split(rows, len(rows) // count)])  # fmt: skip
        np.testing.assert_allclose(run(here, {name: rows})["output"], wanted, atol=1e-6)
    if count > 1:
        with pytest.raises(OptionError, match=f"the batch has 5 examples.*a multiple of {count}"):
            run(here, {name: x})
        model = ExportedProgram(about=about, folder=tmp_path)
        model.check_batch(2 * count)
        with pytest.raises(OptionError, match="the batch has 4 examples"):
            model.check_batch(4)


def test_an_output_for_a_whole_call_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    _, here, about = exported(module(zoo.Averaged, 2, 3), tmp_path)
    assert (about.batch, about.independent) == (2, False)
    assert {name: one.batched for name, one in about.outputs.items()} == {"each": True, "mean": False}  # fmt: skip
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_allclose(run(here, {"x": x})["mean"], [2.5, 2.5, 8.5, 8.5])
    # A constant depends on no example.
    _, here, about = exported(module(zoo.Constant, 3, 3), tmp_path / "one")
    assert (about.batch, about.independent) == (None, True)
    assert not about.outputs["scale"].batched
    np.testing.assert_allclose(run(here, {"x": x})["scale"], [[1, 2, 3]] * 4)


@pytest.mark.parametrize(
    ("make", "shape", "told"),
    [
        (zoo.Sequence, (4, 4, 3), "output output is [4, 8, 3] for 8 examples and [4, "),
        (zoo.Sequence, (2, 5, 3), "output output is [5, 4, 3] for 4 examples and [5, "),
        (zoo.SequenceOfTwo, (2, 2, 3), "output output is [2, 2, 3] for 2 examples, and the first"),
        (zoo.Tokens, (2, 5, 3), "output output is [20, 3] for 4 examples and ["),
    ],
)
def test_outputs_with_their_examples_elsewhere_are_refused(
    make: Any, shape: tuple[int, ...], told: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError) as caught:
        exported(module(make, *shape), tmp_path)
    assert told in str(caught.value)


def test_a_file_with_a_part_of_a_batch_is_refused(tmp_path: Path) -> None:
    inputs = {"x": Field(shape=(3,), dtype="float32")}
    file = tmp_path / "inputs.npz"
    np.savez(file, x=np.ones((4, 3), np.float32))
    assert len(list(InputFiles(inputs=inputs, together=2).examples(file))) == 4
    with pytest.raises(DataError, match=r"inputs\.npz has 4 examples.*give a multiple of 3"):
        list(InputFiles(inputs=inputs, together=3).examples(file))


def test_an_input_named_mask_has_another_name(tmp_path: Path) -> None:
    """Batches mark their padding as ``mask``."""

    class Masked(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(mask, 7.0)

    given = np.arange(6, dtype=np.float32).reshape(2, 3), np.eye(2, 3, dtype=bool)
    _, here, about = exported(lambda: (Masked(), given), tmp_path)
    assert list(about.inputs) == ["x", "mask_input"]
    made = run(here, dict(zip(about.inputs, given, strict=True)))["output"]
    np.testing.assert_array_equal(made, [[7, 1, 2], [3, 7, 5]])


def test_an_environment_of_tensorflow_needs_jax_and_numpy_only() -> None:
    """The child that exports runs in it."""
    assert MASK == job_data.MASK
    code = "import sys; sys.modules['msgspec'] = sys.modules['flax'] = sys.modules['tyro'] = None;"
    code += "from systolic.formats.program import child, export; from systolic.formats.tensorflow import reader"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_refused(tmp_path: Path) -> None:
    _, _, about = exported(zoo.coupled, tmp_path)
    model = ExportedProgram(about=about, folder=tmp_path)
    with pytest.raises(OptionError, match="computes in float32; use --precision f32"):
        model.check_precision(Precision.bf16)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(NotFoundError, match=r"lacks program\.bin"):
        exported_function(other, about)
    (other / PROGRAM).write_bytes((tmp_path / PROGRAM).read_bytes()[:-1])
    with pytest.raises(DataError, match="is another program than the one that was imported"):
        exported_function(other, about)
    with pytest.raises(NotFoundError, match="is no Bundle"):
        ExportedProgram.of(other)


def test_a_job_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Its class of models has moved since."""
    _, _, about = exported(zoo.coupled, tmp_path)
    fields = {
        name: Field(shape=port.shape, dtype=port.dtype) for name, port in about.inputs.items()
    }
    job = Job(
        name="here",
        model=ExportedProgram(about=about, folder=tmp_path),
        task=ArrayOutputs(),
        data=InputFiles(inputs=fields),
        steps=1,
        batch=Batch(per_device=1),
    )
    plain, types = json.loads(json.dumps(job.to_json())), types_of(job)
    assert types["model"] == "systolic.formats.program.model.ExportedProgram"
    assert job_from_json(plain, types, tmp_path) == job
    before = {**types, "model": "systolic.interop.program.model.ExportedProgram"}
    assert job_from_json(plain, before, tmp_path) == job


def test_relative_error_by_hand() -> None:
    assert relative_error(np.array([1.0, 2.5]), np.array([1.0, 2.0])) == 0.25
    assert relative_error(np.array([np.inf, 1.0]), np.array([np.inf, 1.0])) == 0.0
    assert relative_error(np.array([np.nan]), np.array([1.0])) == np.inf
    assert relative_error(np.array([1.0]), np.array([np.inf])) == np.inf


def test_differences_by_hand() -> None:
    """Each output is compared with its own largest magnitude."""
    made = {"large": np.array([100.0, 201.0]), "small": np.array([0.5, np.nan])}
    wanted = {"large": np.array([100.0, 200.0]), "small": np.array([1.0, np.nan])}
    assert differences(made, wanted, "torch") == {
        "max_abs": 1.0,
        "max_relative": 0.5,
        "mean_abs": pytest.approx(1.5 / 3),
        "mean_relative": pytest.approx((1 / 200 + 0.5) / 3),
    }
    with pytest.raises(RunError, match=r"output small is \[2\] here and \[1\] in torch"):
        differences(made, {"small": np.ones(1)}, "torch")


def test_inputs_of_a_file(tmp_path: Path) -> None:
    data = InputFiles(
        inputs={"x": Field(shape=(3,), dtype="float32"), "n": Field(shape=(), dtype="int32")}
    )
    file = tmp_path / "inputs.npz"
    np.savez(file, x=np.ones((2, 3)), n=np.array([4, 5]))
    first, second = data.examples(file)
    assert (first["x"].dtype, int(second["n"])) == (np.float32, 5)
    for given, told in (
        (
            {"x": np.ones((2, 3))},
            r"has the arrays x, and the model takes x float32\[examples, 3\], n int32\[examples\]",
        ),
        ({"x": np.ones((2, 4)), "n": np.ones(2, int)}, r"x in .* is \[2, 4\]"),
        ({"x": np.ones((2, 3)), "n": np.ones(2)}, "n in .* is float64, and the model takes int32"),
        ({"x": np.ones((2, 3)), "n": np.ones(1, int)}, "differ in their first dim"),
    ):
        np.savez(file, **given)
        with pytest.raises(DataError, match=told):
            list(data.examples(file))
    file.write_text("no")
    with pytest.raises(DataError, match=r"is no \.npz file"):
        list(data.examples(file))
