"""A run holds what it needs: it is used from another folder, after a move, and when what it was made from has changed."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from systolic.cli.main import main
from systolic.core.errors import RunError
from systolic.runs import Run, access, recipe_folder
from tests.training import tiny
from tests.training.children import environment

SIZES = [
    "--model.layers",
    "1",
    "--model.d-model",
    "16",
    "--model.d-ff",
    "16",
    "--model.heads",
    "2",
    "--model.kv-heads",
    "2",
    "--model.head-dim",
    "8",
    "--sequence",
    "32",
    "--batch",
    "4",
    "--steps",
    "3",
    "--precision",
    "f32",
]

RECIPE = """\
from beside_one import STEPS
from tests.training.tiny import job as made


def job(steps: int = STEPS):
    \"\"\"Tiny, and made with modules beside it.\"\"\"
    from pack_beside.inner import WIDTH

    return made(steps=steps, width=WIDTH)
"""
READS = """\
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from systolic.data.arrays import Arrays
from tests.training.tiny import job as made
from tests.training.tiny import load

HERE = Path(__file__).parent
STEPS = json.loads((HERE / "settings.json").read_text())["steps"]


def examples():
    with np.load(HERE / "numbers" / "train.npz") as arrays:
        return {"train": dict(arrays), "validation": load()["validation"]}


def job(notes: Path = Path("notes.txt"), steps: int = STEPS):
    notes.read_text()
    return replace(made(steps=steps), data=Arrays.call(examples))
"""
BESIDE = {
    "beside_one.py": "import beside_two\nSTEPS = beside_two.STEPS\n",
    "beside_two.py": "STEPS = 2\n",
    "pack_beside/__init__.py": "",
    "pack_beside/inner.py": "WIDTH = 8\n",
    "pack_beside/other.py": "",
    "not_imported.py": "raise SystemExit('this is not needed')\n",
}


@pytest.fixture(autouse=True)
def homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    # Whatever the machine sets, users' Python writes bytecode.
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


def tokenizer(file: Path, text: str) -> None:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text] * 50, trainer)
    backend.save(str(file))


def elsewhere(args: list[str], folder: Path) -> dict:
    """What ``systolic ARGS --json`` prints in a process of its own that works in ``folder``."""
    command = [sys.executable, "-m", "systolic", *args, "--json"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder / "cache"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_run_keeps_its_tokenizer_and_works_from_any_folder(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    home = tmp_path / "home"
    (home / "text").mkdir(parents=True)
    for number in range(30):
        (home / "text" / f"{number}.txt").write_text("the array flows while pulses beat\n" * 5)
    tokenizer(home / "tokenizer.json", "the array flows while pulses beat")
    monkeypatch.chdir(home)
    data = ["--path", "text", "--tokenizer", "tokenizer.json"]
    assert main(["train", "lm", *data, *SIZES, "--run", "runs/one", "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    told = trained["final"]["metrics"]
    kept = Run.open("runs/one")
    assert kept.read_job()["options"]["tokenizer"] == "tokenizer"
    assert (kept.tokenizer / "tokenizer.json").read_bytes() == Path("tokenizer.json").read_bytes()

    # The file becomes another tokenizer, and the folder moves with its text.
    tokenizer(home / "tokenizer.json", "an entirely different sentence")
    moved = tmp_path / "moved"
    home.rename(moved)
    run = moved / "runs" / "one"
    measured = elsewhere(["eval", str(run)], tmp_path)
    assert measured["metrics"]["validation"]["loss"] == pytest.approx(
        told["validation_loss"], rel=1e-6
    )
    # The text is gone too: what was trained is used without.
    shutil.rmtree(moved / "text")
    assert main(["generate", str(run), "the", "--tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert main(["eval", str(run)]) == 2
    assert f"text does not exist; give {run} other data with --path" in capsys.readouterr().err
    assert Run.open(run).read_summary()["next"] == f"systolic generate {run}"
    assert Run.open(run).read_summary()["checkpoint"] == str(run / "checkpoints" / "3")


def recipe(folder: Path) -> Path:
    for name, content in {"mine.py": RECIPE, **BESIDE}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder / "mine.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recipe in ``code`` and a run of it in ``run``."""
    home = tmp_path_factory.mktemp("trained")
    file = recipe(home / "code")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        # Without a function named, it is job.
        args = ["train", str(file), "--run", str(home / "run"), "--diagnose", "0", "--json"]
        assert main(args) == 0
    return home


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return shutil.copytree(trained / "run", tmp_path / "run")


