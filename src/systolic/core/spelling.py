"""The option that a misspelt one is meant to be."""

import difflib
from collections.abc import Collection

_OTHER_WORD = {"--on": "--rehearse SLICE"}
"""Options of other commands to what a command that lacks them has instead."""


def nearest_option(option: str, names: Collection[str]) -> str:
    """``"; did you mean --model.layers?"`` for a misspelt ``--model.layer`` or ``--layers``, else ``""``."""
    other = _OTHER_WORD.get(option, "")
    if other and option not in names and other.partition(" ")[0] in names:
        return f"; did you mean {other}?"
    full = {name.removeprefix("--"): name for name in sorted(names)}
    last = {short.rpartition(".")[2]: name for short, name in full.items()}
    typed = {**last, **full}
    word = option.removeprefix("--")
    head, dot, last_word = word.rpartition(".")
    # --optimizer.lr is short for --optimizer.learning-rate, and nearer to --optimizer.clip.
    long = [
        name
        for short, name in full.items()
        if _initials(short.rpartition(".")[2]) == last_word and (not dot or short.startswith(head))
    ]
    if len(long) == 1:
        return f"; did you mean {long[0]}?"
    # Without the dashes, which all have in common, --on is not near --json nor --plan near --flags.
    close = difflib.get_close_matches(word, list(typed), n=1, cutoff=0.7)
    # Other programs write more words: --vocab-size, --batch-size.
    starts = [short for short in typed if word.startswith(f"{short}-")]
    found = close[0] if close else max(starts, key=len, default=None)
    return "" if found is None else f"; did you mean {typed[found]}?"


def _initials(name: str) -> str:
    """``lr`` of ``learning-rate``; nothing of a name of one word."""
    parts = name.split("-")
    return "".join(part[:1] for part in parts) if len(parts) > 1 else ""
