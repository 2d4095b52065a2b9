"""Text for other programs: headers on one line with any option, and YAML that every reader reads as it was given."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from systolic.launching import PLATFORMS, Launch, Prepared, SlurmOptions, prepare
from systolic.launching.gke_serve import GkeServer
from systolic.launching.gke_serve import prepare as prepare_server
from systolic.launching.launch import one_line, yaml_text
from tests.launching.made import launch

ON = {"slurm": "16xh100", "docker": "8xcpu", "local": "4xcpu", "tpu-vm": "2xv5e-16"}
FOLDERS = ("slurm", "docker", "local")
"""Platforms that train into a folder."""
TEXTS = st.text(
    st.one_of(
        st.characters(codec="utf-8", exclude_characters="\0"),
        st.sampled_from("\n\r\t\x1b '\"#$`\\;\x85\u2028"),
    ),
    max_size=30,
)
"""Any argument of a command line, with many of the characters that end lines, quotes or comments."""


@cache
def bash() -> str:
    return shutil.which("bash") or pytest.skip("bash is not installed")


def described(via: str, text: str) -> Launch:
    words = ("--prompt", text, f"--train={text}")
    run = {"run": "/home/me/runs/lm"} if via in FOLDERS else {}
    made_by = ("systolic", "launch", "lm", *words)
    fields: dict[str, Any] = {"made_by": made_by, "options": words, **run}
    if via in ("gke", "tpu-vm", "docker", "slurm"):
        fields |= {"target": "mine.py:job", "code": {"mine.py": f"# {text}\n"}}
    return launch(ON.get(via, "v5e-16"), slurm=SlurmOptions(), **fields)


def written(text: str) -> Iterator[tuple[str, Prepared]]:
    """Files of all platforms for a launch with a text among its options, and a server's."""
    for via in PLATFORMS:
        yield via, prepare(via, described(via, text))
    server = launch("v5e-8", options=("--prompt", text), made_by=("systolic", "launch", text))
    yield "serve", prepare_server(server, GkeServer())


def check_head(name: str, text: str) -> None:
    """Checks that lines before the body are comments, two of which are the header, and empty ones."""
    first = text.splitlines(keepends=True)
    head = text.split("\n")[: 3 if first[0].startswith("#!") else 2]
    assert all(line.startswith("#") for line in head), (name, head)
    assert head[-2].startswith("# Made by: systolic launch "), (name, head)
    assert re.fullmatch(r"# \(systolic 0\.1\.0; \w+-?\w*\)", head[-1]), (name, head)
    assert not set("".join(head)) & set("\r\x85\u2028\u2029\x0b\x0c\x1b"), (name, head)


@settings(max_examples=25, deadline=None)
@given(TEXTS)
@example("Once\ntouch PWNED #")
@example("a\rtouch PWNED")
@example("'\nRUN touch PWNED\n#SBATCH --nodes=9")
def test_no_option_ends_the_header(text: str) -> None:
    scripts = []
    for via, prepared in written(text):
        for name, content in prepared.files.items():
            if name.endswith(".json") or name.startswith("code/"):
                continue
            check_head(f"{via} {name}", content)
            if name.endswith(".sh"):
                scripts.append(content)
    for content in scripts:
        done = subprocess.run([bash(), "-n"], input=content.encode(), capture_output=True)
        assert done.returncode == 0, done.stderr


def test_sbatch_reads_its_options_before_any_command() -> None:
    text = prepare("slurm", described("slurm", "Once\ntouch PWNED\n#SBATCH --nodes=9")).files[
        "job.sh"
    ]
    head = text[: text.index("\ncd ")].splitlines()
    assert all(line.startswith("#") for line in head)
    assert sum(line.startswith("#SBATCH --nodes") for line in head) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4))
