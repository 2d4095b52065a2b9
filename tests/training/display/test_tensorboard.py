"""TensorBoard's files, read back with the writer's own messages."""

import io
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from systolic.training.display.tensorboard import TensorBoard
from tests.training.display.fabricate_run import SAMPLE, records, start


def events(path: Path) -> Iterator[Any]:
    """The events of a file: length, its checksum, the message, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    content = path.read_bytes()
    at = 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield Event.FromString(content[at + 12 : at + 12 + length])
        at += 12 + length + 4
    assert at == len(content)


def scalars(found: list[Any]) -> dict[str, list[tuple[int, float]]]:
    values: dict[str, list[tuple[int, float]]] = {}
    for event in found:
        for value in event.summary.value:
            values.setdefault(value.tag, []).append((event.step, value.simple_value))
    return values


def written(folder: Path, lines: list[dict]) -> list[Any]:
    board = TensorBoard(folder)
    for line in lines:
        board.see(line)
    board.close()
    (path,) = folder.iterdir()
    found = list(events(path))
    path.rename(folder.parent / path.name)
    return found


def test_every_record_is_there(tmp_path: Path) -> None:
    lines = records(120)
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    found = written(tmp_path / "board", lines)
    values = scalars(found)
    assert [step for step, _ in values["train/loss"]] == steps
    assert [step for step, _ in values["validation/bits_per_byte"]] == list(range(10, 121, 10))
    by_step = {line["step"]: line for line in lines if line["kind"] == "train"}
    for step, value in values["train/loss"]:
        assert value == pytest.approx(by_step[step]["loss"], nan_ok=True)
    assert sum(math.isnan(value) for _, value in values["train/loss"]) == 3
    assert values["train/accuracy"][-1] == (120, pytest.approx(0.6))
    assert values["train/learning_rate"][-1] == (120, pytest.approx(6e-5))
    assert values["memory/bytes"][-1][1] == pytest.approx(3.6e9)
    assert found[1].wall_time == lines[2]["time"], "the record's clock, not the writer's"


def test_a_sample_is_text_as_it_was_written(tmp_path: Path) -> None:
    found = written(tmp_path / "board", records(120))
    (value,) = [v for event in found for v in event.summary.value if v.tag.startswith("sample")]
    assert value.metadata.plugin_data.plugin_name == "text"
    lines = value.tensor.string_val[0].decode().splitlines()
    assert lines == [f"    {line}" for line in SAMPLE.splitlines()]


def test_a_resumed_session_hides_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    first = written(tmp_path / "a", [start(), *records(120)[1:20]])
    again = written(tmp_path / "b", [start(resumed_from=60)])
    marks = [e.step for e in again if e.HasField("session_log")]
    assert marks == [61]
    assert not any(e.HasField("session_log") for e in first)


def test_what_is_unknown_is_absent(tmp_path: Path) -> None:
    line = next(line for line in records(120) if line["kind"] == "train")
    found = written(tmp_path / "board", [start(), line | {"mfu": None, "memory_bytes": None}])
    assert not {"speed/mfu", "memory/bytes"} & set(scalars(found))


def test_after_close_nothing_is_written(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "board")
    board.see(start())
    board.close()
    (path,) = (tmp_path / "board").iterdir()
    before = path.read_bytes()
    for line in records(120):
        board.see(line)
    board.close()
    assert path.read_bytes() == before


def test_a_view_that_saw_nothing_leaves_no_folder(tmp_path: Path) -> None:
    TensorBoard(tmp_path / "board").close()
    assert not (tmp_path / "board").exists()


class FullDisk(io.BytesIO):
    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_events_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorboardX.record_writer.open_file", lambda path: FullDisk())
    board = TensorBoard(tmp_path / "board")
    for line in records(120):
        board.see(line)
    board.close()


def test_a_folder_that_cannot_be_made_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    board = TensorBoard(tmp_path / "file" / "board")
    board.see(start())
    board.see(records(120)[2])
    board.close()


def test_what_tensorboardx_imports_for_others_is_left_out(tmp_path: Path) -> None:
    code = """
import sys
from systolic.training.display.tensorboard import TensorBoard
from pathlib import Path
watcher = TensorBoard(Path(sys.argv[1]))
watcher.see({"kind": "train", "step": 1, "time": 0.0, "loss": 1.0})
watcher.close()
assert not {"torch", "boto3"} & set(sys.modules)
import torch, boto3
"""
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    assert list(tmp_path.iterdir())
