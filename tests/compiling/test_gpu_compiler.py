"""XLA's GPU compiler: how a GPU is described to it, when it is taken, and, where it is installed, what it answers."""

import importlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest

from systolic.chips import slice
from systolic.chips.flags import OVERLAPPED
from systolic.compiling import Compiler, gpu_compiler, host_backend
from systolic.core.errors import OptionError
from systolic.core.machine import leave_cuda_out
from systolic.core.units import Origin
from systolic.forecasting import forecast_program
from systolic.forecasting.command import forecast_server
from systolic.forecasting.function import function_program
from systolic.forecasting.platforms import KERNELS, SIMULATED, WITH_TRITON, WITHOUT_TRITON
from systolic.sim.simulate import simulate
from tests.recorded import hlo
from tests.recorded.hlo.programs import gpu_arguments, gpu_step

EIGHT = slice("8xh100")
installed = pytest.mark.skipif(
    gpu_compiler.compiler() is None, reason="needs the extra gpu-forecast, of 174 MB"
)


def test_a_gpu_is_described_by_the_catalogue() -> None:
    text = gpu_compiler.target_config(EIGHT.chip)
    numbers = {name: float(number) for name, number in re.findall(r"(\w+): ([\d.]+)", text)}
    # As openxla/xla's specs/h100_sxm.txtpb has them.
    expected = {
        "core_count": 132,
        "fpus_per_core": 128,
        "clock_rate_ghz": 1.98,
        "l2_cache_size": 50 * 2**20,
        "shared_memory_per_core": 228 * 2**10,
        "shared_memory_per_block_optin": 227 * 2**10,
        "device_memory_size": 84942979072,
    }
    assert {name: numbers[name] for name in expected} == expected
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension" in text
    assert "feature_extension" not in gpu_compiler.target_config(slice("a100-80").chip)


@pytest.mark.parametrize(("plugin", "known"), [("0.10.2", True), ("0.12.0.1", False)])
def test_the_compiler_has_the_version_of_jax(
    monkeypatch: pytest.MonkeyPatch, plugin: str, known: bool
) -> None:
    versions = {"jax": "0.10.2", "jax-cuda12-pjrt": plugin}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    assert gpu_compiler.compiler() == ("jax-cuda12-pjrt 0.10.2" if known else None)
    assert gpu_compiler.compiles(EIGHT) is known
    assert not gpu_compiler.compiles(slice("8xmi300x"))
    assert not gpu_compiler.compiles(slice("v5e-8"))


def test_what_no_compiler_is_told_of_has_no_advice() -> None:
    assert "pip install 'systolic[gpu-forecast]'" in gpu_compiler.advice(EIGHT)
    assert gpu_compiler.advice(slice("8xmi300x")) == ""


def test_cudnn_answers_as_the_absent_gpu_would(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    names = (
        "check_cudnn_version",
        "check_compute_capability",
        "is_cuda_compute_capability_equal",
    )
    for name in names:  # given back after the test
        monkeypatch.setattr(attention, name, getattr(attention, name))
    gpu_compiler.take_cudnn_as_there(slice("8xb200"))
    assert attention.check_cudnn_version() == gpu_compiler.CUDNN_VERSION
    assert attention.check_compute_capability("9.0")
    assert not attention.is_cuda_compute_capability_equal("10.3")
    gpu_compiler.take_cudnn_as_there(slice("8xa100-80"))
    assert not attention.check_compute_capability("9.0")


def test_the_plugin_is_left_out_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    for name in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    leave_cuda_out()
    assert sys.modules["jax_plugins.xla_cuda12"].initialize() is None
    monkeypatch.delitem(sys.modules, "jax_plugins.xla_cuda12")
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0"])
    leave_cuda_out()
    assert "jax_plugins.xla_cuda12" not in sys.modules


def test_there_is_nothing_to_save_of_kernels_that_no_gpu_timed() -> None:
    with pytest.raises(OptionError, match="only they can time the kernels"):
        host_backend.check(EIGHT, save=True)


@installed
def test_a_gpu_that_is_not_there_is_compiled_for(tmp_path: Path) -> None:
    args, spread = gpu_arguments()
    program = function_program(gpu_step, args, {}, EIGHT, spread)
    forecast = forecast_program(program, "step", EIGHT, compiler=Compiler(root=tmp_path))
    assert (forecast.origin, forecast.memory_origin) == (Origin.simulated, Origin.compiled)
    assert forecast.compiler.built_for == "h100"
    assert {SIMULATED, WITHOUT_TRITON, KERNELS} <= set(forecast.notes)
    recorded = simulate(hlo.module("step-8xh100"), EIGHT)
    assert forecast.step_seconds == pytest.approx(recorded.seconds, rel=0.05)
    assert forecast.hardware_flops == pytest.approx(recorded.executed_flops)
    # Weights in f32 and bf16, eight ways, and the layer's activations.
    held = (4 + 2) * 46137344 / 8 + 2 * 2048 * 1024
    assert held < forecast.need_bytes < 10 * held
    assert forecast.ops


@installed
def test_ampere_overlaps_collectives_only_when_told(tmp_path: Path) -> None:
    on = slice("8xa100-80")
    args, spread = gpu_arguments()
    program = function_program(gpu_step, args, {}, on, spread)
    unasked, told = (
        forecast_program(program, "step", on, compiler=Compiler(root=tmp_path, flags=flags))
        for flags in ((), (OVERLAPPED,))
    )
    alone = [
        f for f in (unasked, told) if any("run beside nothing: on a100-80" in n for n in f.notes)
    ]
    assert alone == [unasked]
    assert unasked.step_seconds is not None
    assert told.step_seconds is not None
    assert told.step_seconds < unasked.step_seconds


@installed
def test_tritons_matmuls_are_had_on_request(tmp_path: Path) -> None:
    args, spread = gpu_arguments()
    program = function_program(gpu_step, args, {}, EIGHT, spread)
    flags = ("--xla_gpu_enable_triton_gemm=true",)
    forecast = forecast_program(
        program, "step", EIGHT, compiler=Compiler(root=tmp_path, flags=flags)
    )
    assert WITHOUT_TRITON not in forecast.notes
    assert forecast.answer is not None
    assert "__cublas" not in forecast.answer.hlo
    recorded = simulate(hlo.module("step-8xh100"), EIGHT)
    assert forecast.hardware_flops == pytest.approx(recorded.executed_flops)


@installed
def test_a_server_s_step_reads_its_weights_once(tmp_path: Path) -> None:
    """Without Triton XLA joins matrices that are multiplied by the same rows, and copies all of them in each step: of a prompt, too."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    server = forecast_server(
        str(tmp_path), on="h100", prompt_tokens=128, output_tokens=128, concurrency=[1]
    )
    step = next(step for step in server.steps if step.tokens == 1)
    part = next(step for step in server.steps if step.tokens == 128)
    layer = 2 * 2048 * (2048 * 2 + 2 * 512 + 3 * 8192)
    weights = 2 * layer + 2 * 2048 * 32000
    hbm = 3.35e12
    # Thirteen kernels of a layer start in 2.5 to 5.1 us each, beside bytes at 87 % of the bandwidth.
    assert weights / hbm < step.seconds < weights / (0.87 * hbm) + 2 * 13 * 5.1e-6 + 20e-6
    # As many of a part of a prompt, cuDNN's attention among them, which starts in 15 us. The copies would take 0.11 ms.
    assert part.seconds < weights / (0.87 * hbm) + 2 * (12 * 5.1e-6 + 15e-6) + 20e-6
    assert WITH_TRITON in server.notes
