"""Forms of a verb: the words that choose one, its target and options, its function, and the view that shows the answer."""

import contextlib
import enum
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from systolic.cli.parse import (
    Options,
    asks_help,
    is_unknown,
    known,
    option_names,
    options_of,
    parse,
    print_help,
    print_verb_help,
    refuse_unknown,
    stray,
)
from systolic.core.errors import OptionError, nearest
from systolic.core.files import check_writable
from systolic.core.option_words import as_options, spelled, typed_as
from systolic.core.ranges import dashed
from systolic.core.reporter import reporter, reporting

if TYPE_CHECKING:
    from systolic.job import Job
    from systolic.recipes import Recipe
    from systolic.recipes.jobs import JobSource


VerbOptions = TypeVar("VerbOptions")
"""A verb's own options, a dataclass."""
PlanOptions = TypeVar("PlanOptions", bound="UnderPlan")
FIRST = {"sft": "--from", "image": "--path"}
"""Shipped recipes that take a first word without its option: the model, the pictures."""
HELP = ("-h", "--help")
END = "--"
"""The words after it are a program's."""


@dataclass(frozen=True, kw_only=True)
class Request(Generic[VerbOptions]):
    """A recipe with its arguments, and the verb's own options."""

    as_typed: "JobSource"
    """The recipe with its options; paths as they were typed."""
    verb: VerbOptions
    typed: Sequence[str] = ()
    """Options of the recipe as words."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the recipe, by parameter."""
        return self.as_typed.options

    @property
    def job(self) -> "Job":
        """The job these options make, with the plan's settings."""
        return self.as_typed.job

    @property
    def source(self) -> "JobSource":
        """The recipe with these options; no path depends on the working directory."""
        from systolic.runs import paths

        options = paths.absolute(dict(self.options))
        # The same source has its job already.
        return self.as_typed if options == self.options else replace(self.as_typed, options=options)


def first(args: Sequence[str], verb: str, what: str) -> tuple[str, list[str]]:
    """The target and the rest of the arguments.

    Raises:
        OptionError: there is no target.
    """
    if not args or args[0].startswith("-"):
        raise OptionError(f"systolic {verb} needs {what}; systolic {verb} --help shows how")
    return args[0], list(args[1:])


def request(
    target: str, args: Sequence[str], verb: str, options: Callable[..., VerbOptions]
) -> Request[VerbOptions]:
    """Reads a recipe's options and the verb's from one command line.

    Args:
        target: A recipe's name or file.
        args: What follows it.
        verb: For messages.
        options: The class of the verb's own options.

    Raises:
        NotFoundError: there is no such recipe.
        OptionError: an option is missing, unknown, out of its range or without effect.
    """
    recipe_request = request_for(target, args, verb, options, {})
    recipe_request.job.check_effects()
    return recipe_request


def request_for(
    recipe: "Recipe | str",
    args: Sequence[str],
    verb: str,
    options: Callable[..., VerbOptions],
    saved: Mapping[str, Any],
    *,
    target: str = "",
) -> Request[VerbOptions]:
    """Reads the verb's own options, then the recipe's from what is left; one that is not given has its ``saved`` value.

    Args:
        recipe: The recipe, its name or file.
        args: What follows it.
        verb: For messages.
        options: The class of the verb's own options.
        saved: Values of the recipe's options that are not given.
        target: What was typed after the verb, in messages; by default the recipe.

    Raises: as :func:`request`.
    """
    return _read_verb(recipe, args, verb, options, target=target).read_recipe(saved)


