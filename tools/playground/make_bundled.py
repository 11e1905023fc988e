"""Makes what `hardy playground` shows without a run: python tools/playground/make_bundled.py FOLDER

Trains the three experiments beside this file into FOLDER, unless it holds them already, and stores networks, images and
figures in src/hardy/playground/assets. It needs the extra `export`. The stored ones were trained on one GPU in two
minutes; on one core robust.toml should take about an hour, by what two rounds took. Settings were chosen on
validation rows.
"""

import sys
from pathlib import Path

import hardy
from hardy.playground.bundled import store_content
from hardy.playground.content import content_of
from hardy.user_code import import_code

HERE = Path(__file__).parent
ASSETS = HERE.parents[1] / "src" / "hardy" / "playground" / "assets"
EXPERIMENTS = ("clean", "robust", "fedrbn")


def main(folder: Path) -> None:
    import_code(str(HERE / "parts.py"))
    for name in EXPERIMENTS:
        if not (folder / name / "summary.json").exists():
            hardy.fit(hardy.read(HERE / f"{name}.toml"), out=folder / name)
    content, binary = content_of([folder / name for name in EXPERIMENTS])
    content["title"] = "attack a federated network"
    content["about"] = (
        "Three federated networks, trained with Hardy on 3,000 digits from five domains, at work in this page. "
        "Nothing you do here leaves it."
    )
    store_content(content, binary, ASSETS)
    for path in sorted(ASSETS.glob("bundled.*")):
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
