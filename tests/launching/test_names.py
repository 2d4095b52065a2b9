"""Options that look like secrets, by the formats that issuers document, and those that do not."""

import pytest

from systolic.core.errors import OptionError
from systolic.launching.names import choices, number_of, refuse_secrets

SECRETS = {
    "GitHub, classic": "ghp_" + "a1B2" * 9,
    "GitHub, fine-grained": "github_pat_" + "11ABCDEFG0" * 2 + "Zz_" + "a1B2" * 14,
    "GitLab": "glpat-" + "aB3_-" * 4,
    "GitLab, with routing": "glpat-" + "aB3" * 9 + ".01.12abcdefg",
    "GitLab, deploy": "gldt-" + "aB3_-" * 4,
    "Google OAuth client": "GOCSPX-" + "aB3_" * 7,
    "Google API": "AIza" + "aB3_-" * 7,
    "npm": "npm_" + "aB3d" * 9,
    "Docker Hub": "dckr_pat_" + "aB3" * 9,
    "Docker Hub, of an organization": "dckr_oat_" + "aB3" * 9,
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + "aB3_-" * 30,
    "TestPyPI": "pypi-AgENdGVzdC5weXBpLm9yZw" + "aB3_-" * 30,
    "Hugging Face": "hf_" + "aB" * 17,
    "token in a URL": "https://0123456789abcdef@github.com/me/data.git",
    "password in a URL": "https://me:secret@host/x",
    "Slack": "xoxe-" + "1aB" * 5,
}
PLAIN = [
    "https://host.example/a/very/long/path/with@sign",
    "https://me@host/data",
    "ssh://user@host/x",
    "gs://bucket-with-a-long-name/runs@2026",
    "trainer@my-project-12345.iam.gserviceaccount.com",
    "pypi-mirror-of-the-whole-department",
    "npm_package",
    "us-docker.pkg.dev/p/r/i@sha256:" + "0a" * 32,
    "github_pat",
    "glpat-",
    "0123456789abcdef" * 4,
]


@pytest.mark.parametrize("form", ["{}", "--data={}", "x {} y", "'{}'"])
@pytest.mark.parametrize("issuer", SECRETS)
def test_documented_secrets_are_refused_and_not_repeated(issuer: str, form: str) -> None:
    word = form.format(SECRETS[issuer])
    with pytest.raises(OptionError, match="looks like a key") as caught:
        refuse_secrets(["--steps", "10", word])
    assert SECRETS[issuer] not in str(caught.value)
    assert ("--data contains" in str(caught.value)) == (form == "--data={}")


@pytest.mark.parametrize("word", PLAIN)
def test_other_words_are_taken(word: str) -> None:
    refuse_secrets([word, f"--data={word}"])


def test_numbers_are_written_out() -> None:
    assert [choices(*pair) for pair in ((4, 16), (7, 3), (12, 16))] == [
        "1, 2 or 4",
        "1",
        "1, 2, 3, 4, 6 or 12",
    ]
    assert [number_of(*pair) for pair in ((1, "process"), (2, "process"), (1, "CPU device"))] == [
        "1 process",
        "2 processes",
        "1 CPU device",
    ]
