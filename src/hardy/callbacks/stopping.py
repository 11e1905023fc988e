"""Early stopping."""

from dataclasses import dataclass
from typing import Any

from hardy.callbacks.base import Callback, Stop
from hardy.errors import HardyError
from hardy.registry import part


@part("callback")
@dataclass(kw_only=True, unsafe_hash=True)
class EarlyStopping(Callback):
    """Ends a run when its figure on validation rows has not become better for some rounds.

    The figure is what chooses the best round: accuracy, or evaluation.select_metric, under the attack of
    evaluation.select if there is one; the mean over clients, over a network the median. It looks at the whole history,
    so a resumed run stops where it would have.
    """

    patience: int = 10
    """rounds without a better figure"""
    metric: str | None = None
    """another one of evaluation.metrics, or "accuracy"; absent: what chooses the best round"""
    min_delta: float = 0.0
    """a figure is better only if it is better by more than this"""

    def __post_init__(self) -> None:
        if self.patience < 1 or not 0 <= self.min_delta < float("inf"):
            raise HardyError(
                f"early_stopping takes a patience of 1 round or more and a min_delta of 0 or more; it got "
                f"{self.patience} and {self.min_delta}."
            )

    def check(self, run: Any) -> None:
        known = [metric.name for metric in run.experiment.evaluation.metrics]
        if self.metric not in (None, "accuracy", *known):
            raise HardyError(
                f"early_stopping looks at {self.metric!r}, but evaluation.metrics names {', '.join(known) or 'none'}. "
                "Name it there too."
            )
        if not any(len(client.validation) for client in run.engine.data.profiles):
            raise HardyError(
                "early_stopping looks at validation rows, but no client has any. Set data.validation, such as 0.1."
            )

    def on_round(self, run: Any, line: dict[str, Any]) -> None:
        choice = run.experiment.evaluation
        name = self.metric or choice.select_metric or "accuracy"
        metric = next((one for one in choice.metrics if one.name == name), None)
        sign = 1 if metric is None or metric.higher_is_better else -1
        place = "selection" if choice.select else "validation"
        key = f"{place}_accuracy" if name == "accuracy" else f"{place}_metrics/{name}"
        found = ((row["round"], row.get(f"{key}/median", row.get(f"{key}/mean"))) for row in run.history)
        seen = [(at, sign * value) for at, value in found if value is not None]
        if not seen or seen[-1][0] != line["round"]:
            return  # nothing was measured in this round
        since, best = seen[0]
        for at, value in seen:
            if value > best + self.min_delta:
                since, best = at, value
        if line["round"] - since >= self.patience:
            under = f" under {choice.select}" if choice.select else ""
            raise Stop(
                f"validation {name}{under} has not been better than {sign * best:.4g}, of round {since:g}, for "
                f"{self.patience} rounds"
            )


early_stopping = EarlyStopping