@dataclass(frozen=True, kw_only=True)
class _VerbRead(Generic[VerbOptions]):
    """A command line whose own options are read, and not yet its recipe's."""

    recipe: "Recipe"
    verb: VerbOptions
    words: Sequence[str]
    """The whole line."""
    rest: Sequence[str]
    """Words that are no option of the verb's."""
    names: frozenset[str]
    """Options of the verb, as they are typed, and of its other forms, which a misspelt one may mean."""
    prog: str
    """Words before the options, in messages."""

    def read_recipe(self, saved: Mapping[str, Any]) -> Request[VerbOptions]:
        """Reads the recipe's options; one that is not given has its ``saved`` value.

        Raises:
            OptionError: an option is missing, unknown or out of its range.
        """
        recipe, rest, prog = self.recipe, self.rest, self.prog
        function = _function(
            [
                p.replace(default=saved[name]) if name in saved else p
                for name, p in inspect.signature(recipe.function, eval_str=True).parameters.items()
            ],
            inspect.getdoc(recipe.function) or "",
        )
        names = option_names(function, pairs=True) | self.names
        takes = "a run made from a Job takes steps and layout only" if recipe.of_job else ""
        if recipe.file is None:
            # A shipped recipe's types name all of its options: no need to parse what is misspelt.
            refuse_unknown([word for word in rest if is_unknown(word, names)], names, prog, takes)
        refuse_unknown(stray(rest, self.words), names, prog)
        values, unknown = known(function, rest, prog, pairs=True)
        refuse_unknown(unknown, names, prog, takes)
        from systolic.recipes.jobs import JobSource

        typed = (word[2:].partition("=")[0] for word in rest if word.startswith("--"))
        source = JobSource(
            recipe=recipe, options=values, given=frozenset(map(dashed, typed)), relative=values
        )
        return Request(as_typed=source, verb=self.verb, typed=tuple(rest))


def _read_verb(
    recipe: "Recipe | str",
    args: Sequence[str],
    verb: str,
    options: Callable[..., VerbOptions],
    *,
    target: str = "",
    others: Collection[str] = (),
) -> _VerbRead[VerbOptions]:
    """Reads the verb's own options from a command line with a recipe; prints the help of both where it is asked for."""
    from systolic import recipes

    prog = f"systolic {verb} {target or (recipe if isinstance(recipe, str) else recipe.target)}"
    wants_help = asks_help(args)
    if isinstance(recipe, str) and not wants_help:
        recipes.refuse_missing_file(recipe)
    # Before the recipe is imported, which takes longer than to refuse a line.
    words = [] if wants_help else _with_first(recipe, renamed(args))
    verb_values, rest = ({}, []) if wants_help else known(options, words, prog)
    imported = recipes.find(recipe) if isinstance(recipe, str) else recipe
    taken = inspect.signature(options).parameters
    clash = set(taken) & set(inspect.signature(imported.function).parameters)
    if clash:
        raise OptionError(
            f"{imported.target} has an option {clash.pop()} that systolic {verb} needs for itself; rename it in the recipe"
        )
    if isinstance(recipe, str) and not wants_help:
        for line in recipes.notes(recipe, trains=verb == "train"):
            print(f"systolic: {line}", file=sys.stderr)
    if wants_help:
        print_help(_both(imported, options), prog)
    return _VerbRead(
        recipe=imported,
        verb=options(**verb_values),
        words=words,
        rest=rest,
        names=frozenset(option_names(options) | set(others)),
        prog=prog,
    )


def _with_first(recipe: "Recipe | str", words: list[str]) -> list[str]:
    """Words of a command line with the option of a first word that has none: ``sft llama-3.1-8b --on v5e-8``."""
    option = FIRST.get(recipe) if isinstance(recipe, str) else None
    if option is None or not words or words[0].startswith("-") or option in words:
        return words
    return [option, *words]


class UnderPlan(Protocol):
    """A verb's options that may name a plan."""

    @property
    def plan(self) -> Path | None:
        """The plan's file."""

    @property
    def candidate(self) -> int:
        """Rank of the plan's candidate."""


