"""How the rounds went: loss, traffic, work, and replies that were lost."""

from collections import Counter
from html import escape

from hardy.report.chart import percent, plain, si
from hardy.report.count_plots import stacked
from hardy.report.page import figure, section, shown, table
from hardy.report.plots import Series, lines
from hardy.report.stored_run import StoredRun, number

_REASONS = ("dropped", "late", "crashed", "refused")
_KNOWN = {"round", "seconds", "loss", "bytes_up", "bytes_down", "macs", "cohort", "slots", "drift", "variance"}
_KNOWN |= {"primal_gap", "phi_gradient", "wasserstein_bound", "hostile_in_cohort"}


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
            figure("Hostile clients asked", _hostile(run), "Dashed: f, and half of the cohort."),
            *(
                figure(title, lines([Series(label="", points=run.series(key), style="ink")], title=title))
                for key in extra
                if key not in _KNOWN and (title := key.replace("_", " ").capitalize())
            ),
        ],
        _odds(run) + _wire(run),
    )


def _hostile(run: StoredRun) -> str:
    """How many hostile clients were asked in each round; nothing where none are named."""
    points, odds = run.series("hostile_in_cohort"), run.summary.get("cohort_odds") or {}
    levels = {"tolerated": number(odds, "tolerated"), "half": (number(odds, "cohort") or 0.0) / 2}
    drawn = [Series(label="hostile", points=points, style="ink")]
    drawn += [
        Series(label=name, points=[(at, level) for at, _ in points], style=f"c{place} dashed")
        for place, (name, level) in enumerate(levels.items(), 1)
        if level
    ]
    return lines(drawn, title="Hostile clients asked", zero=True) if points else ""


def _odds(run: StoredRun) -> str:
    """The chance that a cohort holds more hostile clients than the rule tolerates, and the rounds that did."""
    odds = run.summary.get("cohort_odds") or {}
    tolerated, chance = number(odds, "tolerated"), number(odds, "chance")
    if tolerated is None or chance is None:
        return ""
    hostile, population, cohort = (plain(number(odds, key) or 0.0) for key in ("hostile", "population", "cohort"))
    said = (
        f"A cohort of {cohort} of {population} clients, {'' if odds.get('named') else 'if '}{hostile} of them hostile, "
        f"holds more than the f = {plain(tolerated)} that the rule tolerates in {percent(chance)} of the rounds"
    )
    counted = [value for _, value in run.series("hostile_in_cohort")]
    beyond = sum(value > tolerated for value in counted)
    more = f"; here in {beyond} of {len(counted)}." if counted else "."
    return f'<p class="note">{escape(said + more)}</p>'


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


def privacy_section(run: StoredRun) -> str:
    """What was spent of the privacy of clients or examples; the curves are among those of the training."""
    rows, mechanisms = [], []
    for spent in run.summary.get("privacy") or ():
        rows.append(
            [
                escape(str(spent.get("adjacency", ""))),
                shown(number(spent, "epsilon"), "{:.3g}".format).replace("–", "∞"),
                shown(number(spent, "delta"), "{:.2g}".format),
                escape(str(spent.get("covers", ""))),
            ]
        )
        for one in spent.get("mechanisms") or ():
            cells = (shown(number(one, key), "{:.3g}".format) for key in ("noise", "share", "times"))
            mechanisms.append([escape(str(one.get("what", ""))), *cells, escape(str(one.get("sampling", "")))])
    return section(
        "Differential privacy",
        [],
        table(["differ by", "ε", "δ", "covers"], rows),
        table(["noise on", "deviation / sensitivity", "share in it", "times", "drawn"], mechanisms),
    )


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
