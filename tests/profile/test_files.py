"""What is read as a profile, and what is said of a file that is none."""

import gzip
import json
from pathlib import Path

import pytest

from systolic.cli.main import main
from systolic.core.errors import DataError, NotFoundError
from systolic.profile.files import find, is_profile_file
from systolic.profile.xplane import load_all
from systolic.session.profiles import is_profile
from tests.profile.real import BF16, EXCERPTS, HOST_OFFLOAD

TORCH = {"traceEvents": [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "python"}}]}


def folder_of_a_run(path: Path, *names: str) -> Path:
    run = path / "plugins" / "profile" / "2026_01_11"
    run.mkdir(parents=True)
    for name in names:
        (run / name).write_bytes((EXCERPTS / HOST_OFFLOAD).read_bytes())
    return run


def test_a_folder_and_those_above_it_hold_the_profile(tmp_path: Path):
    run = folder_of_a_run(tmp_path, "one.xplane.pb")
    for folder in (run, run.parent, run.parents[1], tmp_path):
        assert is_profile(folder)
        assert find(folder)[0] == [run / "one.xplane.pb"]


def test_files_of_several_hosts_are_one_profile(tmp_path: Path):
    run = folder_of_a_run(tmp_path, "one.xplane.pb", "two.xplane.pb")
    assert [trace.device for trace in load_all(run)] == [
        "one TPU:0",
        "one TPU:1",
        "two TPU:0",
        "two TPU:1",
    ]


def test_a_host_whose_file_is_damaged_is_named(tmp_path: Path):
    run = folder_of_a_run(tmp_path, "one.xplane.pb")
    (run / "two.xplane.pb").write_bytes(b"\x0a\xff\xff")
    traces = load_all(run)
    assert [trace.device for trace in traces] == ["one TPU:0", "one TPU:1"]
    assert "the host two: " in traces[0].notes[0]


def test_the_viewers_copy_beside_a_profile_is_left(tmp_path: Path):
    run = folder_of_a_run(tmp_path, "one.xplane.pb")
    (run / BF16).write_bytes((EXCERPTS / BF16).read_bytes())
    assert find(tmp_path)[0] == [run / "one.xplane.pb"]


def test_a_trace_is_told_by_its_content(tmp_path: Path):
    plain = tmp_path / "saved.json"
    plain.write_bytes(gzip.decompress((EXCERPTS / BF16).read_bytes()))
    assert is_profile_file(plain)
    assert len(load_all(plain)) == 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.nsys-rep", b"x", "Nsight Systems"),
        ("host.op_stats.pb", b"x", "give the xplane.pb beside it"),
        ("module.hlo.txt", b"HloModule a", "--on"),
        ("dump.txt", b"HloModule a, is_scheduled=true", "--on"),
        ("a.xplane.pb", b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        ("a.xplane.pb", b"\x0a\xff\xff", "no profile, or damaged"),
        ("a.xplane.pb", b"", "nothing runs on a device"),
        ("a.trace.json.gz", b"\x1f\x8b\x08broken", "no trace of XProf, or damaged"),
        ("a.trace.json", b'{"traceEvents": [', "no trace of XProf, or damaged"),
        ("torch.trace.json", json.dumps(TORCH).encode(), "a trace of python, not of XProf"),
        ("empty.trace.json", b'{"traceEvents": []}', "not of XProf"),
    ],
)
def test_what_is_no_profile_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, said: str
):
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["explain", str(path)]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert name in line


def test_a_dump_of_any_path_needs_a_slice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("a name that is longer than a screen is wide " * 3) / "dump.txt"
    path.parent.mkdir()
    path.write_text("HloModule a, is_scheduled=true\n")
    assert main(["explain", str(path)]) == 2
    assert f"explain {path} needs a slice; add --on v5e-8" in capsys.readouterr().err


def test_an_empty_folder_is_none(tmp_path: Path):
    assert not is_profile(tmp_path)
    with pytest.raises(NotFoundError, match="holds no profile"):
        find(tmp_path)


def test_a_trace_without_ops_says_what_to_do(tmp_path: Path):
    path = tmp_path / "a.trace.json"
    events = [
        {"ph": "M", "pid": 3, "name": "process_name", "args": {"name": "/device:TPU:0"}},
        {"ph": "M", "pid": 3, "tid": 2, "name": "thread_name", "args": {"name": "XLA Modules"}},
        {"ph": "X", "pid": 3, "tid": 2, "ts": 1.0, "dur": 2.0, "name": "jit_f(1)"},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(DataError, match="nothing runs on a device"):
        load_all(path)
