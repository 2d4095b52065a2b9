"""Draws the pictures of the documentation from real runs and commands, on a terminal of 100 columns.

``python docs/pictures.py RUN`` makes ``images/train.svg``: the live view of ``systolic train`` near the
end, from the run's records, and the summary after it. ``python docs/pictures.py plan lm --on v5e …`` runs
that command and makes ``images/plan.svg`` of what it prints.
"""

import io
import os
import pty
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from systolic.runs import metrics
from systolic.runs.record import load_run
from systolic.training.display.live import Screen
from systolic.training.display.summary import RERUN, commands, print_panel

COLUMNS = 100
TITLE = 90
"""Letters of a title, which is as wide as the terminal."""
SEEN = 0.85
"""Share of the steps at which the live view is drawn."""

THEME = TerminalTheme(
    (22, 24, 29),
    (220, 221, 222),
    [
        *((60, 64, 72), (235, 108, 102), (126, 200, 140), (232, 190, 100)),
        *((110, 160, 255), (190, 150, 240), (95, 205, 215), (200, 202, 206)),
    ],
)
"""A dark window reads on a light page and on a dark one."""

FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's own loads a font over the network, which GitHub does not allow in a picture."""


def live_view(run: Path, console: Console) -> None:
    """Prints what the live view showed when most of the steps were done."""
    now = 0.0
    screen = Screen(stream=io.StringIO(), clock=lambda: now, width=COLUMNS)
    steps = 0
    for record in metrics.read(run / "metrics.jsonl"):
        steps = record.get("steps", steps)
        if record["step"] > SEEN * steps:
            break
        now = record["time"]
        screen.see(record)
    for line in screen.take_lines():
        console.print(line)
    console.print(screen.panel())


def picture(run: Path) -> str:
    """The terminal as SVG."""
    loaded = load_run(run)
    console = Console(
        file=io.StringIO(), record=True, width=COLUMNS, force_terminal=True, highlight=False
    )
    live_view(run, console)
    console.print()
    print_panel(loaded, console)
    title = dict(commands(loaded)).get(RERUN, f"systolic train {loaded.name}")
    return console.export_svg(title=title, theme=THEME, code_format=FORMAT, unique_id="train")


def picture_of_command(words: Sequence[str]) -> str:
    """What ``systolic WORDS`` prints on a terminal, as SVG.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    near, far = pty.openpty()
    environ = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "systolic", *words]
    printed = bytearray()
    with subprocess.Popen(command, stdout=far, env=environ) as process:
        os.close(far)
        try:
            while part := os.read(near, 65536):
                printed += part
        except OSError:
            pass  # Linux says so when the other end has closed.
    os.close(near)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    console = Console(
        file=io.StringIO(), record=True, width=COLUMNS, force_terminal=True, highlight=False
    )
    console.print(Text.from_ansi(printed.decode().replace("\r\n", "\n")))
    title = shorten(shlex.join(["systolic", *words]), TITLE, placeholder=" …")
    return console.export_svg(title=title, theme=THEME, code_format=FORMAT, unique_id=words[0])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python docs/pictures.py RUN, or a verb and its arguments")
    first, *_ = asked = sys.argv[1:]
    is_run = Path(first).is_dir()
    target = Path(__file__).parent / "images" / ("train.svg" if is_run else f"{first}.svg")
    target.parent.mkdir(exist_ok=True)
    target.write_text(picture(Path(first)) if is_run else picture_of_command(asked))
    print(target)
