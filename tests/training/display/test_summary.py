"""What the summary points to."""

from pathlib import Path

import pytest

from systolic.runs.remote.store import BucketFolder
from systolic.training.display.summary import shown


def test_a_run_in_a_bucket_is_shown_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYSTOLIC_CACHE", "/cache")
    copy = BucketFolder(scheme="s3", bucket="runs", key="one").copy
    assert shown(copy / "checkpoints" / "8") == "s3://runs/one/checkpoints/8"
    assert shown(Path("runs/one")) == "runs/one"
