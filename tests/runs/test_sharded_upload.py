"""Checkpoints in parts on several hosts, in a bucket of a real server: complete there or absent."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from systolic.core.errors import RunError
from systolic.runs import CheckpointStore, Run, manifest
from systolic.runs.access import Access
from systolic.runs.reading import Peers
from systolic.runs.remote import mirror, upload
from systolic.runs.remote.store import Objects, in_bucket
from systolic.runs.remote.upload import Part, rate
from systolic.training import distributed
from systolic.training.session import open_together, seen_by
from tests.buckets import s3_server
from tests.runs.test_mirror import JOB, Machines, names, save, sender


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server("runs") as found:
        yield found


@pytest.fixture
def machine(server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    # Only the tests upload.
    monkeypatch.setattr(upload, "LOOK_SECONDS", 1e6)
    return Machines(tmp_path, monkeypatch)


def part(index: int, session: str = "now", leaders: tuple[int, ...] = (0, 1)) -> Part:
    return Part(index=index, leaders=leaders, session=session)


def begun(machine: Machines, session: str = "now") -> tuple[Run, Run]:
    """A run opened by two hosts."""
    machine("a")
    first = Run.create(machine.url, JOB, part=part(0, session))
    machine("b")
    return first, Run.open(machine.url, part=part(1, session))


def save_part(run: Run, step: int, content: bytes = b"x") -> None:
    """Writes what Orbax writes on one host: the process's database, and files that have the same names on all hosts."""
    assert run.part is not None
    index = run.part.index
    folder = run.checkpoints / str(step)
    at = folder / "params" / f"ocdbt.process_{index}"
    at.mkdir(parents=True)
    database = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{at}/"}}
    tensorstore.KvStore.open(database).result().write(f"w/{index}", content * 5000).result()
    (folder / "_extra").mkdir()
    (folder / "_extra" / f"process_{index}.json").write_text("{}")
    (folder / "params" / "_METADATA").write_text(f"of process {index}")
    metrics = {"loss": 2.0}
    manifest.seal(folder, step=step, leaves={}, metrics=metrics, ignore=[], name=manifest.PART)


def content(run: Path, step: int) -> dict[bytes, bytes]:
    """Contents of a checkpoint's database, as a reader sees it."""
    folder = run / "checkpoints" / str(step)
    mirror.complete(folder)
    manifest.verify(folder, manifest.read(folder), {"params", "_extra"})
    base = {"driver": "file", "path": f"{folder / 'params'}/"}
    found = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    return {key: found.read(key).result().value for key in found.list().result()}


def test_parts_become_one_checkpoint(machine: Machines) -> None:
    first, other = begun(machine)
    save_part(first, 3)
    save_part(other, 3)
    sender(first).send()
    there = names(machine.url)
    assert "checkpoints/3/params/ocdbt.process_0/manifest.ocdbt" in there
    assert "checkpoints/3/manifest.json" not in there, "the other host's part is missing"
    first.append({"kind": "train", "step": 3})
    sender(other).send()
    sender(first).send()
    there = names(machine.url)
    assert {"checkpoints/3/manifest.json", "metrics.jsonl"} <= {*there}
    assert not [name for name in there if "part" in name.rpartition("/")[2] or "/parts/" in name]

    machine("c")
    with Run.open(machine.url) as seen:
        assert content(seen.path, 3) == {b"w/0": b"x" * 5000, b"w/1": b"x" * 5000}
        step = seen.checkpoints / "3"
        assert (step / "params" / "_METADATA").read_text() == "of process 0"
        held = manifest.read(step)
        assert held.metrics == {"loss": 2.0}
        assert {"_extra/process_0.json", "_extra/process_1.json"} <= {*held.files}

    # It is evaluated later, and deleted after that.
    rate(first.checkpoints / "3", {"loss": 1.0}, first.part)
    sender(first).send()
    rated = manifest.read(mirror.pull(machine.url) / "checkpoints" / "3")
    assert (rated.metrics, rated.files) == ({"loss": 1.0}, held.files)
    shutil.rmtree(first.checkpoints / "3")
    sender(first).send()
    assert not [name for name in names(machine.url) if name.startswith("checkpoints/")]
    first.close()
    other.close()