def test_modules_beside_a_recipe_are_kept_and_used(
    trained: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert Run.open(run).read_summary()["steps"] == 2
    needed = sorted(name for name in BESIDE if name != "not_imported.py")
    assert sorted(Run.open(run).code()) == [*(f"modules/{name}" for name in needed), "recipe.py"]

    # Other code of the same names is what the folder holds now, and this process has loaded the old.
    (trained / "code" / "beside_two.py").write_text("STEPS = 7\n")
    (trained / "code" / "pack_beside" / "inner.py").write_text("WIDTH = 4\n")
    assert main(["eval", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    assert main(["train", "--resume", str(run), "--steps", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3


def test_files_that_a_recipe_reads_by_its_own_place_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    home = tmp_path / "home"
    (home / "numbers").mkdir(parents=True)
    (home / "mine.py").write_text(READS)
    (home / "settings.json").write_text('{"steps": 2}')
    (home / "notes.txt").write_text("named by an option")
    (home / "other.txt").write_text("not read")
    np.savez(home / "numbers" / "train.npz", **tiny.load()["train"])
    run = tmp_path / "run"
    given = ["--notes", str(home / "notes.txt"), "--diagnose", "0", "--json"]
    assert main(["train", str(home / "mine.py"), *given, "--run", str(run)]) == 0
    assert sorted(Run.open(run).code()) == [
        "modules/numbers/train.npz",
        "modules/settings.json",
        "recipe.py",
    ]
    notes = home.rename(tmp_path / "moved") / "notes.txt"
    (tmp_path / "home").mkdir()
    notes.rename(tmp_path / "home" / "notes.txt")
    capsys.readouterr()
    assert main(["eval", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    # A data set is none of that.
    monkeypatch.setattr(recipe_folder, "KEPT_BYTES", 100)
    shutil.copytree(tmp_path / "moved", tmp_path / "home", dirs_exist_ok=True)
    capsys.readouterr()
    large = ["train", str(home / "mine.py"), *given, "--run", str(tmp_path / "small")]
    assert main(large) == 0
    assert sorted(Run.open(tmp_path / "small").code()) == ["modules/settings.json", "recipe.py"]
    told = capsys.readouterr().err
    assert f"systolic: the recipe reads {home / 'numbers' / 'train.npz'} (" in told
    assert "and a run copies up to 100 B in all" in told


@pytest.mark.skipif(os.name != "posix", reason="files have no such owner")
def test_code_that_others_can_change_is_executed_when_trusted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    ran = tmp_path / "ran"
    mine = (run / "recipe.py").read_text()
    (run / "recipe.py").write_text(f"open({str(ran)!r}, 'w').close()\n{mine}")
    (run / "modules" / "beside_two.py").chmod(0o666)
    for verb in (["eval"], ["generate"], ["predict"], ["train", "--resume"], ["explain"]):
        rest = [__file__] if verb == ["predict"] else []
        code = main([*verb, str(run), *rest])
        out, err = capsys.readouterr()
        # What a run has recorded is explained all the same.
        assert code == (0 if verb == ["explain"] else 1)
        assert code == 0 or "modules/beside_two.py is writable by all (mode 666)" in err
        assert "--trust" in out + err
        assert not ran.exists(), "the code was executed"

    assert main(["eval", str(run), "--trust", "--json"]) == 0
    assert ran.exists()
    assert not list(run.rglob("*.pyc")), "it would be other code, and nobody has read it"
    assert main(["eval", str(run), "--json"]) == 0, "it is remembered"
    (run / "recipe.py").write_text(mine)
    assert main(["eval", str(run), "--json"]) == 1, "it is other code now"
    (run / "modules" / "beside_two.py").chmod(0o644)
    assert main(["eval", str(run), "--json"]) == 0
    (run / "modules" / "beside_two.py").chmod(0o666)
    (run / "modules" / "more.pyc").write_bytes(b"bytecode that Python would import")
    (run / "recipe.py").write_text(f"open({str(ran)!r}, 'w').close()\n{mine}")
    assert main(["eval", str(run), "--json"]) == 1, "bytecode is code, too"
    (run / "modules" / "more.pyc").unlink()
    (run / "recipe.py").write_text(mine)
    (run / "modules" / "beside_two.py").chmod(0o644)
    if os.getuid() == 0:
        capsys.readouterr()
        os.chown(run / "modules", 0, 12345)
        (run / "modules").chmod(0o775)
        assert main(["eval", str(run), "--json"]) == 1
        assert "is writable by the group 12345 (mode 775)" in capsys.readouterr().err
        (run / "modules").chmod(0o755)
        os.chown(run / "recipe.py", 12345, 12345)
        assert main(["eval", str(run), "--json"]) == 1
        assert f"{run / 'recipe.py'} belongs to user 12345" in capsys.readouterr().err


def test_a_path_that_a_run_names_is_not_executed(
    trained: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = trained / "code" / "mine.py"
    (run / "recipe.py").unlink()
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{RECIPE}")
    assert main(["eval", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"systolic: {run} has no recipe.py and was trained with {file}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(os.name != "posix", reason="files have no such owner")
def test_a_recipe_that_a_plan_names_is_the_users_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "mine.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    file.chmod(0o666)
    record = {"step_seconds": 1.0, "slice": "v5e-4", "target": f"{file}:job", "arguments": []}
    (tmp_path / "forecast.json").write_text(json.dumps(record))
    assert main(["explain", str(tmp_path / "forecast.json")]) == 1
    assert f"{file} is writable by all (mode 666)" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_start_that_was_killed_before_its_job_was_written_leaves_the_folder_free(tmp_path: Path):
    files = {"recipe.py": b"one", "modules/a.py": b"", "tokenizer/tokenizer.json": b"{}"}
    with Run.create(tmp_path / "run", {"job": {"name": "a"}}, files=files) as run:
        assert run.code() == {"recipe.py": b"one", "modules/a.py": b""}
    (run.path / "job.json").unlink()
    with pytest.raises(RunError, match="not empty and not a run"):
        Run.create(tmp_path / "run", {"job": {"name": "a"}})
    # A lock that its process did not take away tells the leftovers of a start from a user's files.
    (run.path / ".lock").write_text("12345\n")
    with Run.create(tmp_path / "run", {"job": {"name": "a"}}, files={"recipe.py": b"two"}) as run:
        assert run.code() == {"recipe.py": b"two"}
        assert not run.tokenizer.exists()


def test_what_is_trusted_at_once_is_remembered(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(0o777)
    (run / "recipe.py").touch()
    sources = [{"recipe.py": str(number).encode()} for number in range(80)]
    access.require(run, sources[0], trust=True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda source: access.require(run, source, trust=True), sources))
    for source in sources:
        access.require(run, source, trust=False)
    with pytest.raises(access.TrustError):
        access.require(run, {"recipe.py": b"other"}, trust=False)


def test_a_list_that_can_not_be_written_says_what_names_its_folder(tmp_path: Path):
    (tmp_path / "config").write_text("a file")
    with pytest.raises(RunError, match=r"trusted could not be .* with XDG_CONFIG_HOME$") as caught:
        access.require(tmp_path, {"recipe.py": b"own"}, trust=True)
    assert "\n" not in str(caught.value)


def test_a_run_continues_with_the_recipe_that_began_it_alone(
    trained: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code = recipe(tmp_path / "code").parent
    before = (run / "job.json").read_bytes()

    def refused(*command: str) -> str:
        capsys.readouterr()
        assert main(["train", *command, "--run", str(run), "--continue", "--json"]) == 2
        assert (run / "job.json").read_bytes() == before
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"continue it as it is: systolic train --resume {run} [option]")
        return line

    mine = str(code / "mine.py")
    assert f"began with {trained / 'code' / 'mine.py'}, not with digits" in refused("digits")
    assert "did not begin with the weights of" in refused(mine, "--init-from", str(run))
    helper = next(name for name in BESIDE if name.endswith(".py") and name != "not_imported.py")
    (code / helper).write_text((code / helper).read_text() + "# another version\n")
    assert f"began with other code in {helper}, of which it keeps a copy" in refused(mine)
    (code / helper).write_text(BESIDE[helper])
    # In another folder it is the same recipe; flags reach the run.
    words = ["train", mine, "--run", str(run), "--continue", "--json", "--steps", "3"]
    assert main([*words, "--flags=--xla_cpu_enable_fast_math=true"]) == 0
    record = json.loads((run / "job.json").read_bytes())
    assert record["flags"]["given"] == "--xla_cpu_enable_fast_math=true"
    assert record["options"]["steps"] == 3
