"""Workers are bounded by cores, and end with the process that started them, however it ends."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from systolic.core import machine
from systolic.core.machine import (
    bounded,
    bounded_workers,
    flags_of_user,
    num_cores,
    set_up_xla,
    sound_flags,
    take_huge_pages,
    takes_advice,
)
from systolic.core.reporter import reporting
from systolic.planning.goal import compiles_at_once
from systolic.report.output import StderrReporter

ROOT = Path(__file__).parents[2]


def test_workers_are_bounded_by_cores(capsys: pytest.CaptureFixture[str]) -> None:
    cores = num_cores()
    assert 1 <= cores <= (psutil.cpu_count() or 1)
    assert (bounded(0), bounded(1), bounded(99999)) == (0, 1, cores)
    assert compiles_at_once(99999) == cores
    assert 1 <= compiles_at_once(0) <= cores
    with reporting(StderrReporter()):
        assert bounded_workers(1) == 1
        assert capsys.readouterr().err == ""
        assert bounded_workers(99999) == cores
    assert capsys.readouterr().err == (
        f"systolic: --workers 99999 is more than the {cores} cores of this machine; {cores} work at once\n"
    )


@pytest.mark.parametrize(
    ("jaxlib", "fused"),
    [
        ("0.10.2", True),
        ("0.11.1", True),
        ("0.11.2rc1", False),
        ("0.11.2.dev20260901", False),
        ("0.12.0", False),
        ("0.12.0.1", False),
        ("0.12.1", True),
        ("1.0+cpu", True),
    ],
)
def test_convolutions_are_not_fused_where_a_jaxlib_makes_nan_of_them(
    jaxlib: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: jaxlib)
    given = "--xla_dump_to=here"
    added = sound_flags(given).removeprefix(given)
    assert (not added) is fused
    own = "--xla_cpu_experimental_ynn_fusion_type="
    assert sound_flags(own) == own
    assert flags_of_user(sound_flags(given)) == given
    assert flags_of_user(sound_flags("")) == ""


READER = """\
import numpy as np
from systolic.data.arrays import Arrays
from systolic.job.data import Read, Split

if __name__ == "__main__":
    data = Arrays.of(train={"number": np.arange(64)})
    batches = data.open(Read(split=Split.train, batch=4, workers=1))
    next(batches)
    print("reading", flush=True)
    input()
"""

PARENT = """\
import os, subprocess, sys

code = "import os, time; from systolic.core.machine import end_with; end_with(os.getppid()); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print("reading", flush=True)
input()
"""


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; who has inherited it may ask for its code later."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("source", [READER, PARENT], ids=["data", "child"])
def test_workers_end_with_a_killed_parent(tmp_path: Path, source: str) -> None:
    script = tmp_path / "parent.py"  # Grain's workers import the main module again
    script.write_text(source)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Python counts the semaphores that it removes for the dead
        cwd=ROOT,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reading\n"
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while any(map(runs, workers)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(runs, workers))


@pytest.mark.parametrize(
    ("jaxlib", "given", "sound"),
    [
        ("0.10.2", "", False),
        ("0.11.1", "", False),
        ("0.11.2", "", True),
        ("0.12.0.1", "--xla_cpu_copy_insertion_use_region_analysis=true", True),
        ("0.12.0.2", "", False),
        ("0.12.0", "--xla_cpu_experimental_ynn_fusion_type=reduce", False),
    ],
)
def test_a_jaxlib_that_fuses_convolutions_wrongly_is_told_not_to(
    monkeypatch: pytest.MonkeyPatch, jaxlib: str, given: str, sound: bool
) -> None:
    """``tests/formats/programs/test_stablehlo.py`` computes with the jaxlib that is here."""
    monkeypatch.setattr("importlib.metadata.version", {"jaxlib": jaxlib}.__getitem__)
    monkeypatch.setenv("XLA_FLAGS", given)
    set_up_xla()
    more = "--xla_cpu_experimental_ynn_fusion_type=dot,individual_dot,individual_convolution"
    assert os.environ["XLA_FLAGS"].split() == [*given.split(), *([more] if sound else [])]


TELLING = """import os
from pathlib import Path
from systolic.core.errors import OptionError

def job() -> None:
    \"\"\"Says where it runs.\"\"\"
    said = f"{os.getpid()} {os.environ.get('GLIBC_TUNABLES')}"
    Path(__file__).with_name("said").write_text(said)
    raise OptionError("said")
"""


@pytest.mark.parametrize("given", ["", "glibc.malloc.hugetlb=0", "glibc.malloc.trim_threshold=1"])
def test_training_takes_huge_pages_in_the_same_process(tmp_path: Path, given: str) -> None:
    (tmp_path / "recipe.py").write_text(TELLING)
    words = [sys.executable, "-m", "systolic", "train", f"{tmp_path / 'recipe.py'}:job"]
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    env |= {"GLIBC_TUNABLES": given} if given else {}
    child = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
    _, said = child.communicate()
    assert (child.returncode, said.strip()) == (2, "systolic: said [option]")
    pid, tunables = (tmp_path / "said").read_text().split(" ", 1)
    assert int(pid) == child.pid
    if "hugetlb" in given or not takes_advice():
        assert tunables == (given or "None")
    else:
        assert tunables == ":".join(filter(None, (given, "glibc.malloc.hugetlb=1")))


def test_huge_pages_are_asked_for_where_the_kernel_leaves_the_choice(tmp_path: Path) -> None:
    mode = tmp_path / "enabled"
    mode.write_text("[always] madvise never\n")
    assert not takes_advice(mode)
    assert not takes_advice(tmp_path / "nothing")
    mode.write_text("always [madvise] never\n")
    version = tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split(".")))
    assert takes_advice(mode) == (version >= (2, 35))


def test_a_command_starts_itself_again_once_and_only_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "systolic"
    script.write_text("")
    monkeypatch.setattr(machine, "takes_advice", lambda: True)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda path, words, env: started.append(env))
    module = str(Path(machine.__file__).parent.parent / "__main__.py")
    for program, line, times in (
        (str(script), [str(script), "train"], 1),
        (module, ["-m", "systolic", "train"], 1),
        (module, ["-Im", "systolic", "train"], 1),
        (str(script), [str(script), "forecast"], 0),
        ("-", ["-", "train"], 0),  # from standard input
        ("-c", ["-c", "code", "train"], 0),
        (__file__, [__file__, "train"], 0),  # another program, with files of its own
        # Other programs that run this one as a module, or take its name.
        (module, ["-", "train"], 0),
        (module, [__file__, "train"], 0),
        (str(script), ["-c", "code", "train"], 0),
    ):
        started.clear()
        monkeypatch.setattr(sys, "argv", [program, *line[-1:]])
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, *line])
        take_huge_pages()
        assert len(started) == times, line
    # A privileged Python starts without the variable, and goes on.
    monkeypatch.setattr(sys, "argv", [str(script), "train", "digits"])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *sys.argv])
    take_huge_pages()
    (env,) = started
    assert env.pop("GLIBC_TUNABLES") == "glibc.malloc.hugetlb=1"
    monkeypatch.setattr(os, "environ", env)
    take_huge_pages()
    assert len(started) == 1