def planned_request(
    target: str,
    args: Sequence[str],
    verb: str,
    options: Callable[..., PlanOptions],
    warn: Callable[[str], None],
    others: Collection[str] = (),
) -> Request[PlanOptions]:
    """A recipe's options and the verb's; under a plan, the options that were planned where they are not given.

    Raises: as :func:`request`, and what :func:`systolic.runs.plan_choice.read` and
        :func:`systolic.recipes.jobs.kept_choice` raise of the plan.
    """
    from systolic.recipes.jobs import kept_choice, planned_options
    from systolic.runs.plan_choice import read

    line = _read_verb(target, args, verb, options, others=others)
    if line.verb.plan is None:
        unplanned = line.read_recipe({})
        unplanned.job.check_effects()
        return unplanned
    chosen = read(line.verb.plan, line.verb.candidate)
    planned = planned_options(line.recipe, chosen)
    changed = line.read_recipe(planned)
    kept = kept_choice(
        chosen,
        line.recipe(planned),
        changed.job,
        steps_given="steps" in changed.as_typed.given,
        warn=warn,
    )
    return replace(changed, as_typed=replace(changed.as_typed, chosen=kept))


def renamed(args: Sequence[str]) -> list[str]:
    """``args`` with today's names for options of the last version, each reported on stderr."""
    from systolic.job.layout import RENAMED

    options = {f"--layout.{dashed(old)}": f"--layout.{dashed(new)}" for old, new in RENAMED.items()}
    words = []
    for word in args:
        name, equals, value = word.partition("=")
        now = options.get(dashed(name))
        if now is not None:
            print(f"systolic: {dashed(name)} is now called {now}; use that name", file=sys.stderr)
        words.append(word if now is None else f"{now}{equals}{value}")
    return words


def _both(recipe: "Recipe", options: Callable[..., Any]) -> Callable[..., None]:
    """A function with a recipe's parameters and a verb's, for their help."""
    signatures = [
        inspect.signature(function, eval_str=True) for function in (recipe.function, options)
    ]
    parameters = [p for signature in signatures for p in signature.parameters.values()]
    return _function(parameters, _documented(recipe.function, options))


def _function(parameters: Sequence[inspect.Parameter], doc: str) -> Callable[..., None]:
    def function() -> None:
        pass

    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    function.__signature__ = inspect.Signature(keywords)  # ty: ignore[missing-attribute]
    function.__annotations__ = {p.name: p.annotation for p in keywords}
    function.__doc__ = doc
    return function


def _documented(recipe: Callable[..., Any], options: Callable[..., Any]) -> str:
    """One docstring with the Args sections of both."""
    text = inspect.getdoc(recipe) or ""
    own = (inspect.getdoc(options) or "").partition("Args:\n")[2]
    if "Args:\n" in text:
        head, _, tail = text.partition("Args:\n")
        return f"{head}Args:\n{own.rstrip()}\n{tail}"
    return f"{text}\n\nArgs:\n{own}"


class TargetKind(enum.Enum):
    """Kinds of words before a form's options."""

    recipe = enum.auto()
    """A recipe or a model, whose own options follow, too."""
    recipe_as_typed = enum.auto()
    """The same; paths stay as they were typed, for machines elsewhere."""
    run = enum.auto()
    """A run or a file that knows its recipe, as ``path``; options of the recipe follow, in place of its own."""
    path = enum.auto()
    """A path, as the value of the form's option, or as the first word where the form has none."""
    program = enum.auto()
    """Nothing; a program follows its options, after ``--``."""
    name = enum.auto()
    """A recipe or a model by its name alone, which may lack options that it requires, or with its own options."""
    words = enum.auto()
    """The function's positional parameters, or those of them that the form's ``words`` name; none where it has none."""


