"""Was this row trained on? Scores of rows that were and rows that were not, and how far they can be told apart.

Two scores, from logits alone: minus the loss (Yeom et al., CSF 2018), and, with reference networks that were trained
without the row, its confidence against theirs (Carlini et al., S&P 2022, offline, with one deviation for all rows).
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Scores = NDArray[np.float64]


def loss_scores(logits: Tensor, labels: Tensor) -> Scores:
    """Minus the cross-entropy of each row."""
    found: Scores = -F.cross_entropy(logits.double(), labels, reduction="none").numpy()
    return found


def confidences(logits: Tensor, labels: Tensor) -> Scores:
    """log p / (1 − p) of each row's own class, which is nearly normal over networks."""
    exact = logits.double()
    own = exact.gather(1, labels[:, None])[:, 0]
    others = exact.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
    found: Scores = (own - others).numpy()
    return found


def calibrated_scores(confidence: Scores, references: Sequence[Scores]) -> Scores:
    """How far above what networks trained without the row say, in deviations; NaN marks networks trained with it."""
    said: Scores = np.stack(references)
    known: NDArray[np.bool_] = np.asarray(np.isfinite(said).any(axis=0), dtype=np.bool_)
    mean = np.array([np.nanmean(said[:, at]) if known[at] else np.nan for at in range(said.shape[1])])
    away: Scores = np.subtract(said, mean)
    scatter = away[np.isfinite(away)]
    found: Scores = (confidence - mean) / max(float(np.std(scatter)), 1e-12)
    return found


def told_apart(members: Scores, others: Scores) -> dict[str, float]:
    """Area under the curve (a half: nothing), and the advantage, true minus false positives, of a threshold chosen on
    one half of the rows and measured on the other; with their standard errors.

    >>> told_apart(np.array([3.0, 4.0, 5.0, 6.0]), np.array([1.0, 2.0, 1.0, 2.0]))["advantage"]
    1.0
    """
    above: Scores = 0.5 + 0.5 * np.sign(members[:, None] - others[None])
    by_member, by_other = above.mean(1), above.mean(0)
    spread = by_member.var(ddof=1) / len(members) + by_other.var(ddof=1) / len(others)  # DeLong et al. 1988
    halves = [(members[at::2], others[at::2]) for at in (0, 1)]
    hits, alarms = np.zeros(2), np.zeros(2)
    for at, (choosing, measuring) in enumerate((halves, halves[::-1])):
        threshold = _best_threshold(*choosing)
        hits[at], alarms[at] = (float((scores >= threshold).mean()) for scores in measuring)
    true, false = hits.mean(), alarms.mean()
    error = sqrt(true * (1 - true) / len(members) + false * (1 - false) / len(others))
    return {
        "auc": float(above.mean()),
        "auc_error": sqrt(spread),
        "advantage": float(true - false),
        "advantage_error": error,
        "members": len(members),
        "others": len(others),
    }


def _best_threshold(members: Scores, others: Scores) -> float:
    """Rows at or above it are taken for members: the most true minus false positives."""
    known = np.unique(np.concatenate([members, others]))
    candidates = np.concatenate([known[:1], (known[:-1] + known[1:]) / 2])
    true = 1 - np.searchsorted(np.sort(members), candidates) / len(members)
    false = 1 - np.searchsorted(np.sort(others), candidates) / len(others)
    return float(candidates[np.argmax(true - false)])
