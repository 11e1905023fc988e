"""Draws the frontier over widths and Figure 7 from the results: python experiments/split_mix/pictures.py OUT_FOLDER"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from curves import picture  # noqa: E402

WIDTHS = (0.125, 0.25, 0.5, 1.0)


def rows(name: str) -> dict:
    return json.loads((HERE / "results" / name).read_text())["rows"]


def frontier(found: dict) -> str:
    """Accuracy against multiply-accumulates an image, one point a width."""
    curves = {
        label: [(s["macs"] / 1e6, s["standard"]) for s in found[label]["settings"]]
        for label in ("Split-Mix", "FedEnsemble of 8 x0.125", "SHeteroFL", "HeteroFL")
    }
    widths = zip(found["SHeteroFL"]["settings"], WIDTHS, strict=True)
    alone = [(s["macs"] / 1e6, found[f"FedAvg x{w:g}"]["settings"][0]["standard"]) for s, w in widths]
    return picture(
        {"FedAvg, each on its own": alone, **curves},
        ticks=[0, 10, 20, 30, 40, 50],
        step=2,
        x_name="million MACs an image",
    )


def robustness(found: dict) -> str:
    """Accuracy under PGD-7 against standard accuracy, one point a λ."""

    def curve(row: str, width: float) -> list[tuple[float, float]]:
        own = [s for s in found[row]["settings"] if s["width"] == width]
        return [(100 * s["standard"], s["robust"]["pgd-7"]) for s in own]

    curves = {f"Split-Mix+DAT x{w:g}": curve("Split-Mix+DAT, all widths", w) for w in WIDTHS}
    curves["x1, only the rich attack"] = curve("Split-Mix+DAT, only the rich attack", 1.0)
    curves["x1, FedRBN in Split-Mix"] = curve("FedRBN in Split-Mix, only the rich attack", 1.0)
    curves["OAT, x1, no budgets"] = curve("OAT, x1", 1.0)
    names = [f"FedAvg+AT, x1, {weight}" for weight in ("1", "0.5", "0.2")]
    trained = [found[name]["settings"][0] for name in names]
    curves["FedAvg+AT, x1, no budgets"] = [(100 * s["standard"], s["robust"]["pgd-7"]) for s in trained]
    return picture(curves, ticks=[80, 82, 84, 86, 88, 90], step=5, x_name="standard accuracy")


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    (out / "split_mix_frontier.svg").write_text(frontier(rows("digits_h200_2026-11-15.json")))
    (out / "split_mix_robustness.svg").write_text(robustness(rows("digits_dat_h200_2026-11-15.json")))


if __name__ == "__main__":
    main()