class CommandLine:
    """Words after a verb."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._answers: dict[str, Any] = {}

    @property
    def has_target(self) -> bool:
        """Whether a word comes before the options."""
        return bool(self.words) and not self.words[0].startswith("-")

    def gives(self, option: str) -> bool:
        """Whether an option is anywhere among the words."""
        return any(word.partition("=")[0] == f"--{option}" for word in self.words)

    def tested(self, test: str) -> Any:
        """Answer of ``module:name`` to the first word, which may read its file: asked once."""
        if test not in self._answers:
            self._answers[test] = named(test)(self.words[0])
        return self._answers[test]


@dataclass(frozen=True)
class FormChoice:
    """Choice of a form by the words of a command line; this one chooses the verb's first form, where no other does."""

    reads_target: ClassVar[bool] = False
    """Whether it looks at what the first word names; such choices come last."""

    def is_made(self, line: CommandLine) -> bool:
        """Whether the words ask for the form."""
        del line
        return False


@dataclass(frozen=True)
class ByWord(FormChoice):
    """Choice by a word after the verb: ``serve``; of several forms with it, by the target after it."""

    word: str
    test: str = ""
    """``module:name`` of a test of the target."""

    def is_made(self, line: CommandLine) -> bool:
        """Whether it is the first word, and the target passes the test."""
        if line.words[0] != self.word:
            return False
        rest = CommandLine(line.words[1:])
        return not self.test or not rest.has_target or rest.tested(self.test)


@dataclass(frozen=True)
class ByFirstOption(FormChoice):
    """Choice by an option in the place of the first word, with the target as its value: ``resume``."""

    option: str

    def is_made(self, line: CommandLine) -> bool:
        """Whether it comes first."""
        return line.words[0].partition("=")[0] == f"--{self.option}"


@dataclass(frozen=True)
class ByOption(FormChoice):
    """Choice by an option of the form, wherever it stands: ``rehearse``."""

    option: str

    def is_made(self, line: CommandLine) -> bool:
        """Whether it is there."""
        return line.gives(self.option)


@dataclass(frozen=True)
class BySwitch(FormChoice):
    """Choice by a switch that says no more, wherever it stands before ``--``: ``serve``."""

    switch: str

    def is_made(self, line: CommandLine) -> bool:
        """Whether it is there."""
        return f"--{self.switch}" in line.words


@dataclass(frozen=True)
class ByTarget(FormChoice):
    """Choice by what the first word names."""

    reads_target: ClassVar[bool] = True

    test: str
    """``module:name`` of a test of the word, or of a function of it that returns its kind."""
    kind: str = ""
    """Value of the kind: ``run``."""

    def is_made(self, line: CommandLine) -> bool:
        """Whether the word passes the test, or is of the kind."""
        if not line.has_target:
            return False
        answer = line.tested(self.test)
        return answer.value == self.kind if self.kind else answer


@dataclass(frozen=True)
class ByAnyTarget(FormChoice):
    """Choice by a word before the options, whatever it is."""

    def is_made(self, line: CommandLine) -> bool:
        """Whether there is one."""
        return line.has_target


@dataclass(frozen=True)
class ByProgram(FormChoice):
    """Choice by ``--``, after which a program follows."""

    def is_made(self, line: CommandLine) -> bool:
        """Whether it is there."""
        return END in line.words


