"""Checks of names against the platforms' rules, and of options for secrets, before anything is written."""

import posixpath
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from systolic.core.errors import OptionError
from systolic.core.files import digest

NAME_LENGTH = 40
"""Most characters of a name that is made for a launch."""
_CUT = 6
"""Hexadecimal digits at the end of a name that is cut: two that begin alike are two names."""
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]")
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-([a-z]|ai[0-9]+[a-z]?)")
_REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")
_BUCKET = re.compile(r"gs://([a-z0-9][-_.a-z0-9]{1,220}[a-z0-9])/([A-Za-z0-9_][-\w./=+@]*)")
_IMAGE = re.compile(
    r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?(:[0-9]+)?/)?"
    r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_ACCOUNT = re.compile(r"[a-z0-9-]+@[a-z0-9.:-]+")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_SECRETS = re.compile(
    r"AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{35}|ya29\.[0-9A-Za-z_-]{20,}|GOCSPX-[0-9A-Za-z_-]{20,}"
    r"|hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,}"
    r"|gl(?:pat|oas|dt|rt|cbt|ptt|ft|imt|agent|soat|ffct)-[0-9A-Za-z_-]{20,}"
    r"|npm_[A-Za-z0-9]{30,}|dckr_[po]at_[A-Za-z0-9_-]{20,}|pypi-AgE[A-Za-z0-9_-]{20,}"
    r"|sk-[A-Za-z0-9_-]{20,}|xox[abeprs]-[0-9A-Za-z-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@]+:[^/\s@]+@|https?://[^/\s:@]{16,}@"
)
"""Documented formats of keys and tokens, private keys, and passwords and tokens in URLs.

Amazon, Google, Hugging Face; GitHub's token formats (https://docs.github.com/en/authentication,
'About authentication to GitHub'); GitLab's (https://docs.gitlab.com/security/tokens/#token-prefixes); npm, Docker;
PyPI's, which begin with the encoded name of the index (https://pypi.org/help/#apitoken); OpenAI and Slack.
"""


def check_name(name: str, longest: int, why: str) -> None:
    """Checks the name of a launch.

    Args:
        name: The name.
        longest: Maximum number of characters.
        why: Object that the limit is for.

    Raises:
        OptionError: the name is too long or has other characters than lower-case letters, digits and dashes.
    """
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"--name is {name!r}; it takes lower-case letters, digits and dashes, starts with a letter and does not end with a dash: --name {fitting(name, longest)}"
        )
    if len(name) > longest:
        raise OptionError(
            f"name {name} has {len(name)} characters; {why} takes at most {longest}: --name {fitting(name, longest)}"
        )


def fitting(name: str, longest: int = NAME_LENGTH) -> str:
    """Converts any text to a valid name; one that is cut ends in a digest of the whole text."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not plain or not plain[0].isalpha():
        plain = f"job-{plain}".strip("-")
    if len(plain) <= longest:
        return plain
    end = digest(name, _CUT)
    return f"{plain[: max(longest - len(end) - 1, 0)].strip('-')}-{end}".strip("-")


def choices(total: int, most: int) -> str:
    """Numbers up to a maximum that divide a total: ``1, 2 or 4``."""
    divisors = [str(number) for number in range(1, min(total, most) + 1) if total % number == 0]
    return " or ".join(filter(None, (", ".join(divisors[:-1]), divisors[-1])))


def number_of(number: int, noun: str) -> str:
    """``1 process``, ``2 processes``."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def check_project(project: str) -> None:
    """Checks a Google Cloud project ID.

    Raises:
        OptionError: the ID is invalid.
    """
    if project and not _PROJECT.fullmatch(project):
        raise OptionError(
            f"--project is {project!r}; a project ID has 6 to 30 lower-case letters, digits and dashes; gcloud projects list shows yours"
        )


