"""How the rounds went: loss, traffic, work, and replies that were lost."""

from collections import Counter
from html import escape

from hardy.report.chart import plain, si
from hardy.report.count_plots import stacked
from hardy.report.page import figure, section, table
from hardy.report.plots import Series, lines
from hardy.report.stored_run import StoredRun, number

_REASONS = ("dropped", "late", "crashed", "refused")
_KNOWN = {"round", "seconds", "loss", "bytes_up", "bytes_down", "macs", "cohort", "slots", "drift", "variance"}
_KNOWN |= {"primal_gap", "phi_gradient", "wasserstein_bound"}


def training_section(run: StoredRun) -> str:
    broken = sum("loss" in row and number(row, "loss") is None for row in run.rounds)
    traffic = [
        Series(label="up", points=run.cumulative("bytes_up")),
        Series(label="down", points=run.cumulative("bytes_down")),
    ]
    macs = Series(label="total", points=run.cumulative("macs"), style="ink")
    extra = dict.fromkeys(key for row in run.rounds for key, value in row.items() if number(value) is not None)
    return section(
        "Training",
        [
            figure(
                "Loss",
                lines([Series(label="loss", points=run.series("loss"), style="ink")], title="Loss", zero=True),
                f"Not a number in {broken} of {len(run.rounds)} rounds." if broken else "",
            ),
            figure(
                "Traffic, cumulative",
                lines(traffic, title="Cumulative traffic", y=lambda v: si(v, "B"), zero=True),
            ),
            figure(
                "Multiply-accumulates (MACs), cumulative",
                lines([macs], title="Cumulative MACs", y=si, zero=True),
            ),
            *(
                figure(title, lines([Series(label="", points=run.series(key), style="ink")], title=title))
                for key in extra
                if key not in _KNOWN and (title := key.replace("_", " ").capitalize())
            ),
        ],
        _wire(run),
    )


def _wire(run: StoredRun) -> str:
    """What each client received and sent over a network, evaluation included; nothing where there was none."""
    counted: dict[str, list[float]] = {}
    for row in run.rounds:
        for client, ways in (row.get("wire") or {}).items():
            total = counted.setdefault(client, [0.0, 0.0, 0.0])
            for at, value in enumerate((1.0, number(ways, "down") or 0.0, number(ways, "up") or 0.0)):
                total[at] += value
    cells = ([escape(client), plain(n), si(down, "B"), si(up, "B")] for client, (n, down, up) in counted.items())
    return table(["on the wire: client", "rounds", "received", "sent"], cells)


def lost_replies_section(run: StoredRun) -> str:
    last = run.rounds[-1]["round"] if run.rounds else 0
    counts = {reason: [0] * last for reason in _REASONS}
    causes: Counter[str] = Counter()
    for row in run.rounds:
        for told in (row.get("lost") or {}).values():
            reason = str(told).partition(":")[0].strip()
            counts.setdefault(reason, [0] * last)[row["round"] - 1] += 1
            causes[str(told)] += 1
    return section(
        "Lost replies",
        [
            figure(
                "By round",
                stacked(counts, title="Lost replies by round"),
                "Replies the server went without. Where rounds are many, a column sums neighbours.",
            )
        ],
        table(
            ["most frequent causes", "replies"],
            [[escape(cause), str(count)] for cause, count in causes.most_common(8)],
        ),
    )
