"""The store answers for this program alone, repairs itself, and survives a full disk."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from systolic import recipes
from systolic.chips import Prices, Slice, slice
from systolic.compiling import Compiled, Compiler, Failed, JobProgram, Outcome, compile, settings
from systolic.compiling.compile import Pool, _Asked, _of_known_code, _request_name, version
from systolic.compiling.dump import is_whole
from systolic.compiling.outcome import EXECUTABLE, HLO, PROTO, REPORT, check_owner
from systolic.core.errors import RunError
from systolic.core.files import Store
from systolic.data.arrays import Arrays
from systolic.forecasting.function import Spread, function_program
from systolic.forecasting.run import of_outcome
from tests.compiling import functions
from tests.recorded import hlo

ON = "v5e-4"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def ask(root: Path, **facts: Any) -> Outcome:
    pytest.importorskip("libtpu")
    program = replace(functions.program(functions.matmul, ON), **facts)
    return compile(program, slice(ON), Compiler(root=root).quick())


def entries(root: Path) -> list[Path]:
    return [path.parent for path in (root / "programs").rglob(REPORT)]


@pytest.mark.slow
def test_facts_are_those_of_who_asks(root: Path) -> None:
    first = ask(root, model_flops=1e9, units=("tokens", 512))
    second = ask(root, model_flops=2e9, units=("examples", 8))
    assert isinstance(first, Compiled)
    assert isinstance(second, Compiled)
    assert (first.folder, first.cached, second.cached) == (second.folder, False, True)
    made = [of_outcome(one, "f", slice(ON), 0.0) for one in (first, second)]
    assert [one.model_flops for one in made] == [1e9, 2e9]
    assert [(one.unit, one.units) for one in made] == [("tokens", 512), ("examples", 8)]
    assert first.report.program.units == 512


@pytest.mark.slow
def test_a_damaged_entry_is_compiled_again(root: Path) -> None:
    whole = ask(root)
    assert isinstance(whole, Compiled)
    content = (whole.folder / HLO).read_bytes()
    (whole.folder / HLO).write_bytes(content[:-20])
    again = ask(root)
    assert isinstance(again, Compiled)
    assert (again.cached, again.folder) == (False, whole.folder)
    assert again.hlo == Compiled(whole.folder, "", True).hlo
    assert {HLO, PROTO, REPORT} < {path.name for path in again.folder.iterdir()}
    # No lock outlives its owner.
    assert list((root / "programs" / ".locks").iterdir()) == []


def test_a_function_is_compiled_under_the_callers_settings(tmp_path: Path) -> None:
    """JAX's settings of the calling thread reach the child: f64 stays f64."""
    on = slice("cpu")

    def ask(dtype: Any) -> Compiled:
        scale = jnp.full((8,), 2.0, dtype)  # goes along in the function's pickle

        def double(x: jax.Array) -> jax.Array:
            return x * scale

        program = function_program(double, (jax.ShapeDtypeStruct((8,), dtype),), {}, on, Spread())
        made = compile(program, on, Compiler(root=tmp_path))
        assert isinstance(made, Compiled)
        return made

    with jax.enable_x64(True):
        wide = ask(jnp.float64)
    assert "f64[8]" in wide.hlo
    assert "f32[" not in wide.hlo


def name(on: Slice | None = None) -> str | None:
    program = JobProgram(job=recipes.find("lm")({}))
    return _request_name(_Asked(program, on or slice(ON), Compiler(root=Path("nowhere"))))


def test_the_arrays_of_the_data_are_a_part_of_a_request() -> None:
    """The same function by name may make other arrays, or fail, the next time."""

    def of(make: Any) -> Any:
        job = recipes.find("digits")({})
        return JobProgram(job=replace(job, data=Arrays.call(make))).key()

    def load(size: int) -> Any:
        return lambda: {"train": {"image": np.zeros((2, size), np.uint8)}}

    assert of(load(4)) == of(load(4))
    assert of(load(4)) != of(load(5))
    assert of(lambda: 1 / 0) is None


class Mine(Enum):
    one = 1


def test_what_holds_a_users_own_class_has_no_key() -> None:
    job = recipes.find("lm")({})
    assert JobProgram(job=job).key() is not None
    assert not _of_known_code((job, {"deep": [Mine.one]}))
    assert not _of_known_code([load_nothing])
    assert _of_known_code((1, "a", None, Path(), job.optimizer, len))


def load_nothing() -> None:
    """A function of a module that is not ours."""


