"""Output of ``systolic data``, and its bars of progress."""

import sys
from typing import TYPE_CHECKING, Any

from systolic.core.units import gibibytes
from systolic.report.figures import plural
from systolic.report.output import StderrReporter, or_json

if TYPE_CHECKING:
    from rich.progress import Progress

    from systolic.data.command import InspectedData, LearnedTokenizer, PackedData

PICTURES = 12
"""Pictures of a contact sheet."""


class ReadingReporter(StderrReporter):
    """Shows how far data is read: a bar for each part of it."""

    def __init__(self, *, quiet: bool = False, json: bool = False) -> None:
        super().__init__(quiet=quiet or json or not sys.stderr.isatty(), json=json)
        self._bars: Progress | None = None
        self._tasks: dict[str, Any] = {}

    def begin(self, title: str) -> None:
        """Waits for the first part, whose bar needs no title."""
        del title

    def end(self) -> None:
        """Leaves the bars as they are."""
        if self._bars is not None:
            self._bars.stop()

    def update(self, state: Any) -> None:
        """Draws the bar of a part.

        Args:
            state: A :class:`~systolic.data.command.ReadingProgress`.
        """
        if self._quiet:
            return
        if self._bars is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bars = Progress(console=Console(stderr=True))
            self._bars.start()
        if state.part not in self._tasks:
            self._tasks[state.part] = self._bars.add_task(state.part, total=state.total)
        self._bars.update(self._tasks[state.part], completed=state.done)


@or_json
def show_packed(packed: "PackedData") -> None:
    """Prints what was packed."""
    for split, about in packed.content["splits"].items():
        print(
            f"  {split:<10}  "
            + ", ".join(
                plural(about[f"{noun}s"], noun)
                for noun in ("document", "place", "example")
                if f"{noun}s" in about
            )
        )
    print(f"{packed.path}: {gibibytes(packed.file_bytes)}")
    print(f"next: {packed.next}")


@or_json
def show_tokenizer(tokenizer: "LearnedTokenizer") -> None:
    """Prints a tokenizer's size and compression."""
    print(
        f"{tokenizer.path}: {tokenizer.vocab:,} tokens from {plural(tokenizer.documents, 'document')}"
    )
    if tokenizer.bytes_per_token is not None:
        print(f"  held-out text: {tokenizer.bytes_per_token:.2f} bytes a token")
    print(f"next: {tokenizer.next}")


@or_json
def show_inspected(inspected: "InspectedData") -> None:
    """Prints fields, counts and the first examples."""
    from rich.console import Console

    from systolic.data.inspect import pictures
    from systolic.data.sheet import WIDTH, sheet, summary

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(summary(inspected.to_json()))
    shown = pictures(inspected.data, inspected.split, PICTURES)
    if shown:
        colour = console.color_system is not None
        console.print(sheet(shown, inspected.data.labels(), colour=colour))
