"""Runs in a bucket of a real server: uploads, downloads, and complete checkpoints."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from systolic.cli.main import _copied
from systolic.core.errors import NotFoundError, OptionError, RunError, TakenError
from systolic.core.units import MIB
from systolic.runs import Run, manifest
from systolic.runs.access import Access
from systolic.runs.remote import mirror, store, upload
from systolic.runs.remote.mirror import again, pull
from systolic.runs.remote.store import BucketFolder, Objects, _spec, in_bucket, origin
from systolic.runs.remote.upload import Sender
from tests.buckets import s3_server

JOB = {"job": {"name": "tiny"}}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server("runs") as found:
        yield found


@pytest.fixture
def machine(server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Machines":
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return Machines(tmp_path, monkeypatch)


class Machines:
    """Machines that share only a bucket."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.url = f"s3://runs/{folder.name}"

    def __call__(self, name: str) -> None:
        """Switches to another machine."""
        self.monkeypatch.setenv("SYSTOLIC_CACHE", str(self.folder / name))


def save(run: Run, step: int, content: bytes = b"first") -> None:
    """Writes a checkpoint with one array file."""
    folder = run.checkpoints / str(step)
    (folder / "params").mkdir(parents=True)
    (folder / "params" / "array").write_bytes(content * 1000)
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    manifest.seal(folder, step=step, leaves={}, metrics={}, ignore=["_CHECKPOINT_METADATA"])


def sender(run: Run) -> Sender:
    assert run._sender is not None
    return run._sender


def names(url: str) -> list[str]:
    folder = in_bucket(url)
    assert folder is not None
    return Objects(folder).names()


def test_a_run_goes_on_on_another_machine(machine: Machines) -> None:
    machine("a")
    with Run.create(machine.url, JOB, files={"recipe.py": b"x = 1"}) as run:
        run.append({"kind": "train", "step": 1, "loss": 2.5})
        save(run, 1)
        save(run, 2)
    machine("b")
    with Run.open(machine.url, access=Access.write) as run:
        assert run.read_job()["job"] == JOB["job"]
        assert run.recipe.read_text() == "x = 1"
        assert [record["loss"] for record in run.records()] == [2.5]
        first, second = run.checkpoints / "1", run.checkpoints / "2"
        assert not (second / "params").exists()
        mirror.complete(second)
        held = manifest.read(second)
        manifest.verify(second, held, {"params"})
        assert (second / "_CHECKPOINT_METADATA").exists()
        # Retention deletes the first, whose arrays were never downloaded here.
        for file in sorted(first.rglob("*"), reverse=True):
            file.unlink()
        first.rmdir()
        run.append({"kind": "train", "step": 2, "loss": 1.5})
    machine("a")
    found = names(machine.url)
    assert not [name for name in found if name.startswith("checkpoints/1/")]
    assert "checkpoints/2/params/array" in found
    with Run.open(machine.url) as run:
        assert [record["loss"] for record in run.records()] == [2.5, 1.5]
        # The local copy of the first checkpoint is deleted, too.
        assert sorted(path.name for path in run.checkpoints.iterdir()) == ["2"]


def test_arrays_of_another_checkpoint_of_the_step_are_not_taken(machine: Machines) -> None:
    machine("a")
    with Run.create(machine.url, JOB) as run:
        save(run, 1)
    machine("b")
    with Run.open(machine.url, access=Access.write) as run:
        for file in (run.checkpoints / "1").rglob("*"):
            file.unlink()
        (run.checkpoints / "1").rmdir()
        save(run, 1, b"other")
    machine("a")
    step = pull(machine.url) / "checkpoints" / "1"
    mirror.complete(step)
    assert (step / "params" / "array").read_bytes() == b"other" * 1000
    # A kill leaves a lock file that no process holds.
    (step.parent.parent / ".lock").touch()
    machine("b")
    with Run.open(machine.url, access=Access.write) as run:
        run.append({"kind": "train", "step": 2})
    machine("a")
    assert (pull(machine.url) / "metrics.jsonl").exists()


def test_a_checkpoint_counts_when_its_manifest_is_there(machine: Machines) -> None:
    machine("a")
    run = Run.create(machine.url, JOB)
    save(run, 1)
    unsealed = run.checkpoints / "2.orbax-checkpoint-tmp"
    unsealed.mkdir()
    (unsealed / "array").write_text("half")
    sender(run).send()
    assert "checkpoints/1/manifest.json" in names(machine.url)
    assert not [name for name in names(machine.url) if "tmp" in name or "lock" in name]
    # The machine disappears.
    machine("b")
    with Run.open(machine.url) as seen:
        assert [path.name for path in seen.checkpoints.iterdir()] == ["1"]
    run.close()