@pytest.mark.parametrize("variable", ["JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION"])
def test_variables_of_jax_are_a_part_of_a_request(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    before = name()
    assert before == name()
    monkeypatch.setenv(variable, "1")
    assert name() != before
    monkeypatch.delenv(variable)
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    assert name() == before


def test_settings_of_this_thread_are_a_part_of_a_request() -> None:
    before = name()
    with jax.default_matmul_precision("highest"):
        assert name() != before
    with jax.log_compiles(True):
        assert name() == before


@pytest.mark.parametrize("package", ["qwix", "flax"])
def test_versions_are_a_part_of_a_request(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    before, module = name(), sys.modules["systolic.compiling.compile"]
    other = {package: "99"}
    monkeypatch.setattr(module, "version", lambda name: other.get(name) or version(name))
    assert name() != before


def test_the_chips_table_is_a_part_of_a_request_but_prices_are_not() -> None:
    def of(**figures: Any) -> str | None:
        on = slice(ON)
        return name(on=replace(on, chip=replace(on.chip, **figures)))

    assert of(usd_per_chip_hour=Prices(on_demand=99.0), power_watts=1.0) == name()
    assert of(hbm_bytes=8 << 30) != name()
    assert name(on=replace(slice(ON), chip_config_name="megachip")) != name()


def test_every_setting_of_jax_can_be_given_to_a_child() -> None:
    given = settings.of_process()
    assert "jax_enable_x64" in given
    assert "jax_platforms" not in given
    import cloudpickle

    before = jax.config.values["jax_enable_x64"]
    try:
        settings.take(pickle.loads(cloudpickle.dumps({**given, "jax_enable_x64": not before})))
        assert settings.key()["jax_enable_x64"] == repr(not before)
    finally:
        jax.config.update("jax_enable_x64", before)
    assert settings.of_process() == given


def test_a_schedule_that_could_not_be_written_is_a_failure(tmp_path: Path) -> None:
    """XLA continues when its dump can't be written; the schedule is then partial or absent."""
    pytest.importorskip("libtpu")

    def limit(stage: str) -> None:
        if stage == "importing":  # it would leave compiled modules of Python cut off, too
            return
        for child in psutil.Process().children():
            if "compiling.child" in child.name() or "systolic.compiling.child" in child.cmdline():
                child.rlimit(psutil.RLIMIT_FSIZE, (2048, 2048))

    asked = (functions.program(functions.matmul), slice(ON), Compiler(root=tmp_path).quick())
    with Pool(1) as pool:
        made = pool.submit(*asked, limit).result(timeout=120)
    assert isinstance(made, Failed)
    assert "the compiler ended and wrote only a part of the schedule into" in made.reason
    assert entries(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk of its own")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    disk = tmp_path / "disk"
    disk.mkdir()
    size = "1152k"  # room enough to begin, and not for all that the compiler dumps
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine allows no mounts")
    try:
        with pytest.raises(RunError) as told:
            ask(disk)
        text = str(told.value)
        assert text.startswith(f"{disk}/programs could not be written (No space left on device);")
        assert text.endswith("set SYSTOLIC_CACHE to another folder")
        assert entries(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_executable_is_not_taken_from_where_others_write(tmp_path: Path) -> None:
    with Store("programs", tmp_path).scratch() as folder:
        (folder / EXECUTABLE).write_bytes(b"code")
        entry = Store("programs", tmp_path).put("abcdef", folder)
    made = Compiled(entry, "abcdef", True)
    assert made.executable == entry / EXECUTABLE
    for place, mode in ((entry / EXECUTABLE, 0o666), (entry, 0o777), (tmp_path, 0o770)):
        before = place.stat().st_mode
        place.chmod(mode)
        if mode == 0o770 and place.stat().st_gid == 0:
            os.chown(place, -1, 12345)
        with pytest.raises(RunError, match=f"^{place} is writable by .* set SYSTOLIC_CACHE"):
            made.executable  # noqa: B018
        place.chmod(before)
    if os.geteuid() == 0:
        os.chown(entry, 12345, -1)
        with pytest.raises(RunError, match=f"^{entry} belongs to user 12345, and"):
            check_owner(entry / EXECUTABLE)


def test_nothing_is_saved_into_a_store_that_others_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    program = functions.program(functions.matmul, ON)
    with pytest.raises(RunError, match="is writable by all"):
        compile(program, slice("cpu"), Compiler(root=tmp_path, save=True))


def test_a_text_that_is_cut_off_is_not_taken_for_whole() -> None:
    """At any byte before the last brace: some of them end in a brace, too."""
    text = hlo.text("step-8xh100")
    assert is_whole(text)
    end = text.rindex("}")
    braces = [at for at, letter in enumerate(text[:end]) if letter == "}"]
    assert len(braces) > 100
    assert not any(is_whole(text[: at + 1]) for at in braces)
