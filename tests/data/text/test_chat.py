"""Chat templates, as transformers renders them; and what a template may not do."""

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, trainers

from systolic.core.errors import DataError
from systolic.data.text.chat import find_template, template_for
from systolic.data.text.conversations import Line, closing, tokenized
from systolic.data.text.tokenizer import Tokenizer
from tests.formats import folders

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "A <b>question</b>?"},
]
RICH = """{{ bos_token }}{% for m in messages %}
    {% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {% if loop.index > 2 %}{% break %}{% endif %}
[{{ m.role }}] {% generation %}{{ m.content | trim }}{% endgeneration %} {{ m | tojson }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.mark.parametrize("text", [folders.TEMPLATE, RICH])
@pytest.mark.parametrize("answer", [False, True])
def test_a_template_renders_as_in_transformers(tmp_path: Path, text: str, answer: bool) -> None:
    tokenizer = folders.tokenizer()
    tokenizer.chat_template = text
    tokenizer.save_pretrained(tmp_path)
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=answer)
    found = find_template(tmp_path)
    assert found is not None
    assert found.render(MESSAGES, answer=answer) == expected


def test_a_template_may_stand_in_the_config(tmp_path: Path) -> None:
    named = [
        {"name": "tools", "template": "no"},
        {"name": "default", "template": "{{ eos_token }}{{ messages[0].content }}"},
    ]
    config = {"eos_token": {"content": "<e>"}, "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = find_template(tmp_path)
    assert found is not None
    assert found.render(MESSAGES, answer=True) == "<e>Be brief."
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert find_template(tmp_path) is None


WHETHER = "{% if tools is not none %}tools{% endif %}{% if documents is defined and documents is none %}no documents{% endif %}"


def test_what_transformers_defines_is_defined(tmp_path: Path) -> None:
    tokenizer = folders.tokenizer()
    tokenizer.chat_template = WHETHER
    tokenizer.save_pretrained(tmp_path)
    found = find_template(tmp_path)
    assert found is not None
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert found.render(MESSAGES, answer=False) == expected == "no documents"


AROUND = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("listed", [False, True])
def test_special_tokens_of_an_older_tokenizer(tmp_path: Path, listed: bool) -> None:
    """In special_tokens_map.json, which transformers reads unless the other file lists its added tokens."""
    tokenizer = folders.tokenizer()
    tokenizer.chat_template = AROUND
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["bos_token"] = "<|start|>"
    del config["eos_token"]
    if listed:
        config["added_tokens_decoder"] = {"2": {"content": "<|start|>", "special": True}}
    file.write_text(json.dumps(config))
    tokens = {"bos_token": {"content": "<|begin|>", "lstrip": False}, "eos_token": "<|stop|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = find_template(tmp_path)
    assert found is not None
    text = found.render(MESSAGES, answer=False)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False)
    ours = Tokenizer(path=tmp_path)
    assert (ours.start, ours.end) == (theirs.bos_token_id, theirs.eos_token_id)
    # A run keeps one file for both.
    for name, content in ours.files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "special_tokens_map.json").unlink()
    kept = Tokenizer(path=tmp_path)
    assert (kept.start, kept.end) == (ours.start, ours.end)


def test_the_end_of_a_tokenizer_that_names_none_is_learned(tmp_path: Path) -> None:
    """The folder of GPT-2, whose end transformers knows by its class."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        folders.TEXT,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
        ),
    )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    template, tokenizer = template_for(tmp_path, None), Tokenizer(path=tmp_path)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (row,) = tokenized([Line("here", chat, 0.0)], template, tokenizer)
    assert row.ids[row.learned][-1] == tokenizer.end
    assert closing(template, tokenizer) == tokenizer.end


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "{{ messages.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}",
            "unsafe",
        ),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_what_a_template_may_not_do_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(text)
    found = find_template(tmp_path)
    assert found is not None
    with pytest.raises(DataError, match=says) as caught:
        found.render(MESSAGES, answer=True)
    assert "\n" not in str(caught.value)
