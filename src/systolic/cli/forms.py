"""Forms of a verb: which words it takes before its options, the function that answers and the view that shows the answer."""

import contextlib
import enum
import os
import shlex
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from systolic.cli.parse import known, parse, print_verb_help
from systolic.cli.signature import Options, options_of
from systolic.cli.target import first, planned_request, request, request_for
from systolic.core.errors import OptionError
from systolic.core.files import check_writable
from systolic.core.reporter import reporter, reporting

if TYPE_CHECKING:
    from systolic.recipes import Recipe

END = "--"
"""The words after it are a program's."""


class TargetKind(enum.Enum):
    """What a form's words are before its options."""

    recipe = enum.auto()
    """A recipe or a model, whose own options follow, too."""
    run = enum.auto()
    """A run, as the value of the form's option; options of its recipe follow, in place of its own."""
    path = enum.auto()
    """A path, as the value of the form's option."""
    program = enum.auto()
    """Nothing; a program follows its options, after ``--``."""
    words = enum.auto()
    """Values of the function's parameters that are no options, in their order, before or after the options."""


@dataclass(frozen=True, kw_only=True)
class VerbForm:
    """One way to call a verb."""

    function: str
    """``module:name`` of the public function."""
    view: str
    """``module:name`` of what shows its result and returns the exit code."""
    takes: TargetKind
    needs: str = ""
    """What the message names where the words before the options are missing."""
    word: str = ""
    """A word after the verb that chooses this form: ``serve``."""
    option: str = ""
    """An option that chooses this form as the first word, with the target as its value: ``resume``."""
    with_option: str = ""
    """An option that chooses this form wherever it stands: ``rehearse``."""
    beside: str = ""
    """``module:name`` of a function whose options are taken, too, and have no effect in this form."""
    usage: str = ""
    """``module:NAME`` of the help of a form with a word of its own."""
    reporter: str = "systolic.report.stderr:StderrReporter"
    """``module:name`` of what shows progress and warnings."""

    @property
    def options(self) -> Options:
        """Options of the function and of the view."""
        beside = named(self.beside) if self.beside else None
        function, view = named(self.function), named(self.view)
        positional = self.takes is TargetKind.words
        return options_of(function, view, self.option, beside, positional=positional)

    def is_chosen(self, args: Sequence[str]) -> bool:
        """Whether the words ask for this form rather than for the verb's first."""
        if self.word:
            return args[0] == self.word
        if self.option:
            return args[0].partition("=")[0] == f"--{self.option}"
        if self.with_option:
            return any(word.partition("=")[0] == f"--{self.with_option}" for word in args)
        return self.takes is TargetKind.program and END in args


class FormCall(NamedTuple):
    """A form's function with what a command line gives it."""

    target: Any
    values: SimpleNamespace
    """Options of the form."""
    more: Mapping[str, Any]
    """Arguments that no option gives."""


def named(path: str) -> Any:
    """The object of ``module:name``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def run_forms(verb: str, usage: str, forms: Sequence[VerbForm], args: Sequence[str]) -> int:
    """Runs the form that the words choose; returns the exit code.

    Args:
        verb: Its name.
        usage: ``module:NAME`` of the text above the options in the help; empty for a verb of one form, whose help
            is that of its options.
        forms: The first is that of words which choose no other.
        args: Words after the verb.
    """
    if usage and (not args or args[0] in ("-h", "--help")):
        shown = [replace(form, beside="").options.read for form in forms if not form.word]
        return print_verb_help(named(usage), *shown)
    form = next((one for one in forms if one.is_chosen(args)), forms[0])
    words, prog = list(args), verb
    if form.word:
        words, prog = words[1:], f"{verb} {form.word}"
        if not words or words[0] in ("-h", "--help"):
            return print_verb_help(named(form.usage), form.options.read)
    if form is forms[0]:
        _refuse_late(verb, forms, words)
    others = [f"--{one.with_option}" for one in forms if one.with_option]
    call = _read(form, prog, words, others)
    for name in form.options.written:
        if (path := getattr(call.values, name)) is not None:
            check_writable(path)
    return _answered(form, call)


def _refuse_late(verb: str, forms: Sequence[VerbForm], words: Sequence[str]) -> None:
    """Refuses an option that chooses a form and comes after a target.

    Raises:
        OptionError: for ``train lm --resume RUN``.
    """
    for form in forms:
        if form.option and f"--{form.option}" in words:
            raise OptionError(
                f"--{form.option} takes a {form.takes.name} and no recipe: systolic {verb} --{form.option} {form.takes.name.upper()}; the run knows its recipe and options"
            )


def _read(form: VerbForm, prog: str, words: list[str], others: Sequence[str]) -> FormCall:
    """The call that a command line asks for.

    Raises:
        OptionError: the target is missing, or an option is unknown or out of its range.
        NotFoundError: there is no such recipe.
    """
    read = form.options.read
    if form.takes is TargetKind.program:
        end = words.index(END)
        values = parse(read, words[:end], f"systolic {prog}")
        command = words[end + 1 :]
        if not command:
            raise OptionError(
                f"systolic {prog} has no program after --; add it: -- python train.py --steps 10"
            )
        return FormCall(command, values, {})
    if form.takes is TargetKind.words:
        return FormCall(None, parse(form.options.read, words, f"systolic {prog}"), {})
    if form.takes is TargetKind.path:
        values = parse(read, words, f"systolic {prog}")
        return FormCall(getattr(values, form.option), values, {})
    if form.takes is TargetKind.run:
        return _run_read(form, prog, words)
    target, rest = first(words, prog, form.needs)
    if "plan" in form.options.of_function:
        asked = planned_request(target, rest, prog, read, reporter().warn, others)
    else:
        asked = request(target, rest, prog, read)
    return FormCall(asked.source, asked.verb, {})


def _run_read(form: VerbForm, prog: str, words: list[str]) -> FormCall:
    """The call with a run: its recipe says which options follow, once the function has opened it."""
    given, _ = known(form.options.read, words, f"systolic {prog}")
    values = form.options.read(**given)
    run: Path = getattr(values, form.option)
    target = shlex.join([f"--{form.option}", str(run)])

    def reader(recipe: "Recipe", saved: Mapping[str, Any]) -> Mapping[str, Any]:
        return request_for(recipe, words, prog, form.options.read, saved, target=target).options

    return FormCall(run, values, {"reader": reader})


def _answered(form: VerbForm, call: FormCall) -> int:
    function, view = named(form.function), named(form.view)
    quiet, json = call.values.quiet, vars(call.values).get("json", False)
    with _kept_stdout() if json else contextlib.nullcontext():
        with reporting(named(form.reporter)(quiet=quiet, json=json)):
            target = () if form.takes is TargetKind.words else (call.target,)
            answer = function(*target, **form.options.given_to_function(call.values), **call.more)
        return view(answer, **form.options.given_to_view(call.values))


@contextlib.contextmanager
def _kept_stdout() -> Generator[None]:
    """Keeps stdout for one JSON object: libraries between processes (Gloo, NCCL) print there, and go to stderr."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        yield  # a test's, or a notebook's
        return
    sys.stdout.flush()
    before, kept = sys.stdout, os.dup(number)
    with os.fdopen(os.dup(number), "w", encoding=before.encoding) as stream:
        sys.stdout = stream
        os.dup2(2, number)
        try:
            yield
        finally:
            stream.flush()
            sys.stdout = before
            os.dup2(kept, number)
            os.close(kept)
