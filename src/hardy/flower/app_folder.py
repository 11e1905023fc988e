"""The small Flower app that runs an experiment: a folder for the server, and one file that sites read and agree to."""

import hashlib
import io
import shlex
import tomllib
import warnings
import zipfile
from pathlib import Path

from hardy.config import Experiment, dump
from hardy.core.files import disk, write_atomic
from hardy.errors import HardyError
from hardy.flower import ENVIRONMENT
from hardy.user_code import places

CONNECTION = "hardy"
"""the SuperLink's name in Flower's own configuration"""
CONTROL_PORT = 9093
"""where the SuperLink listens, on loopback only"""
BUNDLE = "hardy-app.fab"
_APP = '''"""A Flower app that runs experiment.toml with Hardy; see docs/flower.md of Hardy."""

from pathlib import Path

from hardy.flower.apps import client_app, server_app

EXPERIMENT = Path(__file__).with_name("experiment.toml")
server = server_app(EXPERIMENT)
client = client_app(EXPERIMENT)
'''


def write_app(folder: Path, experiment: Experiment, *, out: Path, control: int = CONTROL_PORT) -> str:
    """Writes a Flower app that runs the experiment, Flower's own configuration, the settings of its environment, and
    the app as one file; returns its SHA-256."""
    if (folder / "pyproject.toml").exists():
        raise HardyError(f"{folder} already holds an app; choose another folder.")
    project = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": "hardy-app",
            "version": "1.0.0",
            "description": "An experiment of Hardy over Flower.",
            "license": "Apache-2.0",
            "dependencies": ["hardy-fl[flower]"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "hardy",
                    "components": {"serverapp": "hardy_app.app:server", "clientapp": "hardy_app.app:client"},
                    "config": {"out": str(out.absolute())},
                }
            }
        },
    }
    home = folder.absolute() / ".flwr"
    with disk(str(folder)):
        (folder / "hardy_app").mkdir(parents=True, exist_ok=True)
        home.mkdir(exist_ok=True)
    write_atomic(folder / "pyproject.toml", dump(project).encode() + b"\n")
    write_atomic(folder / "hardy_app" / "__init__.py", b"")
    write_atomic(folder / "hardy_app" / "app.py", _APP.encode())
    write_atomic(folder / "hardy_app" / "experiment.toml", experiment.to_toml().encode() + b"\n")
    link = {"address": f"127.0.0.1:{control}", "insecure": True}  # loopback; nobody else can connect
    write_atomic(home / "config.toml", dump({"superlink": {"default": CONNECTION, CONNECTION: link}}).encode() + b"\n")
    settings = {**ENVIRONMENT, "FLWR_HOME": str(home)}
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()]
    write_atomic(folder / "environment", "".join(lines).encode())
    return build_app(folder)


def build_app(folder: Path) -> str:
    """Writes the app as the one file that Flower will send out; returns its SHA-256."""
    from flwr.cli.build import build_fab_from_disk

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Flower's own, of a library it uses
        content = build_fab_from_disk(folder)
    write_atomic(folder / BUNDLE, content)
    return hashlib.sha256(content).hexdigest()


def read_app(path: Path) -> tuple[str, dict[str, str]]:
    """The SHA-256 of an app's file, and the text of each file in it."""
    if path.is_dir():
        path = path / BUNDLE
    try:
        content = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as found:
            texts = {name: found.read(name).decode("utf-8", "replace") for name in sorted(found.namelist())}
    except (OSError, zipfile.BadZipFile) as error:
        raise HardyError(
            f"{path} is no app ({error}); name the {BUNDLE} that `hardy deploy app` has written."
        ) from None
    return hashlib.sha256(content).hexdigest(), texts


def _code_places(experiment: str) -> list[str]:
    """The modules and files of code that an experiment in TOML names; none is imported."""
    try:
        table = tomllib.loads(experiment)
    except (ValueError, RecursionError):
        return []  # a node will refuse it
    return places({key: value for key, value in table.items() if key not in ("code", "versions")})


def describe_app(path: Path) -> str:
    """What a site agrees to with an app, in a few lines."""
    name, texts = read_app(path)
    own = texts.pop("hardy_app/app.py", None)
    expected = {"pyproject.toml", "hardy_app/__init__.py", "hardy_app/experiment.toml", ".info/CONTENT"}
    if own == _APP and set(texts) == expected and not texts["hardy_app/__init__.py"]:
        code = "its code is Hardy's own app, unchanged: it does what the experiment says, with the Hardy installed here"
    else:
        code = "IT BRINGS CODE OF ITS OWN; read it before you agree: " + ", ".join(["hardy_app/app.py", *sorted(texts)])
    experiment = texts.get("hardy_app/experiment.toml", "")
    if needed := _code_places(experiment):
        code += (
            f"\nit needs code that it does not bring: {', '.join(needed)}\n"
            "get a copy, read it, and start the node with the path of the copy, or the module, in its settings:\n"
            f"  hardy deploy node ... allow_import={','.join(Path(place).name for place in needed)}"
        )
    return f"app {name}\n{code}\n\n{experiment.strip()}"
