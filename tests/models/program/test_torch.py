"""PyTorch modules as pure functions: outputs, gradients, batch statistics and randomness are PyTorch's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from systolic.compiling.compile import JobProgram
from systolic.core.errors import SystolicError
from systolic.data.arrays import Arrays
from systolic.job import Batch, Job
from systolic.models.program.config import Maker, TorchModule, made_by
from systolic.models.program.function import PureFunction
from systolic.models.program.torch_function import torch_function
from systolic.steps.tasks import ArrayClassification
from tests.models.program import zoo

RELATIVE = 1e-5


def function_of(make: Any) -> tuple[Any, PureFunction]:
    made = made_by(make, "torch", "zoo.py")
    function = torch_function(made, "zoo.py")
    return made[0], function


def outputs(function: PureFunction, given: Any = None) -> dict[str, Any]:
    run = jax.jit(lambda t, s, x: function.call(t, s, x, False, None)[0])
    return run(function.trained, function.state, function.example if given is None else given)


@pytest.mark.parametrize("make", [zoo.cnn, zoo.encoder, zoo.bloom])
def test_outputs_are_those_of_torch(make: Any) -> None:
    _, function = function_of(make)
    assert function.source is not None
    wanted, made = function.source(function.example), outputs(function)
    assert made.keys() == wanted.keys()
    for name, there in wanted.items():
        assert np.abs(made[name] - there).max() <= RELATIVE * np.abs(there).max(), name


def test_names_inputs_and_outputs() -> None:
    module, function = function_of(zoo.encoder)
    assert list(outputs(function)) == ["logits", "pooled_0", "pooled_1"]
    assert list(function.example) == ["tokens", "mask"]
    assert function.example["tokens"].dtype == np.int32
    # Tied weights have one name; plain tensors and buffers are state.
    assert set(function.trained) == {name for name, _ in module.named_parameters()}
    assert set(function.state) == {"scale", "places"}


def test_gradients_are_those_of_autograd() -> None:
    module, function = function_of(zoo.cnn)
    label = torch.tensor([3, 7])
    given = torch.from_numpy(function.example["input"].copy())
    torch.nn.functional.cross_entropy(module.eval()(given), label).backward()

    def loss(trained: Any) -> jax.Array:
        made, _ = function.call(trained, function.state, function.example, False, None)
        chosen = jnp.asarray(label.numpy())[:, None]
        return -jnp.take_along_axis(jax.nn.log_softmax(made["output"]), chosen, 1).mean()

    made = jax.jit(jax.grad(loss))(dict(function.trained))
    for name, parameter in module.named_parameters():
        wanted = parameter.grad.numpy()
        assert np.abs(made[name] - wanted).max() <= RELATIVE * np.abs(wanted).max() + 1e-8, name


def test_training_moves_batch_statistics_as_torch_does() -> None:
    module, function = function_of(zoo.cnn)
    run = jax.jit(
        lambda k: function.call(function.trained, function.state, function.example, True, k)
    )
    before = {name: one.copy() for name, one in function.state.items()}
    _, after = run(jax.random.key(0))
    module.train()(torch.from_numpy(function.example["input"].copy()))
    buffers = dict(module.named_buffers())
    assert after["1.num_batches_tracked"] == 1
    for name in ("1.running_mean", "1.running_var"):
        np.testing.assert_allclose(after[name], buffers[name].numpy(), rtol=1e-5, atol=1e-7)
        assert not np.allclose(after[name], before[name])


def test_dropout_draws_from_the_key_in_training_only() -> None:
    module, function = function_of(zoo.cnn)
    before = {name: one.clone() for name, one in module.state_dict().items()}

    def run(seed: int) -> np.ndarray:
        key = jax.random.key(seed)
        call = jax.jit(
            lambda k: function.call(function.trained, function.state, function.example, True, k)
        )
        return np.asarray(call(key)[0]["output"])

    assert np.array_equal(run(0), run(0))
    assert not np.allclose(run(0), run(1))
    # The module itself, torch's random numbers and its fast path stay as they were.
    assert all(torch.equal(one, module.state_dict()[name]) for name, one in before.items())
    assert module.training
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_same_weights_in_every_process() -> None:
    first, again = function_of(zoo.cnn)[1], function_of(zoo.cnn)[1]
    assert all(np.array_equal(first.trained[name], again.trained[name]) for name in first.trained)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (zoo.no_tensor, "returns str, which is no tensor"),
        (zoo.dynamic, "layer 1 (Turned) needs the values of its tensors"),
        (zoo.unsupported, "layer 1 (Factors) calls aten::geqrf, which torchax"),
        (zoo.only_module, "returned Linear, not a torch.nn.Module and its example inputs"),
        (zoo.structure, "example input rest of zoo.py is a dict of tensors"),
        (zoo.wrong_inputs, "forward of Linear does not take the example inputs"),
        (zoo.fails, "zoo.py failed: ValueError: no such checkpoint"),
    ],
)
def test_a_mistake_is_one_line(make: Any, told: str) -> None:
    with pytest.raises(SystolicError) as caught:
        outputs(function_of(make)[1])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_stored_answer_stands_for_a_module() -> None:
    """Its name is no key: the code behind it may have changed."""
    data = Arrays.of(train={"input": np.zeros((4, 1, 8, 8), np.float32), "label": np.zeros(4, int)})
    job = Job(
        name="cnn",
        model=TorchModule(zoo.cnn),
        task=ArrayClassification(),
        data=data,
        steps=1,
        batch=Batch(total=4),
    )
    assert job.to_json()["model"] == {"type": "TorchModule", "make": "tests.models.program.zoo.cnn"}
    assert JobProgram(job=job).key() is None


def test_a_module_is_saved_as_the_name_of_its_function() -> None:
    module = TorchModule(zoo.cnn)
    assert str(module.make) == "tests.models.program.zoo.cnn"
    assert module == TorchModule(zoo.cnn)
    assert module != TorchModule(zoo.encoder)
    with pytest.raises(SystolicError, match="is no function"):
        Maker("tests.models.program.zoo.cnn")  # ty: ignore[invalid-argument-type]
