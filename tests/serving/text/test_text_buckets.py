"""Expected padding of a text engine's programs, by hand."""

import pytest

from systolic.serving.text.buckets import Buckets, TextTraffic
from systolic.serving.text.opening import EngineSizes, plan_engine
from tests.serving.text.engine import shared


def test_expected_padding_counts_all_that_holds_no_token():
    # Prompts of 10 and 30 tokens alike, in chunks of 16 and pages of 8: parts 10, 16 and 14.
    traffic = TextTraffic(prompts={10: 1.0, 30: 1.0}, answers={1: 1.0})
    made = Buckets.of(
        traffic,
        rows=16,
        chunk=16,
        context=64,
        page_size=8,
        mixed=False,
        counts=(2, 1, 1),
        least_rows=8,
    )
    assert tuple(made.lengths) == (16,)
    assert made.padding["prompt tokens"] == pytest.approx(1 - (10 + 16 + 14) / (3 * 16))
    # Of 1 to 16 texts, each count n weighted 1/n: n/n is useful of 8/n or 16/n.
    assert tuple(made.rows) == (8, 16)
    held = sum((8 if n <= 8 else 16) / n for n in range(1, 17))
    assert made.padding["decode rows"] == pytest.approx(1 - 16 / held)
    # All texts take programs of 8 pages; those of 11 tokens need 2, those of 31 need 4.
    assert made.padding["pages"] == pytest.approx(1 - (2 + 4) / 16)


def test_a_server_on_a_cpu_has_few_programs_and_one_of_a_text_by_itself() -> None:
    plan = plan_engine(shared().steps, EngineSizes(rows=16, context=4096))
    assert plan.buckets.rows[0] == 1
    assert plan.buckets.rows[-1] == 16
    # 3 x 2 of decode, 2 x 2 of prompts, 2 choices for each of 3 sizes, and the scores.
    assert plan.programs().count == 17
    other = plan_engine(shared().steps, EngineSizes(rows=16, context=4096, programs=(5, 3, 3)))
    assert other.programs().count > 30
