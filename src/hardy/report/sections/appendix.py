"""Pictures, and the settings of the run."""

from base64 import b64encode
from html import escape

from hardy.report.page import figure, section
from hardy.report.pictures import row_labels, whole_png
from hardy.report.stored_run import StoredRun


def pictures_section(run: StoredRun) -> str:
    figures = []
    for path in sorted((run.folder / "pictures").glob("*.png")):
        png = path.read_bytes()
        if not whole_png(png):
            figures.append(figure(path.stem, "<p>This picture is damaged, or no PNG.</p>"))
            continue
        labels = row_labels(png)
        image = f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{b64encode(png).decode()}">'
        figures.append(figure(path.stem, image, f"Rows: {', '.join(labels)}." if labels else ""))
    return section("Pictures", figures)


def settings_section(run: StoredRun) -> str:
    versions = " · ".join(f"{name} {version}" for name, version in (run.summary.get("versions") or {}).items())
    config = f"<details><summary>config.toml</summary><pre>{escape(run.config)}</pre></details>" if run.config else ""
    return section("Settings", [], config, f'<p class="note">{escape(versions)}</p>' if versions else "")
