"""The real compiler on a small function, in its child process."""

import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from systolic import recipes
from systolic.chips import slice
from systolic.compiling import Compiled, Compiler, Failed, JobProgram, Outcome, Rejected, compile
from systolic.compiling.compile import Pool
from systolic.compiling.pickled import dumps
from systolic.core.errors import LayoutError
from systolic.forecasting.run import of_outcome
from systolic.hlo import parse
from tests.compiling import functions
from tests.tiers import some

pytest.importorskip("libtpu")
WHOLE_GIB = 2**30


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def ask(root: Path, function: object, **how: object) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    compiler = Compiler(root=root, **how)  # ty: ignore[invalid-argument-type]
    return compile(functions.program(function), slice("v5e-4"), compiler, said.append), said


def left_behind(root: Path) -> list[str]:
    """Folders being filled, their locks, and living children that work for this store."""
    files = [str(path) for path in root.rglob(".new-*")]
    children = [
        " ".join(command)
        for process in psutil.process_iter(["cmdline"])
        if str(root) in " ".join(command := process.info["cmdline"] or [])
        and "systolic.compiling.child" in command
    ]
    own = [process.name() for process in psutil.Process().children(recursive=True)]
    children += [name for name in own if name == "compiling.child"]  # of those that were forked
    return files + children


@pytest.fixture(scope="module")
def first(root: Path) -> tuple[Outcome, list[str]]:
    return ask(root, functions.matmul)


def test_the_answer_is_a_schedule(root: Path, first: tuple[Outcome, list[str]]) -> None:
    answer, said = first
    assert isinstance(answer, Compiled)
    assert answer.executable is None
    assert said == ["importing", "tracing", "lowering", "compiling", "compiled"]
    module = parse(answer.hlo)
    assert module.is_scheduled
    assert module.num_partitions == 4
    assert [p.shape.dims for p in module.entry.parameters] == [(256, 512), (512, 256)]
    memory = answer.report.memory
    assert memory.argument_size_in_bytes == 2 * 2 * 256 * 512
    assert memory.used_in_bytes >= memory.argument_size_in_bytes
    assert answer.report.flops == pytest.approx(2 * 256 * 512 * 256, rel=0.05)
    assert sorted(map(tuple, answer.report.places)) == [
        (x, y, 0, 0, 0) for x in range(2) for y in range(2)
    ]
    assert left_behind(root) == []


def test_the_second_time_nothing_is_compiled(root: Path, first: tuple[Outcome, list[str]]) -> None:
    again, said = ask(root, functions.matmul)
    assert isinstance(again, Compiled)
    assert said[-1] == "found"
    assert "compiling" not in said
    assert again.cached
    assert again.folder == first[0].folder


def test_mistakes_come_back_as_what_they_are(root: Path) -> None:
    with pytest.raises(LayoutError, match="3 heads do not divide among 4 devices; choose 4"):
        ask(root, functions.refused)
    answer, _ = ask(root, functions.mistaken)
    assert isinstance(answer, Failed)
    assert answer.reason.startswith("TypeError: dot_general requires")
    assert "functions.py" in answer.log
    assert left_behind(root) == []


def test_an_unknown_flag_is_one_line(root: Path) -> None:
    answer, _ = ask(root, functions.matmul, flags=("--xla_tpu_no_such_thing=3",))
    assert isinstance(answer, Failed)
    assert "does not know a flag" in answer.reason
    assert "xla_tpu_no_such_thing" in answer.reason
    assert "\n" not in answer.reason


def test_a_killed_child_is_a_readable_failure(root: Path) -> None:
    answer, _ = ask(root, functions.deadly)
    assert answer == Failed(
        reason="the compiler died of SIGKILL; it may have run out of memory", log=answer.log
    )
    assert left_behind(root) == []


