"""The classification task against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.core.errors import OptionError
from systolic.steps.tasks import Classification

LOGITS = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
BATCH = {
    "image": jnp.asarray(LOGITS),
    "label": jnp.asarray([0, 1, 2, -1, 3, 4], jnp.int32),
    "mask": jnp.asarray([1, 1, 1, 1, 1, 0], jnp.float32),
}
KNOWN = [0, 1, 2, 4]


def same(image: jax.Array) -> jax.Array:
    return image


def test_unlabelled_and_padded_examples_weigh_nothing() -> None:
    terms = Classification().terms(same, BATCH, train=True)
    probability = np.asarray(jax.nn.softmax(LOGITS))
    labels = np.asarray(BATCH["label"])
    expected = sum(-np.log(probability[i, labels[i]]) for i in KNOWN)
    assert float(terms["loss"].weight) == 4
    assert float(terms["loss"].total) == pytest.approx(expected, rel=1e-5)
    right = sum(LOGITS[i].argmax() == labels[i] for i in KNOWN)
    five = sum(labels[i] in np.argsort(-LOGITS[i])[:5] for i in KNOWN)
    assert float(terms["accuracy"].total) == right
    assert float(terms["top5_accuracy"].total) == five


def test_smoothing_spreads_the_target_in_training_only() -> None:
    task = Classification(label_smoothing=0.2)
    target = 0.2 / 8 + 0.8 * np.eye(8)[np.asarray(BATCH["label"])[KNOWN]]
    log_probability = np.asarray(jax.nn.log_softmax(LOGITS))[KNOWN]
    smoothed = task.terms(same, BATCH, train=True)["loss"].total
    assert float(smoothed) == pytest.approx(-(target * log_probability).sum(), rel=1e-5)
    plain = Classification().terms(same, BATCH, train=True)["loss"].total
    assert float(task.terms(same, BATCH, train=False)["loss"].total) == pytest.approx(float(plain))


def test_constant_logits_score_nothing() -> None:
    terms = Classification().terms(lambda image: jnp.zeros_like(image), BATCH, train=False)
    assert float(terms["accuracy"].total) == 0


def test_few_classes_have_no_top5() -> None:
    batch = {**BATCH, "image": BATCH["image"][:, :5]}
    assert set(Classification().terms(same, batch, train=False)) == {"loss", "accuracy"}


def test_outputs_list_the_best_classes() -> None:
    outputs = Classification(top=3).outputs(same, BATCH)
    np.testing.assert_array_equal(outputs["label"], np.argsort(-LOGITS)[:, :3])
    assert (np.diff(outputs["probability"]) <= 0).all()
    assert Classification().outputs(same, {**BATCH, "image": BATCH["image"][:, :2]})[
        "label"
    ].shape == (6, 2)


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 1.0}, {"label_smoothing": -0.1}, {"top": 0}]
)
def test_impossible_options_are_refused(options) -> None:
    with pytest.raises(OptionError):
        Classification(**options)