def test_a_checkpoint_that_one_host_never_sent_is_not_there(machine: Machines) -> None:
    first, other = begun(machine, "before")
    for run in (first, other):
        save_part(run, 1)
    sender(other).send()
    sender(first).send()
    save_part(first, 2)
    save_part(other, 2)
    sender(first).send()
    first.append({"kind": "train", "step": 2})
    # Both are killed after the other host noted its part.
    sender(other).send()
    crash(first, other)
    machine("a")
    with Run.open(machine.url, access=Access.write, part=part(0)) as first:
        assert [path.name for path in first.checkpoints.iterdir()] == ["1"]
        assert not [name for name in names(machine.url) if name.startswith("checkpoints/2/")]
        assert [record["step"] for record in first.records()] == [2], (
            "files left behind are uploaded"
        )
        machine("b")
        with Run.open(machine.url, part=part(1)) as other:
            assert content(other.path, 1) == {b"w/0": b"x" * 5000, b"w/1": b"x" * 5000}
            assert [path.name for path in other.checkpoints.iterdir()] == ["1"]
            save_part(other, 2, b"y")
            save_part(first, 2, b"y")
            sender(other).send()
    machine("c")
    assert content(mirror.pull(machine.url), 2) == {b"w/0": b"y" * 5000, b"w/1": b"y" * 5000}


