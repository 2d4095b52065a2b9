"""What the tests cost: seconds, memory, the slowest files, coverage by package.

``python benchmarks/suite.py time`` runs the README's test command without and with what it kept, and prints seconds and the peak memory
of all its processes. ``files`` prints CPU seconds of files of tests (``--record`` keeps them in ``tests/seconds.json``, which orders
them). ``coverage --out FILE`` measures lines; ``covered BEFORE AFTER`` compares two. Mutants: ``benchmarks/mutants.py``.

Words after ``--`` go to pytest, such as ``-- -m slow``.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".pytest_cache"
RECORDED = ROOT / "tests/seconds.json"
TIMES = "SYSTOLIC_SUITE_TIMES"
"""Variable with the folder of CPU seconds, for the plugin that this module is in the workers."""
SAMPLE_SECONDS = 0.5


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """As a plugin of pytest: adds a test's CPU seconds, with those of its children, to the worker's file."""
    before = _cpu_seconds()
    try:
        return (yield)
    finally:
        file = item.path.relative_to(ROOT / "tests").as_posix()
        line = json.dumps([file, item.nodeid, round(_cpu_seconds() - before, 4)])
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        with (Path(os.environ[TIMES]) / worker).open("a") as out:
            out.write(line + "\n")


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Memory(threading.Thread):
    """Peak memory of a process and its children, sampled: proportional set sizes, so that shared pages count once."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process, self.peak_bytes = psutil.Process(pid), 0

    def run(self) -> None:
        while True:
            try:
                found = [self._process, *self._process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            self.peak_bytes = max(self.peak_bytes, sum(map(_resident_bytes, found)))
            time.sleep(SAMPLE_SECONDS)


def _resident_bytes(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
    return getattr(full, "pss", full.rss)


def timed(words: Sequence[str]) -> tuple[float, int, str]:
    """Seconds, peak bytes and pytest's last line of one run of the tests."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    memory = Memory(process.pid)
    memory.start()
    out, _ = process.communicate()
    return time.monotonic() - began, memory.peak_bytes, out.splitlines()[-1]


def print_times(times: int, words: Sequence[str]) -> None:
    rows = []
    for _ in range(times):
        shutil.rmtree(KEPT, ignore_errors=True)
        rows.append([timed(words), timed(words)])
        for name, (seconds, peak, last) in zip(("first", "second"), rows[-1], strict=True):
            print(f"{name}: {seconds:.0f} s, {peak / 1e9:.1f} GB at most; {last}", flush=True)
    for name, column in zip(("first", "second"), zip(*rows, strict=True), strict=True):
        seconds = statistics.median(one[0] for one in column)
        print(
            f"{name} run, median of {times}: {seconds:.0f} s, {max(o[1] for o in column) / 1e9:.1f} GB"
        )


def file_seconds(words: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """CPU seconds by file, and by test function."""
    files: dict[str, float] = defaultdict(float)
    functions: dict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        # Options of the environment would choose among the tests.
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "benchmarks.suite", *words],
            cwd=ROOT,
            env={**env, TIMES: folder},
            check=False,
        )
        if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            sys.exit(f"pytest ended with {done.returncode}: nothing is recorded")
        for line in (line for one in Path(folder).iterdir() for line in one.open()):
            file, test, seconds = json.loads(line)
            files[file] += seconds
            functions[test.partition("[")[0]] += seconds
    return files, functions


def print_files(record: bool, most: int, words: Sequence[str]) -> None:
    files, functions = file_seconds(words)
    print(f"{sum(files.values()):.0f} CPU seconds in {len(files)} files")
    for found in (files, functions):
        for name, seconds in sorted(found.items(), key=lambda one: -one[1])[:most]:
            print(f"{seconds:7.1f}  {name}")
    if record:
        whole = {name: round(seconds, 1) for name, seconds in sorted(files.items())}
        RECORDED.write_text(json.dumps(whole, indent=0) + "\n")


def cover(out: Path, words: Sequence[str]) -> None:
    """Writes statements and covered ones by package, of workers and of children that end by themselves."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "rc"
        settings.write_text(
            f"[run]\nsource_pkgs = systolic\nparallel = true\npatch = subprocess\ndata_file = {folder}/data\n"
        )
        command = [sys.executable, "-m", "coverage"]
        given = f"--rcfile={settings}"
        subprocess.run([*command, "run", given, "-m", "pytest", *words], cwd=ROOT, check=False)
        subprocess.run([*command, "combine", "-q", given], cwd=ROOT, check=True)
        made = Path(folder) / "json"
        subprocess.run([*command, "json", "-q", given, "-o", made], cwd=ROOT, check=True)
        found = json.loads(made.read_text())["files"]
    packages: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file, facts in found.items():
        inner = file.partition("src/systolic/")[2].split("/")
        package = packages["/".join(inner[:-1][:1]) or "systolic"]
        package[0] += facts["summary"]["num_statements"]
        package[1] += facts["summary"]["covered_lines"]
    out.write_text(json.dumps(dict(sorted(packages.items())), indent=1) + "\n")


def covered(before: Path, after: Path) -> str:
    """A table of two measurements of coverage."""
    one, two = (json.loads(file.read_text()) for file in (before, after))
    rows = [
        "| package | statements | before, % | after, % | change, points |",
        "|---|---|---|---|---|",
    ]
    for name in sorted({*one, *two}):
        had, has = (
            100 * found[1] / found[0] if found else 0.0 for found in map(_of(name), (one, two))
        )
        rows.append(
            f"| {name} | {two.get(name, [0])[0]} | {had:.1f} | {has:.1f} | {has - had:+.1f} |"
        )
    return "\n".join(rows)


def _of(name: str) -> Any:
    return lambda found: found.get(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    timing = verbs.add_parser("time")
    timing.add_argument("--times", type=int, default=3)
    files = verbs.add_parser("files")
    files.add_argument("--record", action="store_true")
    files.add_argument("--most", type=int, default=10)
    covering = verbs.add_parser("coverage")
    covering.add_argument("--out", type=Path, required=True)
    comparing = verbs.add_parser("covered")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    own, _, words = _split(sys.argv[1:])
    given = parser.parse_args(own)
    if given.verb == "files" and given.record and words:
        parser.error(f"--record writes the seconds of all files; it takes no {words[0]}")
    match given.verb:
        case "time":
            print_times(given.times, words)
        case "files":
            print_files(given.record, given.most, words)
        case "coverage":
            cover(given.out, words)
        case _:
            print(covered(given.before, given.after))


def _split(words: list[str]) -> tuple[list[str], str, list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], "--", words[at + 1 :]


if __name__ == "__main__":
    main()