@example(["Once\ntouch PWNED #", "it's", "\x01\x7f\x85\u2028\U000e0001", "$'\\n'"])
def test_bash_reads_the_words_of_a_line(words: list[str]) -> None:
    line = one_line(words)
    assert line.isprintable()
    script = f"printf '%s\\0' {line}".encode()
    environ = {"LC_ALL": "C.UTF-8"}
    done = subprocess.run([bash()], input=script, env=environ, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == words


NOT_STRINGS = [
    *(
        "1e-05",
        "1e5",
        "12345e12",
        "1_000",
        "0o17",
        "0x1F",
        "017",
        "0b11",
        "+1",
        "-1",
        ".5",
        "1.",
        "1:30:00",
        "190:20",
    ),
    *(
        "yes",
        "No",
        "ON",
        "off",
        "y",
        "N",
        "true",
        "FALSE",
        "~",
        "null",
        "Null",
        ".inf",
        "-.INF",
        ".nan",
        "NaN",
        "inf",
    ),
    *(
        "2026-11-25",
        "2026-11-25T10:00:00Z",
        "=",
        "<<",
        "",
        " ",
        "-",
        "---",
        "...",
        "a: b",
        "a #b",
        "#",
        "*a",
        "&a",
        "!a",
    ),
    *(
        "%a",
        "@a",
        "`a",
        "[a]",
        "{a}",
        "|",
        ">",
        "? a",
        ", a",
        "a:",
        "'",
        '"',
        "\u00e9",
        "\ufeff",
        "a\u0085b",
        "\U0001f600",
    ),
]
"""Texts that some reader of YAML takes for a number, a boolean, null, a date or a character of its syntax."""
CORE = re.compile(
    r"(null|Null|NULL|~|true|True|TRUE|false|False|FALSE|[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
    r"|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN|)"
)
"""Plain scalars that the core schema of YAML 1.2 does not read as strings (chapter 10.3.2)."""
OLD = re.compile(
    r"(y|n|yes|no|on|off|true|false|null|~|=|<<|[-+]?0b[01_]+|[-+]?[0-9][0-9_,]*(:[0-5]?[0-9])*(\.[0-9_]*)?"
    r"|[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*)",
    re.IGNORECASE,
)
"""The same for YAML 1.1 (https://yaml.org/type/), and exponents without a sign, which Go takes."""
SYNTAX = frozenset("-?:,[]{}#&*!|>'\"%@` ")


def plain(text: str) -> bool:
    """Whether a string is written without quotes, as an item of a list."""
    shown = yaml_text([[text]])
    assert yaml.safe_load(shown) == [text]
    return shown == f"- {text}\n"


@settings(max_examples=400, deadline=None)
@given(st.one_of(TEXTS, st.from_regex(CORE, fullmatch=True), st.from_regex(OLD, fullmatch=True)))
def test_a_string_without_quotes_is_one_for_every_reader(text: str) -> None:
    if plain(text):
        assert not CORE.fullmatch(text)
        assert not OLD.fullmatch(text)
        assert text.isascii()
        assert text.isprintable()
        assert text[0] not in SYNTAX or text.startswith("--")
        assert not re.search(r": |:$| #|\s$", text)


@pytest.mark.parametrize("text", NOT_STRINGS)
def test_what_is_no_string_without_quotes_has_them(text: str) -> None:
    assert not plain(text)
    assert yaml.safe_load(yaml_text([{text: text}])) == {text: text}


@pytest.mark.parametrize(
    "text", ["lm", "--steps", "--batch=8", "/gcs/b/x", "example.com/a", "r/s:1", "tpu-v5e"]
)
def test_names_and_options_need_no_quotes(text: str) -> None:
    assert plain(text)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_kubectl_itself_reads_the_same_words(tmp_path: Path) -> None:
    """Options with the texts above, and an id that looks like a number, through kubectl's own reader."""
    options = tuple(NOT_STRINGS)
    server = launch("v5e-8", options=options, id="12345e12", run="", site=launch().site)
    (tmp_path / "serve.yaml").write_text(prepare_server(server, GkeServer()).files["serve.yaml"])
    words = ["kubectl", "label", "--local", "--filename=serve.yaml", "a=b", "--output=json"]
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    read, at = [], 0
    while at < len(done.stdout.rstrip()):
        one, at = json.JSONDecoder().raw_decode(done.stdout, at)
        read.append(one)
        at += len(done.stdout[at:]) - len(done.stdout[at:].lstrip())
    (deployment,) = [one for one in read if one["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert tuple(container["command"][-len(options) :]) == options
    assert deployment["metadata"]["labels"]["systolic/launch"] == "12345e12"
