"""``systolic doctor --multi-host`` in real processes, and its findings from reports that differ."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from systolic.cli.main import main
from systolic.doctor.checks import Status
from systolic.doctor.command import judge, judge_links, report
from systolic.training.distributed import HostReport
from tests.doctor.machines import LAPTOP, TPU_VM, with_package, with_variables


def doctors(count: int, come: int, data: list[Path], wait: str = "60") -> list[dict[str, Any]]:
    """JSON output of each process that connects."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(count)]
    running = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "systolic", "doctor", "--multi-host", "--no-measure"),
                *("--json", *job, "--process", str(index), "--wait-seconds", wait),
                *(("--data", str(data[index])) if data else ()),
            ],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            text=True,
            stdout=subprocess.PIPE,
        )
        for index in range(come)
    ]
    return [json.loads(each.communicate()[0]) for each in running]


def of(answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [finding for finding in answer["findings"] if finding["name"] == name]


def test_two_hosts_with_other_data_are_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "train.txt").write_text(f"text {number}")
    answers = doctors(2, 2, folders)
    for answer in answers:
        assert of(answer, "hosts")[0]["text"] == "2 processes on 1 host connected"
        assert of(answer, "network")[0]["status"] == "ok"
        assert not of(answer, "peers"), "it advises to run what has just run"
        [wrong] = of(answer, "data")
        assert wrong["status"] == "failed"
        host = socket.gethostname()
        assert (
            wrong["text"]
            == f"process 1 on {host} has different data from process 0 on {host}: train.txt differs in size or content"
        )
        assert not of(answer, "versions")
        assert answer["fit"] is False


@pytest.mark.slow
def test_four_hosts_that_are_alike(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("text")
    for answer in doctors(4, 4, [tmp_path] * 4):
        assert of(answer, "hosts")[0]["text"] == "4 processes on 1 host connected"
        assert of(answer, "data")[0]["status"] == "ok"


def test_a_host_that_never_comes_is_named() -> None:
    [answer] = doctors(2, 1, [], wait="0.5")
    [finding] = of(answer, "hosts")
    assert finding["status"] == "failed"
    assert finding["text"].startswith("process 1 did not connect to ")


def test_alone_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--multi-host", "--no-measure"]) == 2
    assert "no other processes found" in capsys.readouterr().err


def reports(*facts: dict[str, Any], ahead: float = 0.0) -> list[HostReport]:
    last = len(facts) - 1
    return [
        HostReport(
            index=index,
            host="abcdefgh"[index],
            facts=each,
            ahead_seconds=ahead if index == last else 0.0,
            error_seconds=0.01,
        )
        for index, each in enumerate(facts)
    ]


SAME = report(TPU_VM, None)


@pytest.mark.parametrize(
    ("other", "status", "name", "text"),
    [
        (
            report(with_package(TPU_VM, "jax", "0.10.1"), None),
            Status.failed,
            "versions",
            "process 2 on c has jax 0.10.1, process 0 on a and others jax 0.10.2",
        ),
        (
            report(with_package(TPU_VM, "libtpu", None), None),
            Status.failed,
            "versions",
            "process 2 on c has libtpu absent, process 0 on a and others libtpu 0.0.42.1",
        ),
        (
            report(with_variables(TPU_VM, XLA_FLAGS="--xla_x=1"), None),
            Status.warning,
            "flags",
            "process 2 on c has XLA_FLAGS --xla_x=1, process 0 on a and others XLA_FLAGS absent",
        ),
        (
            SAME | {"chips": report(LAPTOP, None)["chips"]},
            Status.failed,
            "devices",
            "process 2 on c has none, process 0 on a and others 4 TPU chips",
        ),
    ],
)
def test_a_difference_is_named_by_host(other: Any, status: Status, name: str, text: str) -> None:
    [found] = [f for f in judge(reports(SAME, SAME, other)) if f.status is status]
    assert (found.name, found.text) == (name, text)


def test_clocks() -> None:
    [found] = [f for f in judge(reports(SAME, SAME, ahead=-35.0)) if f.name == "clocks"]
    assert found.text == "the clock of process 1 on b is 35.0 s behind that of process 0 on a"
    [found] = [f for f in judge(reports(SAME, SAME, ahead=0.5)) if f.name == "clocks"]
    assert found.status is Status.note
    # Each within a second of the first one, and 1.8 s apart.
    three = reports(SAME, SAME, SAME, ahead=-0.9)
    three[1] = replace(three[1], ahead_seconds=0.9)
    [found] = [f for f in judge(three) if f.name == "clocks"]
    assert found.text == "the clock of process 1 on b is 1.8 s ahead of that of process 2 on c"


def test_a_host_that_others_do_not_reach_is_named() -> None:
    [found] = judge_links(
        reports({"unreached": {"1": "10.0.0.3:4000 (timed out)"}}, {"unreached": {}})
    )
    assert found.text == "process 0 on a cannot reach process 1 on b at 10.0.0.3:4000 (timed out)"


def test_data_of_which_a_sample_is_compared_says_so(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.truncate(1 << 27)
    told = report(TPU_VM, path)["data"]
    assert "134217728 bytes; digest of names, sizes and 64 MiB of the contents: " in told
    path.write_text("small")
    assert "; digest of names, sizes and contents: " in report(TPU_VM, path)["data"]


def test_data_that_is_on_no_host_is_not_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, text in (("gone", "does not exist"), ("empty", "no files")):
        facts = report(TPU_VM, tmp_path / path)
        found = [f for f in judge(reports(facts, facts)) if f.name == "data"]
        assert [one.status for one in found] == [Status.failed] * 2
        assert text in found[1].text
        assert "process 1 on b" in found[1].text


def test_a_file_that_one_host_lacks_is_named(tmp_path: Path) -> None:
    for folder, names in (("one", "abc"), ("other", "ab")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("text")
    facts = [report(TPU_VM, tmp_path / folder) for folder in ("one", "one", "other")]
    [found] = [f for f in judge(reports(*facts)) if f.status is Status.failed]
    assert found.text == "process 2 on c has different data from process 0 on a: c is missing"


@pytest.mark.parametrize("words", ["--coordinator h:1", "--data x", "--processes 2"])
def test_options_of_several_hosts_need_multi_host(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--no-measure", *words.split()]) == 2
    assert "applies only with --multi-host; add it" in capsys.readouterr().err
