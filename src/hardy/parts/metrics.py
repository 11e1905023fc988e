"""Metrics: figures of a client's rows from its network's logits and their labels.

Each is measured for every client, on its own rows, so that it can be averaged over clients and domains, has a worst
client, and needs no row to leave a node of a network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hardy.core.metric import Metric
from hardy.errors import HardyError
from hardy.registry import OF_FUNCTION, find, part
from hardy.user_code import named_by_user

_ONE_CLASS = "its rows are all of one class"


@part("metric")
@dataclass(frozen=True, kw_only=True)
class Accuracy(Metric):
    """Share of rows that are classified rightly."""

    bounds = (0.0, 1.0)

    def measure(self, logits: Tensor, labels: Tensor) -> float:
        return _mean(logits.argmax(1) == labels)


@part("metric")
@dataclass(frozen=True, kw_only=True)
class BalancedAccuracy(Metric):
    """Mean over the classes among the labels of the share of their rows that is classified rightly."""

    bounds = (0.0, 1.0)

    def measure(self, logits: Tensor, labels: Tensor) -> float:
        right = logits.argmax(1) == labels
        recalls = [_mean(right[labels == label]) for label in _distinct(labels)]
        return sum(recalls) / len(recalls)


@part("metric")
@dataclass(frozen=True, kw_only=True)
class MacroF1(Metric):
    """Mean over classes of F1 = 2·TP / (2·TP + FP + FN). A class counts if it is among the labels or the answers."""

    bounds = (0.0, 1.0)

    def measure(self, logits: Tensor, labels: Tensor) -> float:
        guesses = logits.argmax(1)
        classes = _distinct(torch.cat([labels, guesses]))
        hits = [int(((guesses == c) & (labels == c)).sum()) for c in classes]
        named = [int((guesses == c).sum() + (labels == c).sum()) for c in classes]
        return sum(2 * hit / count for hit, count in zip(hits, named, strict=True)) / len(classes)


@part("metric", name="auroc")
@dataclass(frozen=True, kw_only=True)
class AUROC(Metric):
    """Area under the ROC curve: the chance that a row of a class gets a higher probability of it than another row.

    With more than two classes the mean of one class against the rest, over the classes among the labels.
    """

    bounds = (0.0, 1.0)
    undefined_when = _ONE_CLASS

    def measure(self, logits: Tensor, labels: Tensor) -> float | None:
        classes = _distinct(labels)
        if len(classes) < 2:
            return None
        scores = logits.log_softmax(1)  # in the order of the probabilities, and never rounded to 1
        if logits.shape[1] == 2:
            return _area(scores[:, 1] - scores[:, 0], labels == 1)
        return sum(_area(scores[:, c], labels == c) for c in classes) / len(classes)


@part("metric")
@dataclass(frozen=True, kw_only=True)
class Brier(Metric):
    """Mean squared distance of the probabilities from the labels: summed over classes, of two classes half of it."""

    higher_is_better = False
    bounds = (0.0, 2.0)

    def measure(self, logits: Tensor, labels: Tensor) -> float:
        gap = logits.softmax(1) - F.one_hot(labels, logits.shape[1])
        return _mean(gap.square().sum(1)) / (2 if logits.shape[1] <= 2 else 1)


@part("metric", name="ece")
@dataclass(frozen=True, kw_only=True)
class CalibrationError(Metric):
    """Expected calibration error: mean distance of confidence from accuracy, over bins of equal width; 0 is best."""

    higher_is_better = False
    bounds = (0.0, 1.0)
    bins: int = 15
    """of confidence, from 0 to 1"""
    """bins of equal width that confidences are sorted into"""

    def __post_init__(self) -> None:
        if self.bins < 1:
            raise HardyError(f"ece takes 1 bin or more; it got {self.bins}.")

    def measure(self, logits: Tensor, labels: Tensor) -> float:
        confidence, guesses = logits.softmax(1).max(1)
        gap = (guesses == labels).to(confidence) - confidence
        at = (confidence * self.bins).ceil().long().clamp(1, self.bins) - 1  # a bin holds its upper edge
        return float(torch.zeros(self.bins, dtype=gap.dtype).index_add_(0, at, gap).abs().sum() / len(gap))


@part("metric", name="loss")
@dataclass(frozen=True, kw_only=True)
class MeanLoss(Metric):
    """Mean cross-entropy, in nats."""

    higher_is_better = False
    bounds = (0.0, float("inf"))

    def measure(self, logits: Tensor, labels: Tensor) -> float:
        return float(F.cross_entropy(logits, labels))


def _distinct(labels: Tensor) -> list[int]:
    return sorted(set(labels.tolist()))


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _area(scores: Tensor, positive: Tensor) -> float:
    """The share of pairs (positive, other) in which the positive has the higher score; a tie counts half."""
    _, at, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts - 1) / 2)[at]  # ties share the mean of their ranks
    ours, others = int(positive.sum()), int((~positive).sum())
    return (float(ranks[positive].sum()) - ours * (ours + 1) / 2) / (ours * others)


Measure = Callable[[Tensor, Tensor], Any]
"""(logits, labels) -> a figure, or None where it is undefined"""


def metric(
    function: Measure | None = None,
    *,
    higher_is_better: bool = True,
    undefined_when: str = Metric.undefined_when,
) -> Any:
    """Makes a metric of a function of logits, [row, class], and labels, [row], and registers it under its name."""

    def make(function: Measure) -> type[Metric]:
        return part("metric", name=function.__name__)(_made(function, higher_is_better, undefined_when))

    return make if function is None else make(function)


def _made(function: Measure, higher_is_better: bool, undefined_when: str) -> type[Metric]:
    def measure(self: Metric, logits: Tensor, labels: Tensor) -> float | None:
        value = function(logits, labels)
        return None if value is None else float(value)

    content = {
        "measure": measure,
        "higher_is_better": higher_is_better,
        "undefined_when": undefined_when,
        "__doc__": function.__doc__ or f"{function.__name__} of logits and labels.",
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
    }
    return dataclass(frozen=True, kw_only=True)(type(function.__name__, (Metric,), content))


@cache
def _of_function(function: Measure) -> type[Metric]:
    return _made(function, True, Metric.undefined_when)


OF_FUNCTION["metric"] = _of_function


def to_metrics(given: str | Any) -> tuple[Metric, ...]:
    """Metrics from names ("auroc,ece", or a list), metrics, and functions of logits and labels; no two of one name."""
    words = [word.strip() for word in given.split(",") if word.strip()] if isinstance(given, str) else given
    found = tuple(_to_metric(named_by_user(word) if isinstance(word, str) else word) for word in words)
    for at, one in enumerate(found):
        if one.name in {earlier.name for earlier in found[:at]}:
            raise HardyError(f"metric {one.name!r} is named twice; its figures would take each other's place.")
    return found


def _to_metric(given: Any) -> Metric:
    if isinstance(given, Metric):
        return given
    if isinstance(given, type) and issubclass(given, Metric):
        return given()
    if isinstance(given, str):
        made: Metric = find("metric", given)()
        return made
    if callable(given):
        return _of_function(given)()
    raise HardyError(f"{given!r} is no metric; give a name, a metric, or a function of logits and labels.")


accuracy, balanced_accuracy, macro_f1, auroc, brier = Accuracy, BalancedAccuracy, MacroF1, AUROC, Brier
ece, loss = CalibrationError, MeanLoss
__all__ = [
    "accuracy",
    "auroc",
    "balanced_accuracy",
    "brier",
    "ece",
    "loss",
    "macro_f1",
    "metric",
    "to_metrics",
]