def test_arrays_go_first_and_manifests_last(
    machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("a")
    with Run.create(machine.url, JOB) as run:
        save(run, 1)
        run.append({"kind": "train", "step": 1})
        order: list[str] = []
        write = Objects.write

        def told(self: Objects, name: str, content: bytes) -> None:
            order.append(name)
            write(self, name, content)

        monkeypatch.setattr(Objects, "write", told)
        sender(run).send()
        assert order.index("checkpoints/1/params/array") < order.index("metrics.jsonl")
        assert order[-1] == "checkpoints/1/manifest.json"
        order.clear()
        sender(run).send()
        assert order == []


KILLED = """
import os, sys
from systolic.runs import Run
from systolic.runs.remote import upload
from tests.runs.test_mirror import JOB, save, sender

upload.LOOK_SECONDS = 1e6
run = Run.create(sys.argv[1], JOB)
run.append({"kind": "train", "step": 1})
save(run, 1)
sender(run).send()
run.append({"kind": "train", "step": 2})
save(run, 2)
os.kill(os.getpid(), 9)
"""


def killed(machine: Machines) -> Path:
    """Copy of a run whose writer was killed before it uploaded a checkpoint."""
    machine("a")
    done = subprocess.run([sys.executable, "-c", KILLED, machine.url], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    folder = in_bucket(machine.url)
    assert folder is not None
    assert "checkpoints/1/manifest.json" in names(machine.url)
    assert "checkpoints/2/manifest.json" not in names(machine.url)
    return folder.copy


@pytest.mark.parametrize("access", [Access.read, Access.write])
def test_what_a_killed_writer_left_is_sent(
    machine: Machines, access: Access, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = killed(machine)
    if access is Access.read:
        pull(machine.url, print)
        assert "(checkpoints of steps [2])" in capsys.readouterr().out
    else:
        Run.open(machine.url, access=access).close()
    assert "checkpoints/2/params/array" in names(machine.url)
    assert (copy / "checkpoints" / "2" / "params" / "array").exists()
    machine("b")
    with Run.open(machine.url) as run:
        assert [record["step"] for record in run.records()] == [1, 2]
        mirror.complete(run.checkpoints / "2")
        manifest.verify(run.checkpoints / "2", manifest.read(run.checkpoints / "2"), {"params"})


def test_what_a_killed_writer_left_is_kept_where_its_run_went_on_elsewhere(
    machine: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = killed(machine)
    machine("b")
    with Run.open(machine.url, access=Access.write) as run:
        run.append({"kind": "train", "step": 5})
        save(run, 5)
    machine("a")
    pull(machine.url, print)
    aside = copy.with_name(f"{copy.name}.unsent-1")
    assert f"kept in {aside}" in capsys.readouterr().out
    assert (aside / "checkpoints" / "2" / "params" / "array").exists()
    assert {p.name for p in (copy / "checkpoints").iterdir()} == {"1", "5"}
    pull(machine.url, print)
    assert not capsys.readouterr().out


def test_what_was_left_is_kept_aside_as_soon_as_another_machine_opens_the_run(
    machine: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = killed(machine)
    machine("b")
    with Run.open(machine.url, access=Access.write) as run:
        before = names(machine.url)
        machine("a")
        pull(machine.url, print)
        assert f"kept in {copy.parent}" in capsys.readouterr().out
        assert names(machine.url) == before
        machine("b")
        assert [path.name for path in run.checkpoints.iterdir()] == ["1"]
        assert [record["step"] for record in run.records()] == [1]
    aside = copy.with_name(f"{copy.name}.unsent-1")
    assert (aside / "checkpoints" / "2" / "params" / "array").exists()


@pytest.mark.parametrize("at", ["checkpoints/2/params/array", "metrics.jsonl"])
def test_a_run_that_is_opened_elsewhere_meanwhile_gets_no_checkpoint(
    machine: Machines, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    copy = killed(machine)
    write, told = Objects.write, []

    def opened_after(self: Objects, name: str, content: bytes) -> None:
        write(self, name, content)
        if name == at:
            write(self, upload.WRITER, b"of another machine")

    monkeypatch.setattr(Objects, "write", opened_after)
    pull(machine.url, told.append)
    assert "continued elsewhere" in told[-1]
    assert not [name for name in names(machine.url) if name.startswith("checkpoints/2/")]
    assert (copy.with_name(f"{copy.name}.unsent-1") / "checkpoints" / "2").exists()


def test_what_a_writer_of_an_earlier_version_left_is_sent(machine: Machines) -> None:
    copy = killed(machine)
    folder = in_bucket(machine.url)
    assert folder is not None
    Objects(folder).delete(upload.WRITER)
    (copy / upload.WRITER).unlink()
    record = copy.with_name(f".{copy.name}.sent.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"writer": ""}))
    pull(machine.url)
    assert "checkpoints/2/manifest.json" in names(machine.url)


def test_what_cannot_be_sent_stays(machine: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = killed(machine)

    def refuse(*_: object) -> None:
        raise RunError("the bucket refuses access")

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "write", refuse)
        with pytest.raises(RunError, match=r"never uploaded.*refuses access"):
            pull(machine.url)
        assert (copy / "checkpoints" / "2" / "params" / "array").exists()
    pull(machine.url)
    assert "checkpoints/2/manifest.json" in names(machine.url)


def test_a_bucket_that_takes_nothing_is_said_once(
    machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(upload, "SEND_SECONDS", 0.01)
    machine("a")
    refused, heard = threading.Semaphore(0), []

    def refuse(*_: object) -> None:
        refused.release()
        raise RunError("the bucket refuses access")

    write = Objects.write
    with Run.create(machine.url, JOB) as run:
        monkeypatch.setattr(sender(run), "_tell", heard.append)
        monkeypatch.setattr(Objects, "write", refuse)
        save(run, 1)
        for _ in range(3):
            assert refused.acquire(timeout=60)
        monkeypatch.setattr(Objects, "write", write)
        while len(heard) < 2:
            time.sleep(0.01)
    assert len(heard) == 2
    assert "refuses access" in heard[0]
    assert "is up to date again" in heard[1]


def test_a_run_that_is_there_is_not_begun_again(machine: Machines) -> None:
    machine("a")
    Run.create(machine.url, JOB).close()
    machine("b")
    with pytest.raises(TakenError, match="--resume s3://runs/"):
        Run.create(machine.url, JOB)
    with pytest.raises(NotFoundError, match="is empty or does not exist"):
        Run.open(f"{machine.url}-other")


def test_a_run_that_is_written_here_is_read_from_its_copy(machine: Machines) -> None:
    machine("a")
    with Run.create(machine.url, JOB) as run:
        run.append({"kind": "train", "step": 1})
        with Run.open(machine.url) as seen:
            assert len(list(seen.records())) == 1


def test_what_is_unchanged_is_not_read_again(
    machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("a")
    Run.create(machine.url, JOB).close()
    machine("b")
    pull(machine.url)
    contents: list[bytes] = []
    read = Objects.read

    def told(self: Objects, name: str, known: str = "") -> tuple[bytes, str] | None:
        found = read(self, name, known)
        contents.append(b"" if found is None else found[0])
        return found

    monkeypatch.setattr(Objects, "read", told)
    assert json.loads((pull(machine.url) / "job.json").read_text())["job"] == JOB["job"]
    assert set(contents) == {b""}


def test_a_file_of_data_is_fetched_again_where_it_is_gone(machine: Machines) -> None:
    folder = in_bucket(f"{machine.url}/train.txt")
    assert folder is not None
    Objects(folder).write("", b"text")
    machine("a")
    [copy] = _copied([f"--data={machine.url}/train.txt"])
    there = Path(copy.removeprefix("--data="))
    assert there.read_text() == "text"
    machine("b")
    there.unlink()
    assert again(there).read_text() == "text"
    assert str(again(there)).startswith(str(machine.folder / "b"))


def test_the_size_of_data_is_said_before_it_is_copied(
    machine: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = in_bucket(f"{machine.url}/texts")
    assert folder is not None
    for number in range(3):
        Objects(folder).write(f"{number}.txt", b"x" * MIB)
    Objects(folder).write("empty.txt", b"")
    machine("a")
    [copy] = _copied([folder.url])
    assert sorted(path.name for path in Path(copy).iterdir()) == [
        "0.txt", "1.txt", "2.txt", "empty.txt"
    ]  # fmt: skip
    said = capsys.readouterr().err
    told = re.fullmatch(
        r"systolic: copying (\S+): about ([\d.]+) MB in 4 files, .* free in .*\n", said
    )
    assert told is not None, said
    assert told[1] == folder.url
    assert 3 * 1.048 <= float(told[2]) <= 3 * 1.048 * 1.13 + 0.01
    _copied([folder.url])
    assert not capsys.readouterr().err, "nothing is new"


@pytest.mark.parametrize("name", ["texts", "texts/0.txt"])
def test_data_that_the_disk_has_no_room_for_is_refused(
    machine: Machines, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = in_bucket(f"{machine.url}/texts")
    assert folder is not None
    Objects(folder).write("0.txt", b"x" * MIB)
    machine("a")
    monkeypatch.setattr(store, "_free", lambda folder: store.SPARE_BYTES + MIB // 2)
    with pytest.raises(RunError, match=r"has about 1\.\d+ MB, and the disk of .* SYSTOLIC_CACHE"):
        _copied([f"{machine.url}/{name}"])
    assert not [path for path in folder.copy.rglob("[!.]*") if path.is_file()]


def test_a_disk_that_fills_meanwhile_keeps_what_came(
    machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = in_bucket(f"{machine.url}/texts")
    assert folder is not None
    for number in range(3):
        Objects(folder).write(f"{number}.txt", b"x" * MIB)
    machine("a")
    monkeypatch.setattr(upload, "_TRANSFERS", 1)
    left = iter([10, 9, 0, 0])
    monkeypatch.setattr(store, "_free", lambda folder: store.SPARE_BYTES + next(left) * MIB)
    with pytest.raises(RunError, match=r"has 1\.05 MB more, and the disk"):
        pull(folder.url)
    assert (folder.copy / "0.txt").exists()
    monkeypatch.setattr(store, "_free", lambda folder: 100 * store.SPARE_BYTES)
    told: list[str] = []
    pull(folder.url, told.append)
    assert "in 2 files" in told[0]


def test_processes_of_a_machine_copy_once(machine: Machines, tmp_path: Path) -> None:
    folder = in_bucket(f"{machine.url}/texts")
    assert folder is not None
    for number in range(3):
        Objects(folder).write(f"{number}.txt", b"x" * MIB)
    machine("a")
    told: list[str] = []
    copies = f"import sys; from systolic.runs.remote.mirror import pull; print(pull({folder.url!r}, print))"
    with store.alone(folder.copy, told.append):
        command = [sys.executable, "-u", "-c", copies]  # each line as it is printed
        other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline().startswith("waiting for another process, which copies to")
        mirror.bring(Objects(folder))
        before = {path: path.stat().st_mtime_ns for path in folder.copy.iterdir()}
    out, _ = other.communicate(timeout=60)
    assert out.splitlines() == [str(folder.copy)], "nothing was left to copy"
    assert before == {path: path.stat().st_mtime_ns for path in folder.copy.iterdir()}


def test_a_bucket_that_is_not_there_is_one_line(machine: Machines) -> None:
    with pytest.raises(NotFoundError, match="bucket elsewhere does not exist"):
        pull("s3://elsewhere/run")


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        (Path("s3://bucket/a"), "s3://bucket/a"),
        (Path("gs://bucket/a"), "gs://bucket/a"),
        ("runs/a", None),
        ("/data/s3:/bucket/a", None),
    ],
)
def test_paths_in_buckets(path: Path | str, url: str | None) -> None:
    folder = in_bucket(path)
    assert (None if folder is None else folder.url) == url
    if folder is not None:
        assert origin(folder.copy) == folder


@pytest.mark.parametrize("path", ["s3://bucket", "gs://bucket/", "s3://bucket/../x"])
def test_a_whole_bucket_is_no_folder(path: str) -> None:
    with pytest.raises(NotFoundError, match="names no folder in a bucket"):
        in_bucket(path)


@pytest.mark.parametrize("path", ["s4://runs/x", Path("S3://runs/x"), "hdfs://runs/x"])
def test_other_storage_is_no_folder_here(path: Path | str) -> None:
    with pytest.raises(OptionError, match="://runs/x has an unsupported scheme; give s3"):
        in_bucket(path)


def test_results_are_written_here(machine: Machines) -> None:
    assert _copied(["--run", "s3://runs/new"]) == ["--run", "s3://runs/new"]
    with pytest.raises(OptionError, match=r"--out is s3:.*; give a path here"):
        _copied(["--out", "s3://runs/out"])


def test_google_s_and_amazon_s_are_opened_by_their_drivers() -> None:
    kinds = {
        scheme: _spec(BucketFolder(scheme=scheme, bucket="b", key="k"))["driver"]
        for scheme in ("s3", "gs")
    }
    assert kinds == {"s3": "s3", "gs": "gcs"}
