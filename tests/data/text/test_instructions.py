"""Instruction data: tokens and answers as transformers has them, rows, positions, and mistakes by their line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from systolic.core.errors import DataError, NotFoundError
from systolic.data.inspect import inspect
from systolic.data.text.chat import PLAIN, ChatTemplate, template_for
from systolic.data.text.conversations import Line, tokenized
from systolic.data.text.instructions import Filling, Instructions, TooLong, asked
from systolic.data.text.tokenizer import Tokenizer
from systolic.job.data import Read, Split

CHATML = "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nBe kind<|im_end|>\\n' }}{% endif %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
"""The shape of SmolLM2 and Qwen."""
MARKED = "{{ bos_token }}{% for m in messages %}\n  {%- if m.role == 'assistant' %}\n<|im_start|>assistant\n{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}\n{% continue %}\n{%- endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
"""With generation blocks, loop controls and white space control."""
INST = "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (('<<' ~ first ~ '>> ') if loop.first and first else '') + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
"""The shape of Llama 2 and Mistral: no prompt of the next answer, and alternation is checked."""
JSON = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role | upper }} {{ m | tojson }}{{ strftime_now('%Y') if strftime_now is defined and false }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>ASSISTANT {% endif %}"

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}],
    [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "one and two <&>"},
        {"role": "assistant", "content": "three\n\nfour é"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "five"},
    ],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with the special tokens of the templates."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(["hello there one two three four five assistant user"] * 9, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    made.save(str(path / "tokenizer.json"))
    return path


def theirs(folder: Path, template: str | None) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


def ours(folder: Path) -> tuple[ChatTemplate, Tokenizer]:
    """As a run opens them."""
    return template_for(folder, None), Tokenizer(path=folder)


@pytest.mark.parametrize("template", [CHATML, MARKED, INST, JSON])
@pytest.mark.parametrize("chat", CHATS, ids=["one turn", "several turns"])
def test_tokens_are_those_of_transformers(
    folder: Path, tmp_path: Path, template: str, chat: list[dict[str, str]]
) -> None:
    known = theirs(folder, template)
    known.save_pretrained(tmp_path)
    mine, tokenizer = ours(tmp_path)
    (made,) = tokenized([Line("here", chat, 0.0)], mine, tokenizer)
    assert made.ids.tolist() == known.apply_chat_template(chat, return_dict=False)
    for number, message in enumerate(chat):
        if message["role"] == "assistant":
            expected = known.apply_chat_template(
                chat[:number], add_generation_prompt=True, tokenize=False
            )
            assert mine.render(chat[:number], answer=True) == expected
    answers = [m["content"] for m in chat if m["role"] == "assistant"]
    text = tokenizer.decode(made.ids[made.learned].tolist())
    if template is MARKED:
        full = known.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        assert made.learned.tolist() == [bool(one) for one in full["assistant_masks"]]
        assert text == "".join(answers)
    elif template is CHATML:
        assert text == "".join(answers)  # special tokens are not decoded
        ends = tokenizer.encode("<|im_end|>")[0]
        assert int((made.ids[made.learned] == ends).sum()) == len(answers)
        # The line break behind the end of a turn is the template's, not the answer's.
        assert made.learned[-2:].tolist() == [True, False]
    elif template is INST:
        assert text == "".join(f" {answer} " for answer in answers)
        assert made.learned[-1]
        assert made.ids[-1] == tokenizer.end


def test_plain_template_marks_answers_and_their_end(folder: Path, tmp_path: Path) -> None:
    theirs(folder, None).save_pretrained(tmp_path)
    tokenizer = Tokenizer(path=tmp_path)
    mine = template_for(tmp_path, None)
    assert mine.text == PLAIN
    (made,) = tokenized([Line("here", CHATS[1], 0.0)], mine, tokenizer)
    assert tokenizer.decode(made.ids.tolist()) == (
        "### System:\nshort\n\n### Instruction:\none and two <&>\n\n### Response:\nthree\n\nfour é\n\n"
        "### Instruction:\nand?\n\n### Response:\nfive\n\n"
    )
    learned = made.ids[made.learned].tolist()
    assert tokenizer.decode(learned) == "three\n\nfour éfive"
    assert learned.count(tokenizer.end) == 2
    assert mine.render(CHATS[0][:1], answer=True) == "<s>### Instruction:\nhi\n\n### Response:\n"


def test_answers_that_a_template_rewrites_are_counted() -> None:
    shown = "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last or m.role == 'user' else '...' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    made = ChatTemplate(text=shown, origin=Path("shown")).conversation(CHATS[1][1:])
    assert made.missing == 1
    assert [made.text[a:b] for a, b in made.answers] == ["five"]


def written(path: Path, rows: list[Any]) -> Path:
    file = path / "some.jsonl"
    file.write_text(
        "".join(f"{json.dumps(row) if not isinstance(row, str) else row}\n" for row in rows)
    )
    return file


def data(folder: Path, path: Path, **changes: Any) -> Instructions:
    given = {
        "path": path,
        "tokenizer": folder,
        "template": PLAIN,
        "tokens": (("bos_token", "<s>"), ("eos_token", "</s>")),
        "sequence": 64,
        "validation_share": 0.2,
    }
    return Instructions(**{**given, **changes})


def test_three_forms_of_a_line_are_the_same_conversation(folder: Path, tmp_path: Path) -> None:
    file = written(
        tmp_path,
        [
            {
                "messages": [
                    {"role": "user", "content": "a\n\nb"},
                    {"role": "assistant", "content": "c"},
                ]
            },
            {"prompt": "a\n\nb", "completion": "c"},
            {"instruction": "a", "input": "b", "output": "c"},
            {"instruction": "a\n\nb", "output": "c"},
        ],
    )
    rows = data(folder, file, validation_share=0.0, filling=Filling.single).rows(Split.train)
    assert len(rows) == 4
    for name, array in rows.arrays.items():
        assert (array == array[0]).all(), name


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("{", "line 2 is not JSON"),
        ([1], "line 2 is not a JSON object"),
        (
            {"title": "a"},
            "line 2 has title; it lacks messages, or prompt and completion, or instruction and output",
        ),
        ({"prompt": "a"}, "line 2 has prompt and lacks completion"),
        ({"prompt": "a", "completion": 3}, "line 2 has a completion that is no text"),
        ({"messages": [{"role": "user"}]}, "line 2, turn 1 lacks a text in content"),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            "line 2 has no turn of the role assistant",
        ),
    ],
)
def test_a_wrong_line_is_named(folder: Path, tmp_path: Path, row: Any, text: str) -> None:
    file = written(tmp_path, [{"prompt": "a", "completion": "b"}, row])
    with pytest.raises(DataError, match=text):
        data(folder, file).size(Split.train)
    with pytest.raises(NotFoundError, match="give a JSONL file of conversations"):
        data(folder, tmp_path / "none.jsonl").size(Split.train)


@pytest.mark.parametrize(
    ("more", "weight", "says"),
    [
        ({"tools": [{"name": "f"}]}, {}, "line 1 has tools and the chat template of .* takes none"),
        ({}, {"weight": 0}, "line 1 has the weight 0 at every answer"),
        ({}, {"weight": 0.5}, r"line 1, turn 2 has the weight 0\.5; give 1, or 0 for"),
        ({"tools": []}, {"weight": 1}, None),
        ({}, {"weight": None}, None),
        (
            {},
            {"tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
            "line 1, turn 2 calls look, and the chat template of .* leaves the call out; .* tool_calls with --template",
        ),
        (
            {},
            {"function_call": {"name": "look"}},
            "turn 2 calls look, .* a template that writes function_call",
        ),
    ],
)
def test_fields_that_would_change_what_is_learned_are_not_left_out(
    folder: Path, tmp_path: Path, more: dict[str, Any], weight: dict[str, Any], says: str | None
) -> None:
    chat = [CHATS[0][0], {**CHATS[0][1], **weight}]
    file = written(tmp_path, [{"messages": chat, **more}])
    rows = data(folder, file, validation=file)
    if says is None:
        assert len(rows.rows(Split.train)) == 1
        return
    with pytest.raises(DataError, match=says):
        rows.rows(Split.train)


@pytest.mark.parametrize("template", [PLAIN, CHATML, MARKED, INST])
def test_answers_of_weight_0_and_the_words_before_an_answer_are_not_learned(
    folder: Path, tmp_path: Path, template: str
) -> None:
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "wrong", "weight": 0},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "right", "weight": 1},
    ]
    first = [{"role": "assistant", "content": "welcome"}, *chat[2:]]
    theirs(folder, template).save_pretrained(tmp_path)
    mine, tokenizer = ours(tmp_path)
    flagged = [chat[0], {"role": "assistant", "content": "wrong", "train": False}, chat[2], {**chat[3], "loss": True}]  # fmt: skip
    for messages, wanted in (
        (chat, ["right"]),
        (flagged, ["right"]),
        (first, ["welcome", "right"]),
    ):
        if template is INST and messages is first:
            continue  # It takes no such conversation.
        (made,) = tokenized([Line("here", messages, 0.0)], mine, tokenizer)
        learned = tokenizer.decode(made.ids[made.learned].tolist())
        assert learned.split() == (wanted if template is INST else ["".join(wanted)])
        assert made.counts["missing"] == 0
    assert asked(chat) == chat[:3]
    assert asked([*chat[2:], *chat[:2]]) == chat[2:3]


def test_template_refusals_name_the_line(folder: Path, tmp_path: Path) -> None:
    file = written(tmp_path, [{"messages": [*CHATS[0], *CHATS[0][1:]]}])
    with pytest.raises(
        DataError, match=r"line 1: the chat template of .* fails \(turns must alternate\)"
    ):
        data(folder, file, template=INST).size(Split.train)


def test_rows_hold_each_conversation_once_and_learn_only_answers(
    folder: Path, tmp_path: Path
) -> None:
    pairs = [{"prompt": f"one {n}", "completion": f"two {n}"} for n in range(40)]
    made = data(folder, written(tmp_path, pairs), sequence=256)
    tokenizer = made.get_tokenizer()
    answers, total = [], 0
    for split in (Split.train, Split.validation):
        rows = made.rows(split)
        arrays = rows.arrays
        assert rows.counts["learned"] == (arrays["targets"] >= 0).sum()
        total += rows.counts["conversations"]
        for row in range(len(rows)):
            for segment in range(1, arrays["segments"][row].max() + 1):
                mine = arrays["segments"][row] == segment
                targets = arrays["targets"][row][mine]
                answers.append(tokenizer.decode(targets[targets >= 0].tolist()))
                assert arrays["positions"][row][mine].tolist() == list(range(mine.sum()))
    assert sorted(answers) == sorted(pair["completion"] for pair in pairs)
    assert total == 40
    assert 0 < made.rows(Split.validation).counts["conversations"] < 40
    assert (made.rows(Split.train).arrays["segments"].max(axis=1) > 1).any()
    record = inspect(made, Split.train, 2)
    assert record["text"]["row"][0]["trained"].startswith("two ")


@pytest.mark.parametrize(("rule", "count"), [(TooLong.cut, "cut"), (TooLong.drop, "dropped")])
def test_long_conversations_are_counted(
    folder: Path, tmp_path: Path, rule: TooLong, count: str
) -> None:
    pairs = [
        {"prompt": "a", "completion": "b" * 200},
        {"prompt": "a" * 200, "completion": "b"},
        {"prompt": "a", "completion": "b"},
    ]
    made = data(folder, written(tmp_path, pairs), too_long=rule, validation_share=0.0)
    counts = made.rows(Split.train).counts
    assert counts[count] == (1 if rule is TooLong.cut else 2)
    assert counts["unanswered"] == (1 if rule is TooLong.cut else 0)
    assert any("longer than a row of 64 tokens" in note for note in made.notes())
    # Where none is left, the error says how many, why, how long they are and what helps.
    file = written(tmp_path, [{"prompt": f"{n}" * 200, "completion": "b"} for n in range(3)])
    made = data(folder, file, too_long=rule, validation=file)
    longest = made.rows(Split.train).counts["longest"]
    assert longest > 200
    why = {"cut": "without an answer in the row", "dropped": "longer than a row of 64 tokens"}
    for split, use in (
        (Split.train, lambda: made.size(Split.train)),
        (Split.train, lambda: inspect(made, Split.train, 2)),
        (Split.validation, lambda: made.open(Read(split=Split.validation, batch=1))),
    ):
        with pytest.raises(DataError) as refused:
            use()
        told = f"the {split.value} split has no rows, since its 3 conversations are left out (3 {why[count]}): the longest has {longest} tokens; give --sequence {longest - 1}"
        assert str(refused.value).startswith(told)
        assert ("--too-long cut" in str(refused.value)) == (rule is TooLong.drop)
    assert len(replace(made, sequence=longest - 1).rows(Split.train)) == 3


def test_a_position_resumes_to_the_same_batches(folder: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"one {n}", "completion": f"two {n}"} for n in range(40)]
    made = data(folder, written(tmp_path, pairs), filling=Filling.single)
    read = Read(split=Split.train, batch=3, seed=5)
    batches = made.open(read)
    for _ in range(4):
        next(batches)
    state = batches.get_state()
    expected = [next(batches)["tokens"] for _ in range(15)]
    batches.close()
    again = made.open(read)
    again.set_state(state)
    np.testing.assert_array_equal([next(again)["tokens"] for _ in range(15)], expected)
    again.close()


def test_a_token_that_the_model_lacks_is_named(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "hi", "completion": "hello"}]
    file = written(tmp_path, rows)
    most = Tokenizer(path=folder).vocab_size
    assert len(data(folder, file, vocab=most, validation=file).rows(Split.train)) == 1
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    largest = tokenized(
        [Line("here", [{"role": "user", "content": "hi"}, CHATS[0][1]], 0.0)],
        ChatTemplate(text=PLAIN, tokens=tuple(tokens.items()), origin=Path("plain")),
        Tokenizer(path=folder),
    )[0].ids.max()
    with pytest.raises(DataError) as caught:
        data(folder, file, vocab=int(largest) - 9, validation=file).rows(Split.train)
    assert "line 1 has the token" in str(caught.value)
    assert "\n" not in str(caught.value)


PAIRS = [{"prompt": f"one {n} é", "completion": f"two {n}"} for n in range(30)]


def test_files_as_people_have_them_are_the_same_conversations(folder: Path, tmp_path: Path) -> None:
    """With a byte order mark, in other Unicode, compressed, and as Parquet; a file of each alone and in a folder."""
    import bz2
    import gzip
    import lzma

    import pyarrow
    import pyarrow.parquet

    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in PAIRS)
    raw = text.encode()
    files = {
        "plain.jsonl": raw,
        "marked.jsonl": b"\xef\xbb\xbf" + raw,
        "wide.jsonl": text.encode("utf-16"),
        "windows.jsonl": b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
        "big.jsonl": b"\xfe\xff" + text.encode("utf-16-be"),
        "a.jsonl.gz": gzip.compress(raw),
        "marked.jsonl.gz": gzip.compress(b"\xef\xbb\xbf" + raw),
        "named.jsonl": gzip.compress(raw),
        "a.jsonl.bz2": bz2.compress(raw),
        "a.json.xz": lzma.compress(raw),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    table = pyarrow.Table.from_pylist([*PAIRS, {"prompt": "last", "completion": "one"}][:30])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    rows: dict[str, Any] = {}
    for name in (*files, "a.parquet"):
        made = data(folder, tmp_path / name, validation_share=0.0, filling=Filling.single)
        rows[name] = made.rows(Split.train).arrays["tokens"]
        np.testing.assert_array_equal(rows[name], rows["plain.jsonl"])
    inner = tmp_path / "folder"
    inner.mkdir()
    for name in ("a.jsonl.gz", "a.parquet", "a.json.xz"):
        (inner / name).write_bytes((tmp_path / name).read_bytes())
    assert len(data(folder, inner, validation_share=0.0, filling=Filling.single).rows(Split.train)) == 90  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "cut.jsonl.gz",
            b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
            "can't be read behind line 0",
        ),
        ("no.jsonl.bz2", b"{}", "can't be read behind line 0"),
        ("no.parquet", b"PAR1", "can't be read as Parquet"),
        ("a.jsonl.zst", b"(\xb5/\xfd", "Zstandard, which is not read; decompress it first"),
        ("wide.jsonl", b"\xff\xfe{\x00\xd8", "can't be read behind line 0"),
    ],
)
def test_damaged_files_are_named(
    folder: Path, tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        data(folder, tmp_path / name).rows(Split.train)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_may_bring_tools_documents_and_names(folder: Path, tmp_path: Path) -> None:
    """As JSON or, as datasets keep columns, as its text; what the template does not take is refused by name."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    template = "{{ tools | tojson if tools }}{{ documents[0].text if documents }}{{ mode }}{% for m in messages %}<s>{{ m.content }}{% if m.role == 'assistant' %}{% generation %}</s>{% endgeneration %}{% endif %}{% endfor %}"
    given = {
        "messages": CHATS[0],
        "documents": [{"text": "D"}],
        "chat_template_kwargs": {"mode": "M"},
    }
    file = written(tmp_path, [{**given, "tools": tools}, {**given, "tools": json.dumps(tools)}])
    made = data(folder, file, template=template, validation=file, filling=Filling.single, sequence=256)  # fmt: skip
    texts = [
        Tokenizer(path=folder).decode(row[row > 0])
        for row in made.rows(Split.train).arrays["tokens"]
    ]
    assert texts == [f"{json.dumps(tools)}DMhihello there"] * 2
    for more, says in (
        ({"tools": "{"}, "line 1 has tools that are no JSON"),
        ({"tools": {"a": 1}}, "line 1 has tools of another form; give a list of objects"),
        ({"tools": [1]}, "line 1 has tools of another form"),
        ({"chat_template_kwargs": [1]}, "give an object"),
        ({"documents": [{"text": "a"}]}, "line 1 has documents and the chat template of .* takes none"),
    ):  # fmt: skip
        file = written(tmp_path, [{"messages": CHATS[0], **more}])
        with pytest.raises(DataError, match=says):
            data(folder, file).rows(Split.train)


def test_inspect_says_what_was_left_out_as_train_does(folder: Path, tmp_path: Path) -> None:
    rows = [*PAIRS, {"prompt": "a", "completion": "hello there " * 60}]
    file = written(tmp_path, rows)
    made = data(folder, file, too_long=TooLong.drop, validation=file)
    record = inspect(made, Split.train, 8)
    assert record["notes"] == list(made.notes())
    assert "1 conversation is longer than a row of 64 tokens and was left out" in record["notes"]
    # The same lines under another name.
    (tmp_path / "held").mkdir()
    for held, count in ((file, f"all {len(rows)}"), (written(tmp_path / "held", [rows[0], {"prompt": "new", "completion": "b"}]), "1 of 2")):  # fmt: skip
        (told,) = data(folder, file, validation=held).notes()[-1:]
        assert told.startswith(f"{count} conversations of --validation are in --data too, so")
    assert not any("--validation" in note for note in data(folder, file).notes())