@dataclass(frozen=True, kw_only=True)
class VerbForm:
    """One way to call a verb."""

    function: str
    """``module:name`` of the public function."""
    view: str
    """``module:name`` of what shows its result and returns the exit code."""
    takes: TargetKind = TargetKind.words
    choice: FormChoice = FormChoice()
    """Words that ask for this form."""
    needs: str = ""
    """Name of the words before the options, in the message where they are missing."""
    words: tuple[str, ...] = ()
    """Parameters that are words without an option's name, where the function's other positional ones are options."""
    check: str = ""
    """``module:name`` of what refuses options that contradict each other, before paths are tried and the work begins."""
    beside: str = ""
    """``module:name`` of a function whose options are taken, too, and have no effect in this form."""
    done: str = ""
    """Participle of the verb for messages about a word before a program: ``explained``."""
    usage: str = ""
    """``module:NAME`` of the help of a form with a word of its own; without it the verb's help has its options."""
    below_help_of: "tuple[str, VerbForm] | None" = None
    """A verb and its form whose help on the target is printed above the answer, unless that is JSON."""
    reporter: str = "systolic.report.output:StderrReporter"
    """``module:name`` of what shows progress and warnings; made with the options that its parameters name."""

    @property
    def word(self) -> str:
        """The word after the verb that its command lines begin with; empty for none."""
        return self.choice.word if isinstance(self.choice, ByWord) else ""

    @property
    def option(self) -> str:
        """The option whose value is the target; empty where a word is."""
        return self.choice.option if isinstance(self.choice, ByFirstOption) else ""

    @property
    def options(self) -> Options:
        """Options of the function and of the view."""
        beside = named(self.beside) if self.beside else None
        return options_of(
            named(self.function),
            named(self.view),
            self.option,
            beside,
            positional=self.takes is TargetKind.words,
            words=self.words,
        )

    @property
    def is_complete(self) -> bool:
        """Whether the verb alone asks for this form."""
        parameters = inspect.signature(named(self.function)).parameters.values()
        return self.takes is TargetKind.words and all(
            parameter.default is not parameter.empty for parameter in parameters
        )


class FormCall(NamedTuple):
    """A form's function with what a command line gives it."""

    target: Sequence[Any]
    """The function's first argument; empty where options give all."""
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
        usage: ``module:NAME`` of the text above the options in the help; empty for a verb whose first form takes words.
        forms: The first is that of words which choose no other.
        args: Words after the verb.

    Raises:
        OptionError: each form has a word, and the first of ``args`` is none.
    """
    if usage and (args[0] in HELP if args else not forms[0].is_complete):
        return print_verb_help(named(usage), *map(_shown, _in_help(forms)))
    form = _chosen(forms, args)
    words, prog = list(args), verb
    if form.word:
        if args[0] != form.word:
            parts = list(dict.fromkeys(other.word for other in forms))
            raise OptionError(
                f"systolic {verb} has no {args[0]!r}{nearest(args[0], parts)}; it has {', '.join(parts)}, see systolic {verb} --help"
            )
        words, prog = words[1:], f"{verb} {form.word}"
        if form.usage and (words[0] in HELP if words else form.takes is TargetKind.recipe):
            return print_verb_help(named(form.usage), form.options.read)
    if isinstance(form.choice, BySwitch):
        words = [word for word in words if word != f"--{form.choice.switch}"]
    if form is forms[0]:
        _refuse_late(verb, forms, words)
    others = [f"--{other.choice.option}" for other in forms if isinstance(other.choice, ByOption)]
    words = [_renamed(word, form.options.other_names) for word in words]
    typed = {word.partition("=")[0] for word in words if word.startswith("--")}
    names = option_names(form.options.read) | typed
    with spelled(lambda text: as_options(text, names)):
        call = _read(form, prog, words, others)
        if form.check:
            named(form.check)(call.values)
        for name in form.options.written:
            if (path := getattr(call.values, name)) is not None:
                check_writable(path)
        with typed_as(("systolic", verb, *args)):
            return _answered(form, call)


def _in_help(forms: Sequence[VerbForm]) -> list[VerbForm]:
    """Forms whose options the verb's help lists; of those with the same word the first."""
    listed = {
        form.word or form: form
        for form in reversed(forms)
        if not form.usage and not (isinstance(form.choice, ByTarget) and not form.choice.kind)
    }
    return [form for form in forms if form in listed.values()]


def _shown(form: VerbForm) -> Callable[..., Any]:
    """A form's options without those that have no effect in it."""
    return replace(form, beside="").options.read


def _renamed(word: str, names: Mapping[str, str]) -> str:
    """An option under its own name."""
    option, equals, value = word.partition("=")
    return f"{names.get(option, option)}{equals}{value}"


