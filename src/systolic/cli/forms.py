"""Forms of a verb: which words it takes before its options, the function that answers and the view that shows the answer."""

import enum
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

from systolic.cli.parse import asks_help, parse, print_verb_help
from systolic.cli.signature import Options, options_of
from systolic.cli.target import first, planned_request, request
from systolic.core.command_line import typed
from systolic.core.errors import OptionError
from systolic.core.files import check_writable
from systolic.core.reporter import reporter, reporting

HELP = ("-h", "--help")
END = "--"
"""The words after it are a program's."""


class TargetKind(enum.Enum):
    """What a form's words are before its options."""

    recipe = enum.auto()
    """A recipe or a model, whose own options follow, too."""
    planned = enum.auto()
    """A recipe, whose options the file of ``--plan`` gives where they are not typed; paths stay as they were typed."""
    program = enum.auto()
    """Nothing; a program follows its options, after ``--``."""
    word = enum.auto()
    """One word, before or among the options, that the function's first parameter describes."""
    nothing = enum.auto()
    """Options alone."""


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
    usage: str = ""
    """``module:NAME`` of the help of a form with a word of its own."""
    reporter: str = "systolic.report.stderr:StderrReporter"
    """``module:name`` of what shows progress and warnings; made with the options that its parameters name."""

    @property
    def options(self) -> Options:
        """Options of the function and of the view."""
        takes_word = self.takes is TargetKind.word
        return options_of(named(self.function), named(self.view), takes_word=takes_word)


class FormCall(NamedTuple):
    """A form's function with what a command line gives it."""

    target: Any
    values: SimpleNamespace
    """Options of the form."""


def named(path: str) -> Any:
    """The object of ``module:name``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def run_forms(verb: str, usage: str, forms: Sequence[VerbForm], args: Sequence[str]) -> int:
    """Runs the form that the words choose; returns the exit code.

    Args:
        verb: Its name.
        usage: ``module:NAME`` of the text above the options in the help; "" where the docstring is that.
        forms: The first is that of words which choose no other.
        args: Words after the verb.
    """
    if usage and (not args or args[0] in HELP):
        shown = [form.options.read for form in forms if not form.word]
        return print_verb_help(named(usage), *shown)
    form = _chosen(forms, args)
    words, prog = list(args), verb
    if form.word:
        words, prog = words[1:], f"{verb} {form.word}"
        if words[0] in HELP if words else form.takes is TargetKind.recipe:
            return print_verb_help(named(form.usage), form.options.read)
    call = _read(form, prog, words)
    for name in form.options.written:
        if (path := getattr(call.values, name)) is not None:
            check_writable(path)
    with typed(("systolic", verb, *args)):
        return _answered(form, call)


def _chosen(forms: Sequence[VerbForm], args: Sequence[str]) -> VerbForm:
    for form in forms:
        if form.word and args[0] == form.word:
            return form
    if END in args:
        programs = [form for form in forms if form.takes is TargetKind.program]
        if programs:
            return programs[0]
    return forms[0]


def _read(form: VerbForm, prog: str, words: list[str]) -> FormCall:
    """The call that a command line asks for.

    Raises:
        OptionError: the target is missing, or an option is unknown or out of its range.
        NotFoundError: there is no such recipe.
    """
    if form.takes is TargetKind.program:
        end = words.index(END)
        values = parse(form.options.read, words[:end], f"systolic {prog}")
        command = words[end + 1 :]
        if not command:
            raise OptionError(
                f"systolic {prog} has no program after --; add it: -- python train.py --steps 10"
            )
        return FormCall(command, values)
    options = form.options
    words = [options.short.get(word, word) for word in words]
    if form.takes is TargetKind.nothing:
        return FormCall(None, parse(options.read, words, f"systolic {prog}"))
    if form.takes is TargetKind.word:
        if form.needs and not asks_help(words):
            first(words, prog, form.needs)
        values = parse(options.read, words, f"systolic {prog}")
        return FormCall(getattr(values, options.word), values)
    target, rest = first(words, prog, form.needs)
    if form.takes is TargetKind.planned:
        planned = planned_request(target, rest, prog, options.read, reporter().warn)
        return FormCall(planned.as_typed, planned.verb)
    asked = request(target, rest, prog, form.options.read)
    return FormCall(asked.source, asked.verb)


def _answered(form: VerbForm, call: FormCall) -> int:
    function, view = named(form.function), named(form.view)
    shown = named(form.reporter)
    given = {name: getattr(call.values, name) for name in inspect.signature(shown).parameters}
    targets = () if form.takes is TargetKind.nothing else (call.target,)
    with reporting(shown(**given)):
        answer = function(*targets, **form.options.given_to_function(call.values))
    return view(answer, **form.options.given_to_view(call.values))
