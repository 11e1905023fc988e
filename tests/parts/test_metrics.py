"""Metrics against scikit-learn, and against numbers worked out by hand."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import hardy
from hardy import HardyError
from hardy.parts import metrics
from hardy.registry import PARTS


def answers(classes, rows=200, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    logits = rng.normal(size=(rows, classes)) + 1.5 * np.eye(classes)[labels]
    if ties:  # rows with the same answer and other labels
        logits[: rows // 2] = logits[rows // 2 :]
    return torch.tensor(logits), torch.tensor(labels)


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("ties", [False, True])
def test_metrics_are_those_of_scikit_learn(classes, ties):
    logits, labels = answers(classes, ties=ties)
    p, guesses, y = logits.softmax(1).numpy(), logits.argmax(1).numpy(), labels.numpy()
    scores = p[:, 1] if classes == 2 else p
    expected = {
        "accuracy": sk.accuracy_score(y, guesses),
        "balanced_accuracy": sk.balanced_accuracy_score(y, guesses),
        "macro_f1": sk.f1_score(y, guesses, average="macro"),
        "auroc": sk.roc_auc_score(y, scores, multi_class="ovr", average="macro"),
        "brier": sk.brier_score_loss(y, scores),
        "loss": sk.log_loss(y, p),
    }
    for name, value in expected.items():
        assert PARTS["metric"][name]().measure(logits, labels) == pytest.approx(value, abs=1e-8), name


def test_classes_that_a_client_has_not():
    """Nobody holds class 2, and class 3 is only among the answers."""
    logits = torch.eye(4).double()[[0, 0, 1, 3, 1]] * 4 + torch.linspace(0, 1, 20).double().view(5, 4).sin()
    labels = torch.tensor([0, 0, 1, 1, 0])
    y, guesses = labels.numpy(), logits.argmax(1).numpy()
    assert metrics.balanced_accuracy().measure(logits, labels) == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert metrics.macro_f1().measure(logits, labels) == pytest.approx(sk.f1_score(y, guesses, average="macro"))
    p = logits.softmax(1).numpy()
    areas = [sk.roc_auc_score(y == c, p[:, c]) for c in (0, 1)]
    assert metrics.auroc().measure(logits, labels) == pytest.approx(np.mean(areas))


def test_auroc_of_one_class_is_undefined():
    assert metrics.auroc().measure(torch.randn(5, 3).double(), torch.ones(5, dtype=torch.int64)) is None
    certain = torch.tensor([[0.0, 60.0], [0.0, 50.0], [0.0, 40.0]]).double()  # all probabilities round to 1
    assert metrics.auroc().measure(certain, torch.tensor([1, 1, 0])) == 1.0


def test_the_calibration_error_by_hand():
    """Two bins: of confidence 0.6 one in two is right, of 0.9 two in two."""
    p = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.1, 0.9], [0.1, 0.9]]).double()
    labels = torch.tensor([0, 1, 1, 1])
    assert metrics.ece(bins=10).measure(p.log(), labels) == pytest.approx(0.5 * 0.1 + 0.5 * 0.1)
    assert metrics.ece(bins=1).measure(p.log(), labels) == pytest.approx(0.75 - 0.75, abs=1e-7)


def test_the_calibration_error_bin_by_bin():
    logits, labels = answers(5)
    p, guesses = logits.softmax(1).max(1)
    confidence, right = p.numpy(), (guesses == labels).numpy()
    error = 0.0
    for low, high in zip(np.arange(15) / 15, np.arange(1, 16) / 15, strict=True):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert metrics.ece().measure(logits, labels) == pytest.approx(error)


@pytest.mark.parametrize("name", [name for name in PARTS["metric"] if not name.startswith("own_")])
def test_directions_and_bounds(name):
    """Perfect answers score better than wrong ones, and all lie within the bounds."""
    metric, labels = PARTS["metric"][name](), torch.arange(30) % 3
    right = torch.nn.functional.one_hot(labels, 3).double() * 20
    good, bad = metric.measure(right, labels), metric.measure(right.roll(1, 1), labels)
    assert (good > bad) is metric.higher_is_better
    assert metric.bounds[0] <= min(good, bad) <= max(good, bad) <= metric.bounds[1]


def test_a_function_becomes_a_metric():
    @hardy.metric(higher_is_better=False)
    def own_worst_margin(logits, labels):
        """The smallest margin."""
        return logits.gather(1, labels[:, None]).min()

    made = metrics.to_metrics("own_worst_margin, auroc")
    assert [one.name for one in made] == ["own_worst_margin", "auroc"] and not made[0].higher_is_better
    assert made[0].measure(torch.tensor([[3.0, 1.0]]), torch.tensor([1])) == 1.0
    text = hardy.Experiment(evaluation=hardy.config.EvaluationChoice(metrics=(own_worst_margin, metrics.ece(bins=5))))
    again = hardy.config.parse(text.to_toml())
    assert [one.name for one in again.evaluation.metrics] == ["own_worst_margin", "ece"]
    assert again.evaluation.metrics[1].bins == 5
    del PARTS["metric"]["own_worst_margin"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("aurok", "unknown metric 'aurok'.*auroc"),
        (["auroc", "auroc"], "metric 'auroc' is named twice"),
        ([3], "3 is no metric; give a name"),
    ],
)
def test_what_is_no_metric_is_refused(given, message):
    with pytest.raises(HardyError, match=message):
        metrics.to_metrics(given)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('evaluation.metrics=["primal_gap"]', "primal_gap is a diagnosis: write evaluation.diagnosis"),
        ("evaluation.select_metric=auroc", "select_metric is 'auroc', but evaluation.metrics names none"),
        ('evaluation.metrics=[{name="ece",bins=0}]', "ece takes 1 bin or more; it got 0"),
    ],
)
def test_mistakes_in_an_experiment(override, message):
    with pytest.raises(HardyError, match=message):
        hardy.read("demo", [override])
