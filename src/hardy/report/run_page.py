"""A run as one HTML file that needs nothing else."""

from pathlib import Path
from typing import Any

from hardy.core.files import write_atomic
from hardy.report.page import page
from hardy.report.sections.accuracy import accuracy_section, header, robustness_section
from hardy.report.sections.appendix import pictures_section, settings_section
from hardy.report.sections.client_metrics import metrics_section
from hardy.report.sections.convergence import convergence_section, drift_section
from hardy.report.sections.customising import customising_section
from hardy.report.sections.holdings import clients_section
from hardy.report.sections.planes import projections_section
from hardy.report.sections.rounds import lost_replies_section, privacy_section, training_section
from hardy.report.stored_run import read_run, refusing_odd_figures

SECTIONS = (
    header,
    accuracy_section,
    metrics_section,
    robustness_section,
    customising_section,
    training_section,
    convergence_section,
    drift_section,
    privacy_section,
    lost_replies_section,
    clients_section,
    projections_section,
    pictures_section,
    settings_section,
)
"""in the order of the page"""


def write_report(folder: Path, unfinished: dict[str, Any] | None = None) -> Path:
    """Draw the run in this folder to folder/report.html; `unfinished` is the summary of a run that still trains."""
    run, out = read_run(folder, unfinished), folder / "report.html"
    name = str(run.summary.get("name", folder.name))
    with refusing_odd_figures(folder):
        text = page(name, *(part(run) for part in SECTIONS))
    write_atomic(out, text.encode(errors="replace"))
    return out