def test_a_store_writes_its_part_and_reads_the_whole(machine: Machines) -> None:
    first, other = begun(machine)
    state = {"params": {"w": jnp.arange(6.0)}, "step": jnp.int32(1)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    save_part(other, 1)
    sender(other).send()
    other.close()
    with CheckpointStore(first.checkpoints, peers=Peers(part=first.part)) as store:
        assert store.save(1, state, extra={"position": 5})
        assert store.wait() is not None
        assert store.steps() == [1]
        store.rate(1, {"loss": 3.0})
        with CheckpointStore(first.checkpoints, access=Access.read) as reader:
            assert reader.steps() == [], "incomplete checkpoints are hidden from readers"
        sender(first).send()
        store.rate(1, {"loss": 2.0})
    first.close()

    machine("c")
    first = Run.open(machine.url, access=Access.write, part=part(0, "then"))
    assert first.part is not None
    peers = Peers(part=replace(first.part, leaders=(0,)))
    with first, CheckpointStore(first.checkpoints, peers=peers) as store:
        restored = store.restore(abstract)
        assert (restored.step, restored.metrics) == (1, {"loss": 2.0})
        assert [extra.get("position") for extra in restored.extras] == [5, None]
        assert np.array_equal(restored.state["params"]["w"], state["params"]["w"])
        # A checkpoint that is complete in the bucket is not written again.
        assert not store.save(1, state, metrics={"loss": 1.0})
    with CheckpointStore(mirror.pull(machine.url) / "checkpoints", access=Access.read) as store:
        assert store.metrics(1) == {"loss": 1.0}


def crash(*runs: Run) -> None:
    """Simulates a kill of the runs' processes."""
    for run in runs:
        run._sender = None
        run.close()


def test_what_a_session_before_said_does_not_count(machine: Machines) -> None:
    first, other = begun(machine)
    late = {"session": "before", "files": {}}
    save_part(first, 1)
    folder = in_bucket(machine.url)
    assert folder is not None
    Objects(folder).write("checkpoints/1/parts/1.json", json.dumps(late).encode())
    sender(first).send()
    assert "checkpoints/1/manifest.json" not in names(machine.url)
    save_part(other, 1)
    sender(other).send()
    sender(first).send()
    assert "checkpoints/1/manifest.json" in names(machine.url)
    first.close()
    other.close()


def test_a_merge_that_broke_off_is_made_again(
    machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = begun(machine)
    for run in (other, first):
        save_part(run, 1)
        if run is other:
            sender(run).send()
    merge = Objects.merge

    def broken(self: Objects, below: str, parts: list[str]) -> None:
        merge(self, below, parts)
        raise RunError("the bucket does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "merge", broken)
        with pytest.raises(RunError, match="does not answer"):
            sender(first).send()
    sender(first).send()
    other.close()
    first.close()
    machine("c")
    seen = mirror.pull(machine.url)
    assert content(seen, 1) == {b"w/0": b"x" * 5000, b"w/1": b"x" * 5000}
    assert len(list((seen / "checkpoints" / "1" / "params" / "d").iterdir())) == 1


def test_the_end_waits_for_the_parts_of_others(
    machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = begun(machine)
    save_part(first, 1)
    monkeypatch.setattr(upload, "LOOK_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(upload, "PATIENCE_SECONDS", 0.05)
        with pytest.raises(
            RunError, match=r"lacks parts of the checkpoint of step 1.*previous checkpoint"
        ):
            first.close()
    machine("a")
    first = Run.open(machine.url, access=Access.write, part=part(0))
    save_part(first, 2)
    waiting = Thread(target=first.close)
    waiting.start()
    save_part(other, 2)
    other.close()
    waiting.join()
    assert "checkpoints/2/manifest.json" in names(machine.url)


def test_a_host_that_was_the_writer_sends_nothing_over_the_run(
    machine: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("a")
    run = Run.create(machine.url, JOB)
    run.append({"kind": "train", "step": 1})
    save(run, 1)
    copy = run.path
    crash(run)
    machine("b")
    first = Run.open(machine.url, access=Access.write, part=part(0))
    first.append({"kind": "train", "step": 7})
    machine("a")
    other = Run.open(machine.url, part=part(1))
    assert (copy.with_name(f"{copy.name}.unsent-1") / "checkpoints" / "1").is_dir()
    save_part(other, 8)
    save_part(first, 8)
    other.close()
    first.close()
    machine("c")
    with Run.open(machine.url) as seen:
        assert [record["step"] for record in seen.records()] == [7]
        assert [path.name for path in seen.checkpoints.iterdir()] == ["8"]


def test_processes_find_who_sees_the_same_folder(tmp_path: Path) -> None:
    barrier, texts = Barrier(4), [""] * 4

    def exchange(index: int, text: str) -> list[str]:
        texts[index] = text
        barrier.wait()
        found = list(texts)
        barrier.wait()
        return found

    folders = [tmp_path / name for name in ("x", "y", "y", "x")]
    found: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        found[index] = seen_by(folders[index], lambda text: exchange(index, text))

    threads = [Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: [0, 1, 1, 0] for index in range(4)}
    assert not [*tmp_path.rglob(".seen*")]
    two = part(2, leaders=(0, 1, 1, 0))
    assert (two.leader, two.leads, two.members, two.share) == (1, False, [1, 2], (1, 2))


def test_a_checkpoint_that_goes_before_it_is_sent_is_said_once(
    machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = begun(machine)
    heard: list[str] = []
    monkeypatch.setattr(sender(first), "_tell", heard.append)
    for step in (1, 2, 3):
        save_part(first, step)
        sender(first).send()
        shutil.rmtree(first.checkpoints / str(step))
    sender(first).send()
    assert len(heard) == 1
    assert "step 1 was deleted for newer ones" in heard[0]
    other.close()
    first.close()


def test_a_checkpoint_that_the_bucket_lost_a_part_of_is_damaged(machine: Machines) -> None:
    first, other = begun(machine)
    for run in (other, first):
        save_part(run, 1)
        run.close()
    folder = in_bucket(machine.url)
    assert folder is not None
    Objects(folder).delete("checkpoints/1/_extra/process_1.json")
    machine("c")
    with pytest.raises(manifest.DamagedError, match=r"process_1\.json was deleted"):
        mirror.complete(mirror.pull(machine.url) / "checkpoints" / "1")


def test_all_end_where_one_cannot_open_its_copy(
    machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("a")
    answers = iter(["other", "1", "its copy is in use by process 5"])
    monkeypatch.setattr(distributed, "joined", lambda: True)
    monkeypatch.setattr(distributed, "several", lambda: True)
    monkeypatch.setattr(distributed, "is_first", lambda: True)
    monkeypatch.setattr(distributed, "share", lambda text: text)
    monkeypatch.setattr(distributed, "exchange", lambda text: [text, next(answers)])
    monkeypatch.setattr(distributed, "peers", lambda: Peers(index=0, count=2))
    parts: list[Part | None] = []

    def begin(part: Part | None) -> Run:
        parts.append(part)
        return Run.create(machine.url, JOB, part=part)

    with pytest.raises(RunError, match="process 1 could not open its copy of the run: its copy"):
        open_together(Path(machine.url), begin, "make")
    assert parts[0] is not None
    assert parts[0].leaders == (0, 1)
    Run.open(machine.url, access=Access.write).close()
