"""Folders that transformers opens and people have: other names of tensors, and what is no model, named."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from systolic.cli.main import main
from systolic.core.errors import SystolicError
from systolic.data.text.tokenizer import Tokenizer
from systolic.formats.hugging_face import reader
from systolic.formats.jobs import job_of
from systolic.formats.source import open_source
from tests.formats import folders
from tests.formats.test_source import arrays

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of tied weights."""
    model = folders.llama(tie_word_embeddings=True)
    return folders.folder(tmp_path_factory.mktemp("tied") / "m", model)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a last matrix of its own."""
    model = folders.llama(tie_word_embeddings=False)
    return folders.folder(tmp_path_factory.mktemp("apart") / "m", model)


def renamed(source: Path, to: Path, name: Any) -> Path:
    shutil.copytree(source, to)
    tensors = load_file(source / WEIGHTS)
    save_file(
        {name(one): tensor for one, tensor in tensors.items()}, to / WEIGHTS, {"format": "pt"}
    )
    return to


def same(one: Path, other: Path) -> None:
    expected, found = arrays(open_source(one), "float32"), arrays(open_source(other), "float32")
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array)


NAMES = {
    "DataParallel": lambda name: f"module.{name}",
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "compiled inside": lambda name: name.replace("model.", "model._orig_mod."),
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}".replace(".mlp", "._checkpoint_wrapped_module.mlp"),
    "Lightning": lambda name: f"model.{name}",
    "of a larger model": lambda name: f"language_model.{name}",
    "in a larger model": lambda name: f"model.language_{name}" if "model." in name else name,
    "GPT": lambda name: name.replace("model.", "transformer.", 1),
}  # fmt: skip


@pytest.mark.parametrize("form", NAMES)
def test_names_of_wrappers_and_prefixes_are_understood(
    form: str, tied: Path, apart: Path, tmp_path: Path
) -> None:
    same(tied, renamed(tied, tmp_path / "tied", NAMES[form]))
    same(apart, renamed(apart, tmp_path / "apart", NAMES[form]))


@pytest.mark.parametrize("form", ["DataParallel", "of a larger model"])
def test_parity_of_renamed_tensors_is_that_of_the_folder_itself(
    form: str, tied: Path, tmp_path: Path
) -> None:
    """transformers does not open such names, so the other side reads the tensors under its own."""
    path = renamed(tied, tmp_path / "m", NAMES[form])
    found = reader.opened(path, transformers.AutoModelForCausalLM)
    expected = load_file(tied / WEIGHTS)
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected.get(name, expected["model.embed_tokens.weight"])), name


def test_what_automodel_saves_is_opened_as_by_transformers(tied: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tied, bare)
    transformers.AutoModel.from_pretrained(tied, dtype=torch.float32).save_pretrained(bare)
    assert "layers.0.mlp.up_proj.weight" in load_file(bare / WEIGHTS)
    same(tied, bare)
    # The last matrix stands for the embedding that it is tied to.
    head = renamed(
        tied, tmp_path / "head", lambda name: "lm_head.weight" if "embed" in name else name
    )
    same(tied, head)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(head, dtype=torch.float32)
    expected = load_file(tied / WEIGHTS)["model.embed_tokens.weight"]
    assert torch.equal(theirs.model.embed_tokens.weight, expected)


def test_a_language_model_without_its_last_matrix_is_named(apart: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(apart, bare)
    transformers.AutoModel.from_pretrained(apart, dtype=torch.float32).save_pretrained(bare)
    with pytest.raises(SystolicError, match=r"lacks lm_head\.weight alone, as AutoModel saves it"):
        open_source(bare)


def test_shards_without_an_index_are_read_where_all_are_there(tied: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    folders.folder(parts, folders.llama(tie_word_embeddings=True), shard="20KB")
    (parts / f"{WEIGHTS}.index.json").unlink()
    same(tied, parts)
    first = min(parts.glob("model-*.safetensors"))
    first.unlink()
    with pytest.raises(SystolicError, match=f"lacks 1, first {first.name}; copy the whole folder"):
        open_source(parts)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    "name", [WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_pointer_of_git_lfs_is_named(name: str, tied: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(tied, path)
    (path / name).write_text(POINTER)

    def use() -> None:
        Tokenizer(path=open_source(path).path).encode("a")

    with pytest.raises(SystolicError, match=rf"{name} is a pointer of Git LFS .* git lfs pull"):
        use()
    for suffix in (".gguf", ".pth", ".ckpt"):
        file = tmp_path / f"model{suffix}"
        file.write_text(POINTER)
        with pytest.raises(SystolicError, match="is a pointer of Git LFS"):
            open_source(file)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (("adapter_config.json", "adapter_model.safetensors"), "PEFT"),
        (("config.json", "adapter_config.json", "adapter_model.safetensors"), "PEFT"),
        (("config.json", "pytorch_model-00001-of-00002.bin"), "pytorch_model-00001-of-00002.bin, which is not read"),
        (("config.json", "consolidated.00.pth"), "consolidated.00.pth, which is not read"),
        (("config.json", "model.fp16.safetensors"), "rename it to model.safetensors"),
        (("config.json", "a.safetensors", "b.safetensors"), "2 files such as a.safetensors"),
        (("config.json", "model.safetensors.incomplete"), "a download that has not ended"),
        (("config.json", "model-q4.gguf"), "give .*model-q4.gguf"),
        (("config.json",), "copy the weights too"),
        (("params.json", "consolidated.safetensors"), "makers' own format"),
        (("models--a--b/snapshots/0123/config.json",), "no model in a format known"),
        (("snapshots/0123/config.json",), "give .*snapshots/0123"),
        (("sub/config.json",), "give .*/sub"),
        (("model.safetensors",), "has weights and no config.json"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_named(
    files: tuple[str, ...], says: str, tied: Path, tmp_path: Path
) -> None:
    for name in files:
        file = tmp_path / "m" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((tied / "config.json").read_bytes() if name.endswith("/config.json") or name == "config.json" else b"{}")  # fmt: skip
    with pytest.raises(SystolicError, match=says) as caught:
        open_source(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_form_says_how_to_write_it(tied: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(tied, path)
    (path / "tokenizer.json").rename(path / "tokenizer.model")
    with pytest.raises(SystolicError, match=r"tokenizer in tokenizer\.model; write it with"):
        job_of(open_source(path))


def test_a_file_of_a_folder_says_which(tied: Path) -> None:
    with pytest.raises(SystolicError, match=f"give its folder, {tied}"):
        open_source(tied / WEIGHTS)


def test_a_config_with_a_byte_order_mark_is_read(tied: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(tied, path)
    fields = json.dumps(json.loads((tied / "config.json").read_text()))
    (path / "config.json").write_text("\ufeff" + fields, encoding="utf-8")
    same(tied, path)


@pytest.mark.usefixtures("at_once")
def test_parity_compares_texts_and_ids(
    tied: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that tokenizer.json lacks are alike on both sides; a tokenizer that splits otherwise is told."""
    path = tmp_path / "m"
    shutil.copytree(tied, path)
    file = path / "tokenizer_config.json"
    said = json.loads(file.read_text()) | {"eos_token": "<|unlisted|>"}
    file.write_text(json.dumps(said))
    assert main(["import", str(path), "--out", str(tmp_path / "one")]) == 0
    line = next(one for one in capsys.readouterr().out.splitlines() if one.startswith("parity"))
    assert "tokenizer alike over 11 texts" in line
    # As it was before those tokens were followed.
    monkeypatch.setattr("systolic.data.text.tokenizer.added_tokens", lambda folder, config: [])
    (path / "added_tokens.json").write_text("{}")  # the tokenizer is read anew
    assert main(["import", str(path), "--out", str(tmp_path / "other")]) == 0
    line = next(one for one in capsys.readouterr().out.splitlines() if one.startswith("parity"))
    assert "warning: the tokenizer differs over 1 of 11 texts, first 'x<|unlisted|>y" in line
