"""A program saved here is loaded here; each thing that could differ is named in one line."""

import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from systolic.chips import slice
from systolic.compiling import Compiled, Compiler, compile, executable
from systolic.compiling.executable import (
    Fingerprint,
    SavedExecutable,
    check,
    flags_of,
    place,
    program_digest,
)
from systolic.core.errors import NotFoundError, RunError
from tests.compiling import functions

pytestmark = pytest.mark.own_programs

HERE = Fingerprint(
    platform="tpu",
    kind="TPU v5 lite",
    devices=2,
    versions={"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42"},
    build="933746096",
    flags=["--xla_a=1"],
    ids=[0, 1],
    places=[[0, 0, 0, 0, 0], [1, 0, 0, 0, 0]],
    program="b" * 64,
)
FACTS = {"name": "lm", "batch_size": 8, "layout": {"data": 1, "fsdp": 2}}


def lower(scale: float = 2.0) -> Any:
    def step(state: dict[str, jax.Array], batch: jax.Array) -> tuple[Any, jax.Array]:
        return {"w": state["w"] * scale}, (state["w"] @ batch).sum()

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return jax.jit(step, donate_argnums=0).lower({"w": shape}, shape)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A program for the first CPU device, as the compiling process leaves it."""
    lowered = lower()
    path, content = tmp_path / "step", executable.serialize(lowered.compile())
    path.write_bytes(content)
    made = executable.stamp(lowered.as_text(), jax.devices()[:1])
    report = {
        "stamp": msgspec.to_builtins(made),
        "program": FACTS,
        "executable": msgspec.to_builtins(executable.signature(content)),
    }
    (tmp_path / "step.json").write_text(json.dumps(report))
    return path


def test_what_is_loaded_computes_the_same_and_reuses_the_state(saved: Path) -> None:
    loaded = executable.load(saved, lower(), jax.devices()[:1])
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    state = {"w": jax.device_put(w)}
    made, total = loaded.compiled(state, jax.device_put(w))
    np.testing.assert_array_equal(made["w"], w * 2)
    assert float(total) == (w @ w).sum()
    assert state["w"].is_deleted()
    with pytest.raises(TypeError, match="compiled"):
        loaded.compiled({"w": made["w"]}, jnp.ones((4, 4)))


def test_another_program_is_refused(saved: Path) -> None:
    with pytest.raises(RunError, match=r"is another program: its lowered digest is \w{12}, here"):
        executable.load(saved, lower(3.0), jax.devices()[:1])


@pytest.mark.parametrize("name", ["step", "step.json"])
def test_both_files_are_needed(saved: Path, name: str) -> None:
    (saved.parent / name).unlink()
    with pytest.raises(NotFoundError, match=f"{name} is not a file; systolic forecast RECIPE"):
        executable.load(saved, lower(), jax.devices()[:1])


def test_damage_is_told(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"is not the file that step\.json describes"):
        executable.load(saved, lower(), jax.devices()[:1])
    beside = saved.with_name("step.json")
    beside.write_text('{"digest": "of an older version"}')
    with pytest.raises(RunError, match=r"step\.json is damaged, or of a version that did not"):
        executable.load(saved, lower(), jax.devices()[:1])
    beside.write_text("[")
    with pytest.raises(RunError, match="is damaged"):
        executable.load(saved, lower(), jax.devices()[:1])


def test_what_the_runtime_refuses_is_one_line(saved: Path) -> None:
    content = b"no pickle"
    saved.write_bytes(content)
    beside = saved.with_name("step.json")
    report = json.loads(beside.read_text())
    beside.write_text(
        json.dumps({**report, "executable": msgspec.to_builtins(executable.signature(content))})
    )
    with pytest.raises(RunError, match="its runtime refuses it") as raised:
        executable.load(saved, lower(), jax.devices()[:1])
    assert "\n" not in str(raised.value)


VERSIONS = HERE.versions


def described(stamp: Fingerprint) -> SavedExecutable:
    return SavedExecutable(stamp=stamp, executable=executable.signature(b""), program=FACTS)


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({"platform": "cpu"}, "its platform is cpu, here it is tpu; forecast for this machine"),
        ({"kind": "TPU v4"}, "its chip is TPU v4, here it is TPU v5 lite;"),
        ({"devices": 4}, "its number of devices is 4, here it is 2;"),
        (
            {"versions": {**VERSIONS, "jax": "0.10.1"}},
            "its jax version is 0.10.1, here it is 0.10.2; pip install jax==0.10.1, or",
        ),
        ({"versions": {**VERSIONS, "jaxlib": "0.9"}}, "its jaxlib version is 0.9, here"),
        ({"versions": {**VERSIONS, "libtpu": "0.0.41"}}, "its libtpu version is 0.0.41, here"),
        ({"build": "1"}, "its libtpu build is 1, here it is 933746096;"),
        (
            {"flags": []},
            "its set of compiler flags is none, here it is --xla_a=1; give the same --flags",
        ),
        ({"flags": ["--xla_a=2"]}, "its set of compiler flags is --xla_a=2, here it is --xla_a=1;"),
        ({"options": {"x": 1}}, "its set of compile options is x 1, here it is none;"),
        (
            {"places": [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]},
            "its device 1 by place in the topology is (0, 1, 0, 0, 0), here it is (1, 0, 0, 0, 0);",
        ),
        ({"ids": [1, 0]}, "its device 0 by number in JAX is 1, here it is 0;"),
    ],
)
def test_the_first_mismatch_is_named(saved: dict[str, Any], told: str) -> None:
    with pytest.raises(RunError) as raised:
        check(Path("step"), described(replace(HERE, **saved, program="c")), HERE, FACTS)
    assert str(raised.value).startswith(f"step does not match: {told}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"name": "bytes"}, "its name is lm, here it is bytes;"),
        ({"batch_size": 16}, "its batch_size is 8, here it is 16;"),
        ({"layout": {"data": 2}}, "its layout is data 1, fsdp 2, here it is data 2;"),
    ],
)
def test_another_program_is_told_by_what_is_known_of_it(facts: dict[str, Any], told: str) -> None:
    with pytest.raises(RunError) as raised:
        check(Path("step"), described(replace(HERE, program="c")), HERE, facts)
    assert str(raised.value).startswith(f"step is another program: {told}")


def test_a_match_is_a_match() -> None:
    check(Path("step"), described(HERE), HERE, FACTS)


def test_flags_come_from_the_environment() -> None:
    given = {
        "LIBTPU_INIT_ARGS": "--xla_b=2 --xla_a=1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_c=3",
    }
    assert flags_of(given, "tpu") == ["--xla_a=1", "--xla_b=2", "--xla_c=3"]
    assert flags_of(given, "cpu") == ["--xla_c=3"]
    assert flags_of({}, "tpu") == []


def test_a_place_has_five_numbers() -> None:
    device = SimpleNamespace(coords=[1, 2], core_on_chip=1, slice_index=3)
    assert place(device) == [1, 2, 0, 1, 3]


def test_paths_in_kernels_do_not_count() -> None:
    """Pallas kernels carry the source file of each op, which differs between machines."""
    from jax.extend.mlir import ir

    def text(path: str, constant: int) -> str:
        source = f'module {{ %0 = "a.b"() {{v = {constant}}} : () -> i32 loc("{path}":1:1) }}'
        with ir.Context() as context:
            context.allow_unregistered_dialects = True
            code = ir.Module.parse(source).operation.get_asm(binary=True, enable_debug_info=True)
        body = b64encode(code).decode()
        return f"custom_call {{\\22body\\22: \\22{body}\\22}}"

    assert text("/one/kernel.py", 1) != text("/another/place/kernel.py", 1)
    assert program_digest(text("/one/kernel.py", 1)) == program_digest(text("/two/k.py", 1))
    assert program_digest(text("/one/kernel.py", 1)) != program_digest(text("/one/kernel.py", 2))


def test_a_step_for_a_slice_says_what_it_is_for(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    program, on = functions.program(functions.matmul), slice("v5e-4")
    made = compile(program, on, Compiler(root=tmp_path, save=True))
    assert isinstance(made, Compiled)
    again = compile(program, on, Compiler(root=tmp_path, save=True))
    assert isinstance(again, Compiled)
    assert (again.cached, again.folder) == (True, made.folder)
    assert made.executable is not None
    assert made.report.executable == executable.signature(made.executable.read_bytes())
    stamp = made.report.stamp
    assert stamp is not None
    assert (stamp.platform, stamp.kind, stamp.devices) == ("tpu", "TPU v5 lite", 4)
    assert stamp.versions.keys() == {"jax", "jaxlib", "libtpu"}
    assert int(stamp.build) > 0
    assert stamp.places == made.report.places
    assert sorted(stamp.ids) == [0, 1, 2, 3]
    path = tmp_path / "step"
    executable.save(made, path)
    with pytest.raises(RunError, match="step does not match: its platform is tpu, here it is cpu"):
        executable.load(path, lower(), jax.devices()[:1])
