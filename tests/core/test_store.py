import signal
import subprocess
import sys
from pathlib import Path

import pytest

from systolic.core.errors import RunError
from systolic.core.files import Store, cache_home, read_json

HOLDER = """\
import sys, time
from pathlib import Path
from systolic.core.files import Store

store = Store("things", Path(sys.argv[1]))
with store.scratch() as folder, store.lock("abc"):
    (folder / "half").write_text("half")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store("things", tmp_path)


def scratches(store: Store) -> list[str]:
    """What is left of folders being filled, and of their locks."""
    return [path.name for path in store.root.rglob(".new-*")]


def test_what_is_put_is_there(store: Store) -> None:
    assert store.get("abcdef") is None
    with store.scratch() as folder:
        (folder / "file").write_text("content")
        place = store.put("abcdef", folder)
    assert store.get("abcdef") == place
    assert (place / "file").read_text() == "content"
    assert scratches(store) == []


def test_the_first_stays(store: Store) -> None:
    for text in ("first", "second"):
        with store.scratch() as folder:
            (folder / "file").write_text(text)
            place = store.put("abcdef", folder)
    assert (place / "file").read_text() == "first"
    assert scratches(store) == []


def interrupted(store: Store) -> None:
    with store.scratch() as folder:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt


def test_nothing_stays_of_what_failed(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(store)
    assert scratches(store) == []


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_fills_is_not(
    store: Store, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        left = Path(process.stdout.readline().strip())
        with store.scratch():
            assert (left / "half").exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert left.exists()
    with store.scratch():
        assert not left.exists()
    assert scratches(store) == []
    waited: list[str] = []
    with store.lock("abc", lambda: waited.append("waited")):  # the dead hold nothing
        assert waited == []


def test_a_lock_is_held_by_one(store: Store, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        with store.lock("other", pytest.fail):
            pass
        # Told that it waits, it ends the holder: only then can it go on.
        with store.lock("abc", process.kill):
            assert process.wait() == -signal.SIGKILL


def test_a_store_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "things").write_text("a file is in the way")
    with (
        pytest.raises(RunError, match="SYSTOLIC_CACHE") as raised,
        Store("things", tmp_path).scratch(),
    ):
        pass
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [None, "{half"])
def test_a_damaged_file_is_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RunError, match=r"report\.json is damaged") as raised:
        read_json(path)
    assert "\n" not in str(raised.value)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("SYSTOLIC_CACHE", raising=False)
    assert cache_home() == tmp_path / "xdg" / "systolic"
    monkeypatch.setenv("SYSTOLIC_CACHE", str(tmp_path / "own"))
    assert cache_home() == tmp_path / "own"
