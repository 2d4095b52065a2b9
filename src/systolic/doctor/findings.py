"""A finding: what was looked at, how it is, and the line that mends it."""

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    """From good to bad; only ``failed`` makes the exit code 1."""

    ok = "ok"
    note = "note"
    warning = "warning"
    failed = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was checked. A warning or a failure has the one line that mends it."""

    name: str
    status: Status
    text: str
    mend: str = ""

    def __post_init__(self) -> None:
        if self.status in (Status.warning, Status.failed) and not self.mend:
            raise ValueError(f"the finding {self.name} says what is wrong but not what to do")
        if "\n" in self.text + self.mend:
            raise ValueError(f"the finding {self.name} has more than one line")

    def to_json(self) -> dict[str, str]:
        """The finding as a plain object."""
        return {
            "name": self.name,
            "status": self.status.value,
            "text": self.text,
            "mend": self.mend,
        }


def fine(name: str, text: str) -> Finding:
    """A check that passed."""
    return Finding(name=name, status=Status.ok, text=_one_line(text))


def noted(name: str, text: str) -> Finding:
    """Neither good nor bad, but worth knowing."""
    return Finding(name=name, status=Status.note, text=_one_line(text))


def warned(name: str, text: str, mend: str) -> Finding:
    """Works, but costs something."""
    return Finding(name=name, status=Status.warning, text=_one_line(text), mend=mend)


def failed(name: str, text: str, mend: str) -> Finding:
    """Does not work until mended."""
    return Finding(name=name, status=Status.failed, text=_one_line(text), mend=mend)


def _one_line(text: str) -> str:
    """What a variable or a program said may have line breaks in it."""
    return " ".join(text.split())