@pytest.mark.slow
@pytest.mark.parametrize("quick", some([False, True], [True]))
def test_out_of_memory_is_an_answer_with_names(root: Path, quick: bool) -> None:
    on, compiler = slice("v5e-1"), Compiler(root=root)
    compiler = compiler.quick() if quick else compiler
    answer = compile(functions.large(30_000), on, compiler)
    assert isinstance(answer, Rejected)
    assert answer.space == "hbm"
    assert answer.have_bytes == 15.75 * WHOLE_GIB
    assert 14 * WHOLE_GIB + 2 * 30_000**2 < answer.need_bytes < 40 * WHOLE_GIB
    forecast = of_outcome(answer, "outer", on, 0.0).to_json()
    assert not forecast["fits"]
    assert forecast["hbm"]["peak_bytes"] == answer.need_bytes
    assert sum(forecast["hbm"]["by_kind"].values()) == answer.need_bytes
    buffers = forecast["rejected"]["buffers"]
    assert buffers[0]["kind"] == "parameters"
    assert buffers[0]["bytes"] == 14 * WHOLE_GIB
    assert buffers[0]["shape"] == "bf16[7340032,1024]"
    made = next(b for b in buffers if b["kind"] == "temporaries")
    assert made["bytes"] >= 2 * 30_000**2
    assert made["shape"].startswith(("bf16[30000,", "(bf16[30000,"))
    assert made["op"].startswith("jit(outer)/")
    assert "functions.py:" in made["source"]
    again = compile(functions.large(30_000), on, compiler)
    assert isinstance(again, Rejected)
    assert again.cached
    assert again.need_bytes == answer.need_bytes


def test_a_train_step_above_the_memory_is_refused_from_its_schedule(root: Path) -> None:
    """XLA writes such a schedule whole, and compares its memory afterwards."""
    recipe = recipes.find("lm")
    sizes = {"layers": 1, "d_model": 256, "d_ff": 512, "heads": 2, "kv_heads": 2, "head_dim": 128}
    options = {"model": sizes, "sequence": 2048, "batch": 2048, "path": __file__}
    program = JobProgram(job=recipe(recipes.typed(recipe, options)))
    answer = compile(program, slice("v5e-1"), Compiler(root=root).quick())
    assert isinstance(answer, Rejected)
    assert answer.need_bytes > answer.have_bytes == 15.75 * WHOLE_GIB
    assert answer.need_bytes > 2048 * 2048 * 256 * 2  # the layer's input, in bf16


INTERRUPTED = """\
import sys
import threading
from pathlib import Path
from systolic.compiling import Compiler, compile
from systolic.chips import slice
from tests.compiling import functions

def say(stage):
    print(stage, flush=True)

compile(functions.program(functions.matmul), slice("v5e-4"), Compiler(root=Path(sys.argv[1])), say)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_parent_leaves_no_child(tmp_path: Path, how: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "importing\n"
        children = psutil.Process(process.pid).children()
        assert len(children) == 1
        process.send_signal(how)
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
    if how is signal.SIGINT:
        assert left_behind(tmp_path) == []
    # What a killed parent could not remove, the next one does.
    from systolic.core.files import Store

    with Store("programs", tmp_path).scratch():
        pass
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_two_at_once_compile_the_same_program_once(tmp_path: Path) -> None:
    one = (functions.program(functions.matmul), slice("v5e-4"), Compiler(root=tmp_path))
    with Pool(2) as pool:
        answers = [future.result() for future in [pool.submit(*one), pool.submit(*one)]]
    assert all(isinstance(answer, Compiled) for answer in answers)
    assert sorted(answer.cached for answer in answers) == [False, True]
    assert answers[0].folder == answers[1].folder


@pytest.mark.slow
def test_ending_several_ends_all_children(tmp_path: Path) -> None:
    work = [
        (functions.program(functions.matmul, on), slice(on), Compiler(root=tmp_path))
        for on in ("v5e-4", "v5e-8", "v6e-4")
    ]
    begun = threading.Semaphore(0)
    with Pool(2) as pool:
        futures = [pool.submit(*one, lambda _: begun.release()) for one in work]
        begun.acquire()
        begun.acquire()
    for future in futures:
        assert future.cancelled() or isinstance(future.exception(), KeyboardInterrupt)
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_the_quick_compile_knows_the_same_memory(tmp_path: Path) -> None:
    whole = compile(functions.program(functions.matmul), slice("v5e-4"), Compiler(root=tmp_path))
    quick = Compiler(root=tmp_path).quick()
    short = compile(functions.program(functions.matmul), slice("v5e-4"), quick)
    assert isinstance(whole, Compiled)
    assert isinstance(short, Compiled)
    assert short.digest != whole.digest
    assert short.report.memory.used_in_bytes == whole.report.memory.used_in_bytes


def test_code_keeps_the_name_of_its_file() -> None:
    def outer() -> Any:
        return lambda: None

    restored = pickle.loads(dumps(outer))
    assert restored.__code__.co_filename == restored().__code__.co_filename == __file__