def _chosen(forms: Sequence[VerbForm], args: Sequence[str]) -> VerbForm:
    """The form that the words choose; by what the first of them names where nothing else chooses one."""
    line = CommandLine(args)
    by_words_first = sorted(forms, key=lambda form: form.choice.reads_target)
    return next((form for form in by_words_first if args and form.choice.is_made(line)), forms[0])


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
        if form.done and end and not words[0].startswith("-"):
            raise OptionError(
                f"{words[0]} is {form.done}, or the program behind --, and both are given; leave one of them out"
            )
        values = parse(read, words[:end], f"systolic {prog}")
        command = words[end + 1 :]
        if not command:
            raise OptionError(
                f"systolic {prog} has no program after --; add it: -- python train.py --steps 10"
            )
        return FormCall((command,), values, {})
    if form.takes is TargetKind.path and not form.option:
        target, rest = first(words, prog, form.needs)
        values = parse(read, rest, shlex.join(["systolic", prog, target]))
        return FormCall((target,), values, {})
    if form.takes in (TargetKind.path, TargetKind.words):
        if form.needs and form.takes is TargetKind.words and not asks_help(words):
            first(words, prog, form.needs)
        values = parse(read, words, f"systolic {prog}")
        path = [getattr(values, form.option)] if form.option else []
        return FormCall(path, values, {})
    if form.takes is TargetKind.run:
        return _run_read(form, prog, words)
    switch = f" --{form.choice.switch}" if isinstance(form.choice, BySwitch) else ""
    target, rest = first(words, f"{prog}{switch}", form.needs)
    if form.takes is TargetKind.name:
        option_values, own = known(read, rest, f"systolic {prog} {target}")
        recipe_request = request(target, rest, prog, read) if own else None
        options = {} if recipe_request is None else recipe_request.options
        return FormCall((target,), read(**option_values), options)
    if "plan" in form.options.of_function:
        recipe_request = planned_request(target, rest, prog, read, reporter().warn, others)
    else:
        recipe_request = request(target, rest, prog, read)
    as_typed = form.takes is TargetKind.recipe_as_typed
    return FormCall(
        (recipe_request.as_typed if as_typed else recipe_request.source,), recipe_request.verb, {}
    )


def _run_read(form: VerbForm, prog: str, words: list[str]) -> FormCall:
    """The call with a run: its recipe says which options follow, once the function has opened it."""
    place, rest = ("", words) if form.option else first(words, prog, form.needs)
    option_values, _ = known(form.options.read, rest, f"systolic {prog}")
    values = form.options.read(**option_values)
    run: Path | str = getattr(values, form.option) if form.option else place
    target = shlex.join([f"--{form.option}", str(run)]) if form.option else ""

    def reader(recipe: "Recipe", saved: Mapping[str, Any]) -> Mapping[str, Any]:
        return request_for(recipe, rest, prog, form.options.read, saved, target=target).options

    return FormCall((run,), values, {"reader": reader})


def _answered(form: VerbForm, call: FormCall) -> int:
    function, view = named(form.function), named(form.view)
    shown, values = named(form.reporter), vars(call.values)
    parameters = inspect.signature(shown).parameters
    with _kept_stdout() if values.get("json", False) else contextlib.nullcontext():
        with reporting(shown(**{n: value for n, value in values.items() if n in parameters})):
            answer = function(
                *call.target, **form.options.given_to_function(call.values), **call.more
            )
        if form.below_help_of is not None and not values.get("json", False):
            _print_help_on(call.target[0], *form.below_help_of)
        return view(answer, **form.options.given_to_view(call.values))


def _print_help_on(recipe: str, verb: str, form: VerbForm) -> None:
    """Prints the help of a verb on a recipe."""
    with contextlib.suppress(SystemExit):
        request(recipe, ["--help"], verb, form.options.read)


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
