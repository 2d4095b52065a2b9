"""Chat templates, as transformers renders them; and what a template may not do."""

import json
from pathlib import Path

import pytest

from systolic.core.errors import DataError
from systolic.data.text.chat import find_template
from tests.interop import folders

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
