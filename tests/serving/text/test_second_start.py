import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from systolic.compiling import program_store
from systolic.compiling.program_store import EXECUTABLE, FINGERPRINT, EntryState, ProgramStore
from systolic.core.files import SUMS
from systolic.serving.text.opening import plan_engine
from tests.serving.text.engine import Small
from tests.serving.text.second_start import MODEL, SIZES

pytestmark = pytest.mark.own_programs

ROOT = Path(__file__).parents[3]


def start(cache: Path, **env) -> dict:
    """A start in a process of its own over a cache."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.text.second_start"],
        cwd=ROOT,
        env={**os.environ, "SYSTOLIC_CACHE": str(cache), **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", autouse=True)
def cheaply() -> Iterator[None]:
    """Programs of this file's processes, which are compared with each other alone, do without costly passes."""
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name.upper(), "1")
        jax.config.update(name, True)
        yield
        jax.config.update(name, before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache that a first process filled, and what it said."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, start(folder)


@pytest.fixture(scope="module")
def small():
    return Small(MODEL)


def checks(small, root) -> dict:
    """What the store says of each program, by its name."""
    store = ProgramStore(small.steps, root=root)
    return {one.program: one for one in plan_engine(small.steps, SIZES, store).kept()}


@pytest.mark.slow
def test_a_second_process_compiles_nothing_and_answers_the_same(cache):
    folder, first = cache
    assert first["compiles"] > first["compiled"] > 0  # the conversion of weights, and empty pages
    assert not first["kept"]
    second = start(folder)
    assert (second["compiles"], second["compiled"], second["lines"]) == (0, 0, [])
    assert second["kept"] == first["compiled"]
    assert second["tokens"] == first["tokens"]


@pytest.mark.slow
def test_a_damaged_entry_and_one_cut_short_are_compiled_anew(cache, tmp_path):
    folder, first = cache
    copy = tmp_path / "cache"
    subprocess.run(["cp", "-a", folder, copy], check=True)
    one, two = sorted((copy / program_store.KIND).glob(f"*/*/{EXECUTABLE}"))[:2]
    content = bytearray(one.read_bytes())
    content[len(content) // 2] ^= 1
    one.write_bytes(content)
    two.write_bytes(two.read_bytes()[:100])
    again = start(copy)
    assert again["compiles"] == 2
    assert again["tokens"] == first["tokens"]
    assert [line.endswith("is damaged and is made anew") for line in again["lines"]] == [True] * 2
    assert start(copy)["compiles"] == 0


@pytest.mark.long
def test_two_first_starts_at_once_share_a_cache(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(start, [tmp_path, tmp_path])
    assert one["tokens"] == two["tokens"]
    assert one["lines"] == two["lines"] == []
    assert start(tmp_path)["compiles"] == 0


@pytest.mark.long
def test_what_jax_s_own_cache_had_is_not_kept_again(cache, tmp_path):
    """Such a program loads and then lacks its functions (jaxlib 0.10.2 on a CPU)."""
    _, first = cache
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    start(tmp_path / "one", **env)
    for folder in ("two", "two"):
        again = start(tmp_path / folder, **env)
        assert again["tokens"] == first["tokens"]
        assert not again["kept"]


def test_every_program_of_this_process_is_on_the_disk(cache, small, monkeypatch):
    folder, _ = cache
    found = checks(small, folder)
    assert all(one.hit for one in found.values()), [one.line for one in found.values()]
    assert {one.line.split()[0] for one in found.values()} == {"hit"}


def test_what_is_absent_and_what_is_damaged_is_said_so_and_nothing_is_made(cache, small, tmp_path):
    folder, _ = cache
    assert {(one.state, one.differs) for one in checks(small, tmp_path).values()} == {
        (EntryState.absent, ())
    }
    copy = tmp_path / "cache"
    subprocess.run(["cp", "-a", folder, copy], check=True)
    for entry in (copy / program_store.KIND).glob(f"*/*/{EXECUTABLE}"):
        if json.loads(entry.with_name(FINGERPRINT).read_text())["program"].startswith("decode"):
            entry.write_bytes(entry.read_bytes()[:100])
    before = sorted(copy.rglob("*"))
    lines: list[str] = []
    store = ProgramStore(small.steps, lines.append, root=copy)
    found = {one.program: one for one in plan_engine(small.steps, SIZES, store).kept()}
    states = {name: one.state for name, one in found.items()}
    damaged = [name for name, state in states.items() if state is EntryState.damaged]
    assert damaged
    assert all(name.startswith("decode") for name in damaged)
    assert set(states.values()) == {EntryState.damaged, EntryState.hit}
    record = found[damaged[0]].to_json()
    assert (record["hit"], record["state"], record["differs"]) == (False, "damaged", [])
    assert str(copy) in record["reason"]
    assert (lines, sorted(copy.rglob("*"))) == ([], before)


@pytest.mark.parametrize(
    "change",
    ["source", "version", "setting", "flags", "processor", "rows", "variable"],
)
def test_whatever_changes_a_program_is_a_miss_that_names_it(cache, small, monkeypatch, change):
    folder, _ = cache
    sizes, name = SIZES, ""
    if change == "source":
        changed = {**program_store.sources(), "models": "0" * 16}
        monkeypatch.setattr(program_store, "sources", lambda: changed)
        name = "source.models is 0000000000000000, kept with "
    elif change == "version":
        changed = {**program_store.versions(), "jaxlib": "0.10.1"}
        monkeypatch.setattr(program_store, "versions", lambda: changed)
        name = "versions.jaxlib is 0.10.1, kept with "
    elif change == "setting":
        old = jax.config.values["jax_default_matmul_precision"]
        jax.config.update("jax_default_matmul_precision", "highest")
        try:
            found = checks(small, folder)
        finally:
            jax.config.update("jax_default_matmul_precision", old)
        assert {one.differs for one in found.values()} == {
            (f"jax.jax_default_matmul_precision is highest, kept with {old}",)
        }
        return
    elif change == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        name = "flags is --xla_cpu_enable_fast_math=true, kept with "
    elif change == "processor":
        monkeypatch.setattr(program_store, "cpu_features", lambda: "another")
        name = "device.features is another, kept with "
    elif change == "variable":
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        name = "environment.XLA_PYTHON_CLIENT_PREALLOCATE is false, kept with none"
    elif change == "rows":
        from dataclasses import replace

        sizes = replace(SIZES, pages=9)
    store = ProgramStore(small.steps, root=folder)
    found = plan_engine(small.steps, sizes, store).kept()
    if change == "rows":  # the choices do not read pages
        assert [one.hit for one in found] == [one.program.startswith("choice") for one in found]
        return
    assert not any(one.hit for one in found)
    assert {one.state for one in found} == {EntryState.differs}
    assert all(one.differs[0].startswith(name) for one in found), found[0].line


def test_another_model_is_a_miss_that_names_its_field(cache):
    from dataclasses import replace

    folder, _ = cache
    found = checks(Small(replace(MODEL, rope_theta=500_000.0)), folder)
    assert not any(one.hit for one in found.values())
    assert all(
        any(line.startswith("model.rope_theta is 500000.0, kept with ") for line in one.differs)
        for one in found.values()
    )


def test_an_entry_that_others_could_have_written_is_not_executed(cache, small, tmp_path):
    folder, _ = cache
    copy = tmp_path / "cache"
    subprocess.run(["cp", "-a", folder, copy], check=True)
    entry = next((copy / program_store.KIND).glob(f"*/*/{EXECUTABLE}"))
    entry.chmod(0o666)
    name = json.loads(entry.with_name(FINGERPRINT).read_text())["program"]
    lines: list[str] = []
    store = ProgramStore(small.steps, lines.append, root=copy)
    missing = [one for one in plan_engine(small.steps, SIZES, store).kept() if not one.hit]
    if not name.startswith(("weights", "parts", "empty")):
        assert [(one.program, one.state) for one in missing] == [(name, EntryState.refused)]
        assert "writable by all" in missing[0].line
    (copy / program_store.KIND).chmod(0o777)
    store = ProgramStore(small.steps, lines.append, root=copy)
    assert not store.used
    assert "is writable by all (mode 777), and compiled programs are code" in lines[-1]


def test_a_folder_that_can_not_be_written_is_said_once_and_used_no_more(small, tmp_path):
    (tmp_path / program_store.KIND).write_text("a file where the folder should be")
    lines: list[str] = []
    store = ProgramStore(small.steps, lines.append, root=tmp_path)
    plan = plan_engine(small.steps, SIZES, store)
    plan.programs().compile_largest()
    assert len(lines) == 1
    assert lines[0].startswith("compiled programs are not kept: ")


def test_what_was_not_used_for_longest_goes_first(small, tmp_path):
    store = ProgramStore(small.steps, root=tmp_path)
    for number, name in enumerate(("old", "new")):
        folder = store.root / "ab" / name
        folder.mkdir(parents=True)
        (folder / SUMS).write_bytes(bytes(1000))
        os.utime(folder, (number, number))
    store.tidy(1500)
    assert [one.name for one in program_store.entries(store.root)] == ["new"]
