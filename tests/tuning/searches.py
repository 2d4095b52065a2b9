"""Searches as ``systolic tune`` reads them, which are not run."""

from collections.abc import Sequence
from unittest import mock

from systolic.cli import forms
from systolic.cli.main import VERBS
from systolic.tuning.definition import Tuning


def tuning_of(words: Sequence[str]) -> Tuning:
    """The search of a command line, in place of its results."""
    (form,) = VERBS["tune"].forms
    call = forms._read(form, "tune", list(words), ())
    with mock.patch("systolic.tuning.answer.answer", lambda tuning, _: tuning):
        return forms.named(form.function)(
            call.target[0], **form.options.given_to_function(call.values)
        )
