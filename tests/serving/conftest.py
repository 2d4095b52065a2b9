"""Children of these tests are forked."""

from tests.forked import forked_children as forked_children
