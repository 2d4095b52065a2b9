"""Forms of fine-tuning data as people have them: all become the same turns, and what can't be learned is named as what it is."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from systolic.core.errors import DataError, OptionError
from systolic.data.text.conversations import BadLinesError, Line, Rows, parsed, read
from systolic.data.text.messages import is_learned
from systolic.data.text.row_forms import Columns, Pairs, RowReading

ASKED = {"role": "user", "content": "What is 2 + 2?"}
TURNS = [ASKED, {"role": "assistant", "content": "4"}]
FOUR = {"role": "assistant", "content": "4"}
TOLD = [{"role": "system", "content": "Be short."}, *TURNS]
MORE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
INNER = {"messages": TOLD[:2], "tools": TOOLS, "parallel_tool_calls": True}
HH = "\n\nHuman: a\n\nAssistant: b\n\nHuman: What is 2 + 2?\n\nAssistant: "
CHOSEN = RowReading(pairs=Pairs.chosen)


def turns(folder: Path, row: Any, reading: RowReading = RowReading()) -> Any:  # noqa: B008
    (folder / "data.jsonl").write_text(json.dumps(row) + "\n")
    return [line.messages for line in read(folder / "data.jsonl", reading)]


def share(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": who, "value": what} for who, what in said]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"conversations": share(("human", "What is 2 + 2?"), ("gpt", "4"))}, TURNS),
        (
            {
                "id": "x",
                "conversations": share(("system", "Be short."), (" User", "What is 2 + 2?"), ("ChatGPT", "4")),
            },
            TOLD,
        ),
        ({"system": "Be short.", "conversations": share(("human", "What is 2 + 2?"), ("bot", "4"))}, TOLD),
        # A column of a dataset that holds the conversation as JSON.
        ({"conversations": json.dumps(share(("human", "What is 2 + 2?"), ("gpt", "4")))}, TURNS),
        ({"conversations": TURNS}, TURNS),
        ({"conversation": [{"role": "user", "text": "What is 2 + 2?"}, {"role": "model", "text": "4"}]}, TURNS),
        ({"question": "What is 2 + 2?", "answer": "4"}, TURNS),
        ({"Question": "What is 2 + 2?", "Answer": "4", "turns": 1}, TURNS),
        ({"instruction": "What is 2 + 2?", "context": "", "response": "4", "category": "qa"}, TURNS),
        ({"input": "What is 2 + 2?", "output": "4"}, TURNS),
        ({"system_prompt": "Be short.", "question": "What is 2 + 2?", "response": "4"}, TOLD),
        ({"prompt": TOLD[:2], "completion": TURNS[1:]}, TOLD),
        ({"prompt": TOLD[:2], "completion": "4"}, TOLD),
        # OpenAI's form with the words of others, in any case.
        ({"messages": [{"role": "User", "content": "What is 2 + 2?"}, {"role": "ASSISTANT", "content": "4"}]}, TURNS),
        ({"messages": [{"role": "System", "content": "Be short."}, {"role": "human", "content": "What is 2 + 2?"}, {"role": "gpt", "content": "4"}]}, TOLD),
        # Alpaca's earlier turns, as a list and as a table holds it.
        ({"instruction": "a", "input": "", "output": "b", "history": [["What is 2 + 2?", "4"]], "system": "Be short."}, [*TOLD, *MORE]),
        ({"instruction": "a", "output": "b", "history": json.dumps([["What is 2 + 2?", "4"]])}, [*TURNS, *MORE]),
        ({"instruction": "a", "output": "b", "history": TURNS}, [*TURNS, *MORE]),
        ({"instruction": "What is 2 + 2?", "output": "4", "history": []}, TURNS),
        # An answer that is JSON itself.
        ({"question": "a", "answer": '[{"name": "x"}]'}, [MORE[0], {"role": "assistant", "content": '[{"name": "x"}]'}]),
        ({"question": "a", "answer": "[[1]]"}, [MORE[0], {"role": "assistant", "content": "[[1]]"}]),
    ],
)  # fmt: skip
def test_a_row_in_any_form_is_a_conversation(tmp_path: Path, row: Any, wanted: Any) -> None:
    assert turns(tmp_path, row) == [wanted]


RENDERED = "Below is an instruction.\n\n### Instruction:\nWhat is 2 + 2?\n\n### Response:\n4"


@pytest.mark.parametrize(
    ("row", "wanted", "left"),
    [
        # Alpaca's columns beside their text, which has the answer in it.
        ({"prompt": RENDERED, "instruction": "What is", "input": "2 + 2?", "output": "4"}, [{"role": "user", "content": "What is\n\n2 + 2?"}, FOUR], ["prompt"]),
        ({"instruction": "What is 2 + 2?", "response": "4", "prompt": RENDERED, "id": "x", "n": 3}, TURNS, ["prompt", "id"]),
        # Mathematics: the way to the answer is learned.
        ({"problem": "What is 2 + 2?", "solution": "4", "answer": "no", "source": "amc"}, TURNS, ["answer", "source"]),
        ({"question": "What is 2 + 2?", "answer": "no", "solution": "4"}, TURNS, ["answer"]),
        ({"problem": "What is 2 + 2?", "generated_solution": "4", "expected_answer": "no"}, TURNS, ["expected_answer"]),
        # medical-o1.
        ({"Question": "What is 2 + 2?", "Complex_CoT": "Count.", "Response": "4"}, [ASKED, {**FOUR, "reasoning_content": "Count."}], []),
        ({"prompt": "What is 2 + 2?", "completion": "4", "response": "no", "tools": "[]"}, TURNS, ["response"]),
        ({"query": "What is 2 + 2?", "response": "4", "prompt": "no", "context": " "}, TURNS, ["prompt"]),
        ({"messages": TURNS, "prompt": "no", "train": 0, "problem": ""}, TURNS, ["prompt", "train"]),
        ({"messages": TURNS, "images": [{"path": "a.png"}], "videos": []}, TURNS, ["images"]),
        ({"messages": TURNS, "system": "Be short."}, TOLD, []),
        ({"messages": TOLD, "system": "no"}, TOLD, ["system"]),
    ],
)  # fmt: skip
def test_columns_that_belong_together_are_read_and_others_named(
    tmp_path: Path, row: Any, wanted: Any, left: list[str]
) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    (line,) = read(tmp_path / "data.jsonl")
    assert (line.messages, line.unread) == (wanted, left)
    if left and "messages" not in row and left[0] != "source":
        prompt = next(name for name in row if row[name] == wanted[0]["content"] or name == "instruction")  # fmt: skip
        chosen = RowReading(columns=Columns(prompt=prompt, answer=left[0]))
        (line,) = read(tmp_path / "data.jsonl", chosen)
        assert line.messages[-1]["content"] == row[left[0]]
        assert left[0] not in line.unread


def test_notes_name_what_was_not_read_and_questions_with_their_answer() -> None:
    counts = {"conversations": 3, "copied": 2, "unopened": 1, "unreasoned": 1, "missing": 1}
    rows = Rows(arrays={}, counts=counts, opening="<think>\n", unread=[*"abcdefghij"])
    told = rows.notes()
    assert told[0].startswith("1 answer is written otherwise by the chat template where later")
    assert told[1].startswith("1 answer is without '<think>\\n', which the chat template begins")
    assert told[2].startswith("2 questions are asked with the whole answer in the text; if that")
    assert told[3].startswith("1 answer is without its reasoning, which the chat template leaves")
    assert told[4].startswith("columns that were not read: a, b, c, d, e, f, g, h, … (--columns.p")


def test_calls_of_functions_are_turns(tmp_path: Path) -> None:
    said = share(
        ("human", "What is 2 + 2?"),
        ("function_call", json.dumps({"name": "add", "arguments": {"a": 2, "b": 2}})),
        ("observation", "4"),
        ("gpt", "It is 4."),
    )
    (found,) = turns(tmp_path, {"conversations": said})
    assert found == [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    with pytest.raises(DataError, match="turn 2 calls a function without JSON of its name and arg"):
        turns(tmp_path, {"conversations": share(("human", "a"), ("function_call", "add(2)"))})


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (Columns(prompt="Frage", answer="Antwort"), {"Frage": "What is 2 + 2?", "Antwort": "4", "messages": "none"}),
        (Columns(prompt="q"), {"q": "What is 2 + 2?", "answer": "4", "question": "another"}),
        (Columns(messages="log", role="who", content="said"), {"log": [{"who": "user", "said": "What is 2 + 2?"}, {"who": "assistant", "said": "4"}]}),
    ],
)  # fmt: skip
def test_columns_have_any_names(tmp_path: Path, columns: Columns, row: Any) -> None:
    assert turns(tmp_path, row, RowReading(columns=columns)) == [TURNS]
    with pytest.raises(DataError, match=r"--columns\.\w+.*it has title"):
        turns(tmp_path, {"title": "x"}, RowReading(columns=columns))
    with pytest.raises(OptionError, match="columns has 'anser'; did you mean answer"):
        RowReading(columns={"anser": "x"})  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "5"}, TURNS),
        ({"question": "What is 2 + 2?", "chosen": "4", "rejected": "5", "system": "Be short."}, TOLD),
        ({"chosen": TURNS, "rejected": [ASKED, {"role": "assistant", "content": "5"}]}, TURNS),
        # As UltraFeedback has it: the prompt also begins the conversations.
        ({"prompt": "What is 2 + 2?", "chosen": TURNS, "rejected": TURNS}, TURNS),
        ({"prompt": [ASKED], "chosen": TURNS[1:], "rejected": TURNS[1:]}, TURNS),
        ({"conversations": share(("human", "What is 2 + 2?")), "chosen": {"from": "gpt", "value": "4"}, "rejected": {"from": "gpt", "value": "5"}}, TURNS),
        ({"prompt": "What is 2 + 2?", "completion": "4", "label": True}, TURNS),
        ({"input": "What is 2 + 2?", "preferred": "4", "dispreferred": "5"}, TURNS),
        ({"instruction": "c", "input": "d", "history": [["What is 2 + 2?", "4"]], "chosen": "b", "rejected": "5"}, [*TURNS, {"role": "user", "content": "c\n\nd"}, MORE[1]]),
        # As hh-rlhf has it, and as others split it.
        ({"chosen": f"{HH}4", "rejected": f"{HH}5"}, [*MORE, *TURNS]),
        ({"prompt": HH[:-1], "response": "4", "chosen": " 4", "rejected": " 5"}, [*MORE, *TURNS]),
        ({"prompt": HH[:-1], "chosen": f"{HH}4", "rejected": f"{HH}5"}, [*MORE, *TURNS]),
        ({"prompt": HH[:-1], "completion": " 4", "label": True}, [*MORE, *TURNS]),
        # As OpenAI has it, with tools beside the messages.
        ({"input": INNER, "preferred_output": TURNS[1:], "non_preferred_output": TURNS[1:]}, TOLD),
    ],
)  # fmt: skip
def test_preferences_are_named_and_their_chosen_answers_used_when_asked(
    tmp_path: Path, row: dict[str, Any], wanted: Any
) -> None:
    what = "an answer labelled good or bad" if "label" in row else "a preference pair"
    with pytest.raises(DataError, match=rf"line 1 is {what} .* give --pairs chosen to learn"):
        turns(tmp_path, row)
    assert turns(tmp_path, row, CHOSEN) == [wanted]
    if row.get("input") == INNER:
        (line,) = read(tmp_path / "data.jsonl", CHOSEN)
        assert line.beside == {"tools": TOOLS}
    if "label" in row:
        assert turns(tmp_path, {**row, "label": False}, CHOSEN) == []


def test_tables_and_arrays_are_rows(tmp_path: Path) -> None:
    said = 'She said "4",\nand was right; é'
    for name, delimiter in (("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")):
        # As a spreadsheet saves it, with a byte order mark.
        with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:
            rows = csv.writer(file, delimiter=delimiter)
            rows.writerows([["id", "question", "answer"], [1, "a\tb", said], [2, "c", "d"]])
        lines = list(read(tmp_path / name))
        assert [line.messages[1]["content"] for line in lines] == [said, "d"]
        assert lines[0].messages[0]["content"] == "a\tb"
        assert [Path(line.place).name for line in lines] == [f"{name} line 2", f"{name} line 4"]
    array = [{"instruction": "a", "input": "", "output": "b"}, {"instruction": "c", "output": "d"}]
    (tmp_path / "alpaca.json").write_text(json.dumps(array, indent=2))
    lines = list(read(tmp_path / "alpaca.json"))
    assert [line.messages[1]["content"] for line in lines] == ["b", "d"]
    assert lines[1].place.endswith("alpaca.json row 2")
    assert len(list(read(tmp_path))) == 8


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "question,answer\na,b\nc,d, e\n", r"line 3 has 3 columns and the first line names 2; put texts with ','"),
        ("a.csv", "question,question\na,b\n", "line 1 does not name its columns, each by another name"),
        ("a.csv", "a,b\nc,d\n", "line 2 has a, b; it lacks messages"),
        ("a.tsv", 'question\tanswer\na\t"b', "line 2 is no TSV"),
        ("a.json", '[{"question": "a"', "begins as a JSON array and is none"),
        ("a.jsonl", '{"conversations": [{"from": "robot", "value": "a"}]}', "turn 1 is from 'robot', who is nobody known; did you mean bot[?] take human, "),
        ("a.jsonl", '{"conversations": ["a"]}', "turn 1 is no object; give role and content"),
        ("a.jsonl", '{"question": "a"}', "has question and lacks answer; .* --columns.answer"),
        ("a.jsonl", '{"response": "a"}', "has response and lacks question; .* --columns.prompt"),
        ("a.jsonl", '{"chosen": "a", "rejected": "b"}', "is a preference pair"),
        ("a.jsonl", '{"input": {"messages": []}, "preferred_output": [], "non_preferred_output": []}', r"is a preference pair \(preferred_output and non_preferred_output\)"),
        ("a.jsonl", '{"question": "a", "answer": " "}', "line 1 has an empty answer, so nothing to learn"),
        ("a.jsonl", '{"prompt": "a", "completion": null}', "line 1 has an empty completion"),
        ("a.jsonl", '{"prompt": null, "completion": "a"}', "line 1 has an empty prompt, so nothing that is answered; write it"),
        ("a.jsonl", '{"instruction": " ", "input": "", "output": "a"}', "line 1 has an empty instruction"),
        ("a.jsonl", json.dumps({"messages": [*TURNS, {**ASKED, "content": "\n"}, FOUR]}), "line 1, turn 3 has an empty question, .* give its answer a weight of 0"),
        ("a.jsonl", json.dumps({"messages": [{"role": "system", "content": "a"}, FOUR]}), "line 1 has no question before its answer, .* give the answer a weight of 1"),
        ("a.jsonl", json.dumps({"messages": [FOUR, ASKED, {**FOUR, "weight": 0}]}), "line 1 has the weight 0 at every answer"),
        ("a.jsonl", json.dumps({"conversations": share(("gpt", "a"))}), "line 1 has no question before its answer, .* take the line out"),
        ("a.jsonl", json.dumps({"messages": [{**ASKED, "content": [{"type": "image_url", "image_url": {}}]}, FOUR]}), "line 1, turn 1 has a part of the type 'image_url' in its content, and sft learns text only; take"),
        ("a.jsonl", json.dumps({"messages": [{"role": "user", "content": None}, FOUR]}), "turn 1 lacks a text in content; give it"),
        ("a.feather", "", "a.feather is an Arrow file; write it as Parquet"),
        ("state.json", "{}", "data-0.arrow is an Arrow file; .*load_from_disk"),
        ("a.jsonl", '{"question": "caf\udce9"}', r"line 1 is not UTF-8 \(it has the byte 0xe9\); save it as UTF-8$"),
        ("a.jsonl", '{"question": "a", "answer": ["a"]}', "line 1 has a list in answer that holds no turns; give a text, or turns"),
        ("a.jsonl", '{"instruction": "a", "output": "b", "history": [["c"]]}', "line 1 has a history that is no list of pairs; give .*question, answer"),
        ("a.jsonl", json.dumps({"messages": TURNS, "history": [["c", "d"]]}), "line 1 has history beside messages; put its turns at the start"),
        ("a.jsonl", json.dumps({"messages": [ASKED, {"role": "gpt", "content": ""}]}), "line 1, turn 2 has an empty answer, .* a weight of 0"),
        ("a.jsonl", json.dumps({"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "\n"}]}]}), "turn 2 has an empty answer"),
        ("a.jsonl", json.dumps({"messages": [ASKED, {**TURNS[1], "train": False}]}), "line 1 has the train 0 at every answer"),
        ("a.jsonl", json.dumps({"messages": [ASKED, {**TURNS[1], "loss": "no"}]}), "line 1, turn 2 has the loss 'no'; give 1, or 0 for"),
        ("a.jsonl", json.dumps({"messages": [{**ASKED, "train": True}, TURNS[1]]}), "turn 1 has train at a turn of the role user, and answers alone are learned"),
        ("a.jsonl", json.dumps({"messages": [ASKED, {**TURNS[1], "train_detail": [{"begin_offset": 0}]}]}), "line 1, turn 2 has train_detail, which is not read"),
        ("a.jsonl", json.dumps({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "masked": True}]}), "line 1, turn 2 has masked, which"),
        ("a.jsonl", json.dumps({"messages": TURNS, "loss_mask": [0, 1]}), 'line 1 has loss_mask, which is not read, .*"weight": 0'),
        ("a.jsonl", json.dumps({"messages": TURNS[1:]}), "line 1 has no question before its answer"),
        ("a.jsonl", json.dumps({"messages": [*TURNS[1:], ASKED]}), "line 1 has no question before its answer"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_one_line(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text, errors="surrogateescape")
    if name == "state.json":
        (tmp_path / "data-0.arrow").touch()
    with pytest.raises(DataError, match=says) as caught:
        list(read(tmp_path if name == "state.json" else tmp_path / name))
    assert "\n" not in str(caught.value)


def test_greetings_are_read_and_not_learned(tmp_path: Path) -> None:
    greeting = {"role": "assistant", "content": "Hello."}
    said = share(("gpt", "Hello."), ("human", "What is 2 + 2?"), ("gpt", "4"))
    for row in ({"messages": [greeting, *TURNS]}, {"conversations": said, "system": "Be short."}):
        (found,) = turns(tmp_path, row)
        assert [one["content"] for one in found if is_learned(one)] == ["4"]
        assert found[-3]["content"] == "Hello."
    (found,) = turns(tmp_path, {"messages": [{**greeting, "weight": 1}, *TURNS]})
    assert is_learned(found[0])
    (found,) = turns(tmp_path, {"messages": [TOLD[0], {**greeting, "train": True}]})
    assert is_learned(found[1])
    told = Rows(arrays={}, counts={"greetings": 2}).notes()
    assert told[0].startswith("2 answers are before the first question of a conversation, so read")


def test_all_bad_lines_are_found_at_once(tmp_path: Path) -> None:
    good = json.dumps({"messages": TURNS})
    file = tmp_path / "data.jsonl"
    file.write_text(
        "\n".join([good, "{", good, '{"question": "a"}', '{"chosen": 1, "rejected": 2}'])
    )
    assert sum(isinstance(one, Line) for one in parsed(file)) == 2
    with pytest.raises(BadLinesError) as caught:
        list(read(file))
    places = [re.findall(r"line \d", one)[0] for one in caught.value.lines]
    assert places == ["line 2", "line 4", "line 5"]
    assert "(2 more such lines; systolic data inspect sft names them by their kind)" in str(caught.value)  # fmt: skip
    file.write_text("\n".join([good, "{", "{"]))
    with pytest.raises(BadLinesError, match=r"^2 of 3 lines: .*line 2 is not JSON"):
        list(read(file))
    robots = [json.dumps({"question": "a" * n, "answer": [n]}) for n in range(1, 4)]
    file.write_text("\n".join([good, robots[0], '{"question": "a"}', *robots[1:]]))
    with pytest.raises(BadLinesError, match=r"\(3 more such lines;") as caught:
        list(read(file))
    kinds = [re.sub(" has.*", "", one.replace(f"{file} ", "")) for one in caught.value.kinds]
    assert kinds == ["3 of 5 lines: line 2", "line 3"]
