"""The terminal view of ``systolic data inspect``."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from systolic.core.units import si
from systolic.report.figures import plural

if TYPE_CHECKING:
    import numpy as np

WIDTH = 100
"""Columns where stdout is no terminal."""

_DOCUMENT_STYLES = ("cyan", "yellow", "green", "magenta")
"""Colours of documents, in turn."""

_ROW_LIMIT = 1500
"""Characters of the decoded row that are shown."""

_RAMP = " .:-=+*#%@"
"""Brightness without colours."""

_CELL = 15
"""Columns of a picture in the contact sheet; two pixels high is one line."""

_PER_LINE = 6


def summary(record: Mapping[str, Any]) -> RenderableType:
    """The record of :func:`systolic.data.inspect.inspect` as text."""
    parts: list[RenderableType] = [
        Text(f"{record['target']}: {record['data']}", style="bold"),
        _fields(record),
        Text(_splits(record["splits"])),
    ]
    if "text" in record:
        parts += _text(record["text"], record["examples"], record["split"])
    if "label_counts" in record:
        parts += ["", _labels(record["label_counts"], record["examples"])]
    if record["notes"]:
        parts += ["", *(Text(f"note: {line}") for line in record["notes"])]
    return Group(*parts)


def sheet(
    examples: "Mapping[str, np.ndarray]", labels: Sequence[str], colour: bool
) -> RenderableType:
    """A contact sheet of ``image`` [n, H, W, C], coarse, each over its label."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    cells = [
        _picture(image, _name(examples, number, labels), colour)
        for number, image in enumerate(examples["image"])
    ]
    for start in range(0, len(cells), _PER_LINE):
        table.add_row(*cells[start : start + _PER_LINE])
    return Group("", table)


def _fields(record: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("field", "dtype", "shape"):
        table.add_column(heading)
    for heading in ("min", "max", "mean"):
        table.add_column(heading, justify="right")
    for name, field in record["fields"].items():
        values = record["values"].get(name, {})
        shape = " x ".join(map(str, field["shape"])) or "-"
        numbers = [f"{values[key]:.4g}" if key in values else "" for key in ("min", "max", "mean")]
        table.add_row(name, field["dtype"], shape, *numbers)
    return table


def _splits(splits: Mapping[str, Mapping[str, Any]]) -> str:
    parts = []
    for name, counts in splits.items():
        if counts.get("documents") is not None:
            parts.append(f"{name} {plural(counts['documents'], 'document')}")
        elif counts["examples"]:
            parts.append(f"{name} {plural(counts['examples'], 'example')}")
    return "splits: " + ", ".join(parts)


def _text(text: Mapping[str, Any], rows: int, split: str) -> list[RenderableType]:
    common = "  ".join(
        f"{_visible(token['token'])} {token['share']:.1%}" for token in text["most_common"]
    )
    lines = [
        f"tokens: vocabulary {text['vocab_size']:,} ({text['tokenizer']}), {text['distinct_tokens']:,} of them seen, {text['bytes_per_token']:.2f} bytes a token, entropy {text['entropy_bits_per_token']:.2f} bits",
        f"most common: {common}",
        f"rows: padding {text['padding_share']:.2%}, {text['documents_per_row']:.2g} documents a row (of {rows:,} {split} rows)",
        "",
    ]
    return [Text("\n".join(lines)), _row(text["row"])]


def _row(documents: Sequence[Mapping[str, Any]]) -> Text:
    """One row; colours alternate by document, and a mark precedes each."""
    shown = Text()
    for number, document in enumerate(documents):
        kind = "document" if document["starts"] else "document, from its middle,"
        mark = f"[{kind} at {document['from']}, {si(document['places'])} tokens]"
        room = _ROW_LIMIT - len(shown)
        if room <= 0:
            shown.append(f"\n... and {len(documents) - number} more documents", style="dim")
            break
        shown.append(f"{chr(10) if number else ''}{mark}\n", style="dim")
        text = _printable(document["text"])
        shown.append(
            text[:room] + (" ..." if len(text) > room else ""),
            style=_DOCUMENT_STYLES[number % len(_DOCUMENT_STYLES)],
        )
        if "trained" in document:
            shown.append(f"\n[learned: {_printable(document['trained'])}]", style="dim")
    return shown


def _labels(counts: Mapping[str, int], examples: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("label")
    table.add_column("count", justify="right")
    table.add_column(f"of {examples:,} examples")
    most = max(counts.values(), default=1)
    shown = (
        sorted(counts.items(), key=lambda item: -item[1]) if len(counts) > 24 else counts.items()
    )
    for number, (name, count) in enumerate(shown):
        if number == 24:
            table.add_row(f"... {len(counts) - 24} more labels", "", "")
            break
        table.add_row(Text(name), f"{count:,}", "\u2588" * round(40 * count / max(most, 1)))
    return table


def _picture(image: "np.ndarray", name: str, colour: bool) -> Text:
    """A picture [H, W, C] of any range as half blocks, or as characters by brightness."""
    import numpy as np

    height, width = image.shape[:2]
    columns = min(_CELL, width)
    lines = max(1, round(columns * height / width / 2))
    down = np.linspace(0, height - 1, 2 * lines).round().astype(int)
    across = np.linspace(0, width - 1, columns).round().astype(int)
    pixels = image[down][:, across].astype(np.float32)
    if image.dtype != np.uint8:
        low, high = float(image.min()), float(image.max())
        pixels = (pixels - low) * (255 / max(high - low, 1e-9))
    pixels = (
        np.broadcast_to(pixels[..., :3], (*pixels.shape[:2], 3))
        if pixels.shape[2] < 3
        else pixels[..., :3]
    )
    drawn = Text(no_wrap=True)
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            if colour:
                drawn.append("\u2580", Style(color=_rgb(above), bgcolor=_rgb(below)))
            else:
                level = float(above.mean() + below.mean()) / 2
                drawn.append(_RAMP[min(int(level / 256 * len(_RAMP)), len(_RAMP) - 1)])
        drawn.append("\n")
    drawn.append(name[:_CELL], style="dim")
    return drawn


def _rgb(pixel: "np.ndarray") -> str:
    red, green, blue = (int(min(max(value, 0), 255)) for value in pixel)
    return f"rgb({red},{green},{blue})"


def _name(examples: "Mapping[str, np.ndarray]", number: int, labels: Sequence[str]) -> str:
    if "label" not in examples:
        return ""
    label = int(examples["label"][number])
    return labels[label] if 0 <= label < len(labels) else str(label)


def _visible(token: str) -> str:
    """A token in quotes where its spaces or control characters would not show."""
    return token if token.isprintable() and token.strip() == token else ascii(token)


def _printable(text: str) -> str:
    """Without control characters, which could act on the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\u00b7" for c in text)