def check_zone(zone: str) -> None:
    """Checks the format of a Google Cloud zone.

    Raises:
        OptionError: the zone is invalid, or a region.
    """
    if _REGION.fullmatch(zone):
        raise OptionError(
            f"--zone is {zone}, which is a region; give a zone in it: --zone {zone}-a"
        )
    if not _ZONE.fullmatch(zone):
        raise OptionError(
            f"--zone is {zone!r}; it takes a zone such as us-east5-b; gcloud compute tpus locations list shows them"
        )


def check_label(label: str, what: str) -> None:
    """Checks a Kubernetes name: a namespace, service account, claim or queue.

    Raises:
        OptionError: the name is invalid.
    """
    if label and (not _LABEL.fullmatch(label) or len(label) > 63):
        raise OptionError(
            f"--{what} is {label!r}; Kubernetes takes up to 63 lower-case letters, digits and dashes"
        )


def check_word(word: str, what: str) -> None:
    """Checks a name that becomes one argument in a script.

    Raises:
        OptionError: the name has other characters than letters, digits, dots, dashes and underscores.
    """
    if word and not _WORD.fullmatch(word):
        raise OptionError(
            f"--{what} is {word!r}; it takes letters, digits, dots, dashes and underscores"
        )


def check_service_account(account: str) -> None:
    """Checks the address of a Google Cloud service account.

    Raises:
        OptionError: the address is invalid.
    """
    if account and not _ACCOUNT.fullmatch(account):
        raise OptionError(
            f"--service-account is {account!r}; it takes NAME@PROJECT.iam.gserviceaccount.com"
        )


def check_image(image: str) -> None:
    """Checks the name of a container image.

    Raises:
        OptionError: the name is invalid.
    """
    if not _IMAGE.fullmatch(image):
        raise OptionError(
            f"--image is {image!r}; it takes REGISTRY/NAME:TAG in lower case: --image us-docker.pkg.dev/PROJECT/REPOSITORY/NAME:1"
        )


def is_bucket(run: str) -> bool:
    """Whether a run's folder is in a bucket."""
    return "://" in run


def in_bucket(run: str, what: str = "--run") -> tuple[str, str]:
    """Splits a folder in a bucket into the bucket and the folder in it.

    Args:
        run: The folder.
        what: Option or argument that gives it, for the message.

    Raises:
        OptionError: it does not have the form ``gs://BUCKET/FOLDER``.
    """
    match = _BUCKET.fullmatch(run)
    if match is None:
        raise OptionError(
            f"{what} is {run!r}; it takes gs://BUCKET/FOLDER, with 3 or more lower-case letters, digits, - _ and . in BUCKET"
        )
    return match[1], match[2]


def check_shared(run: str, hosts: int, *, volume: str = "") -> None:
    """Checks that a run's folder is shared by its machines and outlives them.

    Args:
        run: The folder.
        hosts: Number of machines.
        volume: Path where all machines mount a volume; empty without one.

    Raises:
        OptionError: the folder is not shared, or is lost with the machines.
    """
    if is_bucket(run):
        in_bucket(run)
        return
    if not volume:
        machines = "the machine" if hosts == 1 else f"the {hosts} machines"
        raise OptionError(
            f"--run is {run}, which is lost with {machines} it is on; give a folder in a bucket: --run gs://BUCKET/FOLDER"
        )
    if PurePosixPath(volume) not in PurePosixPath(posixpath.normpath(run)).parents:
        raise OptionError(
            f"--run is {run}, which is not on the volume that the machines mount at {volume}; give --run {volume}/FOLDER"
        )


def refuse_secrets(words: Iterable[str]) -> None:
    """Refuses arguments that would write a key or a password into a file.

    Raises:
        OptionError: an argument looks like a secret; the message does not contain it.
    """
    for number, word in enumerate(words, 1):
        if _SECRETS.search(word):
            before = word.partition("=")[0] if word.startswith("--") else f"argument {number}"
            raise OptionError(
                f"{before} contains what looks like a key, a token or a password, and a launch writes its options into files; let the machines read it from their own environment or secret store"
            )
