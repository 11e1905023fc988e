"""Strangers before a closed deployment: real processes with Flower's own tools, and what each of them got.

    python benchmarks/strangers.py benchmarks/results/strangers_cpu-2-cores_DATE.json [--smoke]

One server and one site run as `hardy deploy` starts them. Each stranger tries what worked before the deployment was
closed: join as a node, run an app of its own, list the runs. `got_in` must be false in every row; the script ends with
an error otherwise. `--smoke`: the first two of them.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hardy import config
from hardy.core.files import versions
from hardy.flower.app_folder import write_app
from hardy.flower.local import Site, ask_flower, site
from hardy.flower.processes import free_port

APP = """
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    import time
    Path("{marks}/server").write_text("ran")
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    asked = [Message(RecordDict({{"asked": ConfigRecord({{"what": "pixels"}})}}), node, "query") for node in nodes]
    said = [r.error.reason if r.has_error() else "content" for r in grid.send_and_receive(asked, timeout=120)]
    Path("{marks}/said").write_text(said[0] if said else "silence")


@client.query()
def steal(message, context):
    Path("{marks}/site").write_text("ran")
    return Message(RecordDict({{"pixels": ConfigRecord({{"all": "of them"}})}}), reply_to=message)
"""


def tried(command: list[str], place: Site, seconds: float, **more: str) -> dict[str, Any]:
    """A command's exit code and last words; None where it had to be stopped."""
    around = {**place.environment, **more}
    try:
        done = subprocess.run(
            command, env=around, capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
        )
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        code, said = None, "".join(part.decode() for part in (late.stdout, late.stderr) if part)
    plain = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]+", " ", said)
    return {"exit": code, "said": " ".join(plain.split())[-400:]}


def strange_app(folder: Path, place: Site, marks: Path) -> Path:
    """An app that asks for pixels, and Flower's configuration for the nodes' port with the authority's certificate."""
    shutil.rmtree(folder, ignore_errors=True)
    write_app(folder, config.Experiment(), out=folder / "out", control=place.port)
    (folder / "hardy_app" / "app.py").write_text(APP.format(marks=marks))
    ca = place.folder / "keys" / "node-0" / "ca.pem"
    link = f'address = "127.0.0.1:{place.port}"\nroot-certificates = "{ca}"\n'
    (folder / ".flwr" / "config.toml").write_text(f'[superlink]\ndefault = "hardy"\n[superlink.hardy]\n{link}')
    return folder


def strangers(place: Site, work: Path) -> dict[str, Any]:
    """Who -> what is tried -> how it ended."""
    address, ca = f"127.0.0.1:{place.port}", str(place.folder / "keys" / "node-0" / "ca.pem")
    marks = work / "marks"
    marks.mkdir()
    app = strange_app(work / "strange", place, marks)
    home = {"FLWR_HOME": str(app / ".flwr")}
    here = ["--host", "127.0.0.1", "--port", str(free_port())]
    join = ["flower-supernode", "--superlink", address, "--max-retries", "1", *here]
    stolen = [sys.executable, "-m", "hardy", "deploy", "node", str(work / "stolen"), "--server", address]
    stolen += ["--app", str(place.folder / "app" / "hardy-app.fab"), "--state", str(work / "thief")]
    shutil.copytree(place.folder / "keys" / "node-0", work / "stolen")
    another = work / "another"
    cases: dict[str, list[tuple[str, list[str], dict[str, str]]]] = {
        "nothing": [("joins as a node", [*join, "--insecure"], {})],
        "the authority's certificate": [
            ("joins as a node", [*join, "--root-certificates", ca], {}),
            ("runs an app of its own", ["flwr", "run", str(app), "hardy"], home),
            ("lists the runs", ["flwr", "list", "hardy"], home),
        ],
        "the site's stolen keys": [("joins as that node", stolen, {})],
        "keys of another authority": [
            (
                "makes keys",
                [sys.executable, "-m", "hardy", "deploy", "certificates", str(another), "--hosts", "x", "--nodes", "1"],
                {},
            ),
            ("joins as a node", [*stolen[:5], str(another / "node-0"), *stolen[6:]], {}),
        ],
    }
    found: dict[str, Any] = {}
    for who, attempts in list(cases.items())[: 2 if "--smoke" in sys.argv else None]:
        for what, command, more in attempts:
            row = tried(command, place, 90, **more)
            row["got_in"] = what != "makes keys" and (row["exit"] == 0 or grown(place))
            found.setdefault(who, {})[what] = row
            print(who, "|", what, "|", row, flush=True)
    found["an app the site has not agreed to"] = {"is run by the operator": run_by_operator(place, app, marks)}
    return found


def grown(place: Site) -> bool:
    """Whether there are runs, or more nodes than the site."""
    runs = ask_flower(place.environment, "list", "hardy")["runs"]
    return bool(runs) or len(json.loads((place.folder / "server" / "nodes.json").read_text())) != 1


def run_by_operator(place: Site, app: Path, marks: Path) -> dict[str, Any]:
    """The operator of the server may start any run; the site answers none but its own."""
    own = place.folder / "app"
    shutil.copy(app / "hardy_app" / "app.py", own / "hardy_app" / "app.py")
    place.submit()
    end = time.monotonic() + 240
    while not (marks / "said").exists() and time.monotonic() < end:
        time.sleep(1)
    lines = (place.folder / "state" / "audit.jsonl").read_text().splitlines()
    return {
        "ran_on_the_server": (marks / "server").exists(),
        "said": (marks / "said").read_text() if (marks / "said").exists() else "",
        "audit": json.loads(lines[-1])["why"],
        "node_goes_on": place.processes["node-0"].poll() is None,
        "got_in": (marks / "site").exists(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the first two")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, site(Path(folder) / "flower") as place:
        place.prepare(config.Experiment(), Path(folder) / "run", 1)
        place.superlink()
        place.supernode(0)
        end = time.monotonic() + 120
        while not json.loads((place.folder / "server" / "nodes.json").read_text()) and time.monotonic() < end:
            time.sleep(0.5)
        found = strangers(place, Path(folder))
    result = {"versions": {**versions(), "flwr": version("flwr")}, "cores": os.cpu_count(), "strangers": found}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    inside = [who for who, rows in found.items() if any(row["got_in"] for row in rows.values())]
    assert not inside, inside
    print("none got in")


if __name__ == "__main__":
    main()
