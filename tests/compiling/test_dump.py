"""What a child does once the compiler has written its schedule."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from systolic.chips.flags import compile_options
from systolic.compiling import dump
from tests.recorded import hlo

PROGRAM = """
import os, sys, threading
from systolic.compiling.dump import LEAST_PRIORITY, step_back
ended, begun = threading.Event(), threading.Event()
tasks = []
def behind():
    tasks.append(threading.get_native_id())
    begun.set()
    ended.wait()
threading.Thread(target=behind).start()
begun.wait()
mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
step_back()
assert os.getpriority(os.PRIO_PROCESS, tasks[0]) == LEAST_PRIORITY
assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine
ended.set()
"""


def test_the_compile_behind_a_schedule_leaves_the_processor_to_its_reader() -> None:
    if not sys.platform.startswith("linux"):
        return
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


class Lowered:
    """Compiles at once: the compiler has ended before its dump is looked at, as a busy machine can have it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def compile(self, compiler_options: dict[str, Any]) -> None:
        path = Path(compiler_options["xla_dump_to"]) / f"module_0001.f{dump.SCHEDULED}"
        path.write_text(self.text)


class Behind(Lowered):
    """Writes its schedule and continues with code, as on TPU7x, where programs of SparseCores come before
    ``after_buffer_assignment``."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.ended = threading.Event()

    def compile(self, compiler_options: dict[str, Any]) -> None:
        super().compile(compiler_options)
        folder = Path(compiler_options["xla_dump_to"])
        for ending in (dump.USAGE, dump.PROTO, dump.LAST):
            (folder / f"module_0001.f.{ending}").write_text("")
        self.ended.wait(60)
        (folder / "module_0001.f.after_optimizations_after_buffer_assignment.txt").write_text("")


def test_the_schedule_is_read_before_the_code_of_sparse_cores(tmp_path: Path) -> None:
    text, result = hlo.text("scatter-v5e-1"), list[str]()
    lowered = Behind(text)
    reader = threading.Thread(
        target=lambda: result.append(dump.schedule(lowered, {}, tmp_path, 2**34)), daemon=True
    )
    reader.start()
    reader.join(30)
    waited = reader.is_alive()
    lowered.ended.set()
    assert not waited
    assert result == [text]


class Ended:
    """A thread that has ended when it is started."""

    def __init__(self, target: Any, daemon: bool) -> None:
        self.start = target

    def is_alive(self) -> bool:
        return False


def test_a_compiler_that_ended_between_two_looks_has_written_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump.threading, "Thread", Ended)
    text = hlo.text("scatter-v5e-1")
    assert dump.schedule(Lowered(text), {}, tmp_path, 2**34) == text
    with pytest.raises(RuntimeError, match="only a part of the schedule"):
        dump.schedule(Lowered(text[:-200]), {}, tmp_path, 2**34)


def test_only_the_search_that_a_schedule_alone_does_not_need_is_left_out() -> None:
    (flag,) = dump.shorter_search("tpu7x-16")
    own = f"{flag.partition('=')[0]}=true"
    # What a user asks for comes later, and counts.
    assert set(compile_options([flag, own], "tpu").values()) == {"true"}
    assert not any(
        dump.shorter_search(on) for on in ("v4-8", "v5e-16", "v5p-8", "v6e-8", "2xv6e-4")
    )
