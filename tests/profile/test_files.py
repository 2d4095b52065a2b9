"""What is read as a profile, and what is said of a file that is none."""

import gzip
import json
import lzma
import os
import shlex
from pathlib import Path

import pytest

from systolic.cli.main import main
from systolic.core.errors import DataError, NotFoundError
from systolic.explaining.profiles import is_profile
from systolic.profile.files import find, is_profile_file
from systolic.profile.xplane import load_all
from tests.profile.real import BF16, EXCERPTS, HOST_OFFLOAD, KERNEL, QUANTIZED, whole

CPU = Path(__file__).parents[1] / "recorded" / "profile"

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
    assert (
        f"explain {shlex.quote(str(path))} needs a slice; add --on v5e-8" in capsys.readouterr().err
    )


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


# Several profiles below one folder


def cpu(name: str) -> bytes:
    return lzma.decompress((CPU / f"{name}.xplane.pb.xz").read_bytes())


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_the_newest_run_is_read_whichever_folder_it_lies_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the time in its name, as XProf lists runs, not by the path above it."""
    for where, name in (
        ("a/plugins/profile/2026_11_21_10_00_00", "digits"),
        ("b/plugins/profile/2026_11_20_10_00_00", "late"),
        ("b/plugins/profile/2026_11_19_23_59_59", "odd"),
    ):
        (tmp_path / where).mkdir(parents=True)
        (tmp_path / where / "host.xplane.pb").write_bytes(cpu(name))
    (chosen,), notes = find(tmp_path)
    assert chosen == tmp_path / "a/plugins/profile/2026_11_21_10_00_00/host.xplane.pb"
    assert notes == [
        "2 older profiles than a/plugins/profile/2026_11_21_10_00_00: b/plugins/profile/2026_11_20_10_00_00, b/plugins/profile/2026_11_19_23_59_59"
    ]
    assert main(["explain", str(tmp_path)]) == 0
    assert "2 older profiles than a/plugins/profile/2026_11_21" in capsys.readouterr().out


def test_a_run_without_a_time_in_its_name_counts_by_its_file(tmp_path: Path) -> None:
    for folder, modified in (("first", 2e9), ("second", 1e9), ("2026_01_11", 5e8)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "host.xplane.pb"
        file.write_bytes(b"")
        os.utime(file, (modified, modified))
    assert find(tmp_path)[0] == [tmp_path / "first" / "host.xplane.pb"]
    assert "second" in find(tmp_path)[1][0].partition(": ")[2]


def test_two_runs_in_one_folder_are_refused_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same recipe's steps on a CPU, a minute apart."""
    for name in ("digits", "late"):
        (tmp_path / f"{name}.xplane.pb").write_bytes(cpu(name))
    line = said(capsys, "explain", str(tmp_path))
    assert f"{tmp_path} holds profiles of 2 runs" in line
    assert "digits.xplane.pb (jit_" in line
    assert "late.xplane.pb (jit_" in line
    assert line.endswith("give one of these files, or a folder for each run [option]")


def test_profiles_of_other_programs_in_one_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (HOST_OFFLOAD, KERNEL):
        (tmp_path / name).write_bytes(whole(name).read_bytes())
    listed = "v6e-1-pallas-matmul.xplane.pb (jit_matmul_optimized on TPU v6 Lite, 2026-07-09 06:46 UTC); v6e-8-allreduce-host-offload.xplane.pb (jit_f on TPU v6 Lite, 2025-03-11 19:41 UTC)"
    assert listed in said(capsys, "explain", str(tmp_path))
    assert listed in said(capsys, "calibrate", str(tmp_path), "--name", "a")


def test_models_of_one_server_are_apart_by_the_programs_fingerprint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two recordings of vLLM: the programs' names are the same, and no file says its time."""
    for name in (BF16, QUANTIZED):
        (tmp_path / name).write_bytes(whole(name).read_bytes())
    assert "holds profiles of 2 runs" in said(capsys, "explain", str(tmp_path), "--chip", "tpu7x")


def test_hosts_that_traced_at_one_time_are_one_run(tmp_path: Path) -> None:
    for host in ("one", "two"):
        (tmp_path / f"{host}.xplane.pb").write_bytes(cpu("digits"))
    first, second = load_all(tmp_path)
    assert (first.host, second.host) == ("one", "two")
    began, ended = first.recorded or (0.0, 0.0)
    assert began == pytest.approx(1795259643.86)
    assert ended - began == pytest.approx(0.405, abs=1e-3)


def test_a_viewers_copy_of_no_host_is_said_to_be_left_out(tmp_path: Path) -> None:
    run = folder_of_a_run(tmp_path, "one.xplane.pb")
    for name in ("one.trace.json.gz", "other.trace.json.gz"):
        (run / name).write_bytes((EXCERPTS / BF16).read_bytes())
    assert find(tmp_path)[1] == ["other.trace.json.gz, a viewer's copy beside an xplane.pb"]
