"""`hardy deploy`: an experiment on several machines."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from hardy.cli.command import Command, import_option, quiet_option, read_experiment, tensorboard_option
from hardy.errors import HardyError


def _declare_certificates(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hosts", required=True, help="names and addresses of the server, as the nodes call it")
    parser.add_argument("--nodes", type=int, required=True, metavar="N")
    parser.add_argument("--days", type=int, default=365, help="how long they are valid (default 365)")


def _certificates(options: Any) -> None:
    from hardy.flower.certificates import certificates

    certificates(options.folder, hosts=options.hosts.split(","), nodes=options.nodes, days=options.days)
    print(f"written: {options.folder}/server stays on the server; node-0, node-1, ... beside it go to one site each")
    print("(over a safe way, and are then deleted here: whoever has such a folder is that site)")


def _declare_app(parser: ArgumentParser) -> None:
    parser.add_argument("experiment", help="a TOML file, or a bundled name such as demo")
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--out", type=Path, required=True, help="run folder, on the server")
    parser.add_argument("--control", type=int, default=9093, metavar="PORT", help="as in `hardy deploy server`")
    import_option(parser)


def _app(options: Any) -> None:
    from hardy.flower.app_folder import BUNDLE, write_app
    from hardy.flower.certificates import require_flower

    require_flower()
    name = write_app(options.folder, read_experiment(options), out=options.out, control=options.control)
    print(f"app {name}\nwritten: {options.folder / BUNDLE}, for the sites to agree to (`hardy deploy show`)")
    print(f"then, while `hardy deploy server` runs: hardy deploy run {options.folder}")


def _declare_show(parser: ArgumentParser) -> None:
    parser.add_argument("app", type=Path, help="hardy-app.fab")


def _show(options: Any) -> None:
    from hardy.flower.app_folder import describe_app

    print(describe_app(options.app))


def _declare_server(parser: ArgumentParser) -> None:
    parser.add_argument("keys", type=Path, help="the folder `server` of `hardy deploy certificates`")
    parser.add_argument("--address", default="0.0.0.0:9092", metavar="HOST:PORT", help="where nodes connect")
    parser.add_argument("--control", type=int, default=9093, metavar="PORT", help="Flower's own, on loopback only")
    parser.add_argument("--state", type=Path, default=Path("server-state"), metavar="DIR", help="Flower's database")


def _server(options: Any) -> None:
    from hardy.flower.certificates import load_keys
    from hardy.flower.deployment import start_server, until_stopped

    keys = load_keys(options.keys, "server")
    made = start_server(
        keys,
        options.state,
        address=_address(options.address, "--address"),
        control=options.control,
        options=["--database", str((options.state / "superlink.db").absolute())],
    )
    with until_stopped(made.process):
        print(f"nodes connect to {options.address}; Flower listens on 127.0.0.1:{options.control}", flush=True)


def _declare_node(parser: ArgumentParser) -> None:
    parser.add_argument("keys", type=Path, help="this site's folder `node-N` of `hardy deploy certificates`")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as data=/data/ward.npz domain=ward-a"
    )
    parser.add_argument("--server", required=True, metavar="HOST:PORT")
    parser.add_argument(
        "--app", type=Path, action="append", required=True, help="hardy-app.fab that the site agrees to"
    )
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="private tensors and the audit log")


def _node(options: Any) -> None:
    from hardy.flower.app_folder import describe_app, read_app
    from hardy.flower.certificates import load_keys
    from hardy.flower.deployment import start_node, until_stopped
    from hardy.flower.settings import read_settings

    keys = load_keys(options.keys, "node")
    settings = read_settings(options.overrides)
    for app in options.app:
        print(describe_app(app).partition("\n\n")[0], flush=True)
    made = start_node(
        keys,
        _address(options.server, "--server"),
        options.state,
        apps=[read_app(app)[0] for app in options.app],
        settings=settings,
    )
    with until_stopped(made.process):
        print(f"client {keys.number}; audit log: {options.state / 'audit.jsonl'}", flush=True)
    if made.fork_server is not None:
        made.fork_server.stop()


def _address(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise HardyError(f"{option} is {text!r}; it must be HOST:PORT, such as server.example.org:9092.")
    return host.strip("[]"), int(port)


def _declare_run(parser: ArgumentParser) -> None:
    parser.add_argument("app", type=Path, help="the folder that `hardy deploy app` has written")
    quiet_option(parser)
    tensorboard_option(parser)


def _run(options: Any) -> None:
    from hardy.cli.tables import finish_far
    from hardy.flower.local import submit_app

    finish_far(submit_app(options.app, quiet=options.quiet), options)


COMMAND = Command(
    name="deploy",
    words="an experiment on several machines, over Flower",
    commands=(
        Command(
            name="certificates",
            words="keys and certificates of all parties, a folder for each",
            declare=_declare_certificates,
            call=_certificates,
        ),
        Command(
            name="app", words="the app of an experiment, for the server and the sites", declare=_declare_app, call=_app
        ),
        Command(name="show", words="what a site agrees to with an app", declare=_declare_show, call=_show),
        Command(
            name="server", words="start the server; it runs until it is stopped", declare=_declare_server, call=_server
        ),
        Command(
            name="node", words="start a site's node; it runs until it is stopped", declare=_declare_node, call=_node
        ),
        Command(name="run", words="run an app, on the server's machine", declare=_declare_run, call=_run),
    ),
)
