"""What a deployment needs on disk: certificates, keys, and the small app folder that `flwr run` sends out."""

import datetime
import ipaddress
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardy.config import Experiment, dump
from hardy.core.files import disk, write_atomic
from hardy.errors import HardyError
from hardy.flower import ENVIRONMENT

CONNECTION = "hardy"
"""the SuperLink's name in Flower's own configuration"""
_APP = '''"""A Flower app that runs experiment.toml with Hardy; see docs/flower.md of Hardy."""

from pathlib import Path

from hardy.flower.apps import client_app, server_app

server = server_app(Path(__file__).with_name("experiment.toml"))
client = client_app()
'''


def require_flower() -> None:
    """An error with the remedy where Flower is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise HardyError(
            f"engine flower needs Flower ({error}); install it with `pip install 'hardy-fl[flower]'`."
        ) from None


def certificates(folder: Path, *, hosts: Sequence[str], nodes: int, days: int = 365) -> None:
    """Writes ca.pem, server.pem and server.key for the SuperLink's hosts, and node-N.key and node-N.pub for each node.

    The authority's own key is used once and not kept. Existing files are never overwritten.
    """
    require_flower()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    if nodes < 1:
        raise HardyError(f"--nodes is {nodes}; it must be 1 or more.")
    if days < 1:
        raise HardyError(f"--days is {days}; it must be 1 or more.")
    if not hosts or not all(re.fullmatch(r"[A-Za-z0-9.:_*-]+", host) for host in hosts):
        raise HardyError(f"--hosts is {','.join(hosts)!r}; name the SuperLink's hosts: server.example.org,10.0.0.1.")
    if found := sorted(path.name for path in folder.glob("*.key")):
        raise HardyError(f"{folder} already holds keys ({found[0]}, ...); choose another folder.")
    with disk(str(folder)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)

    def signed(subject: str, key: Any, issuer: Any, by: Any, *extensions: Any) -> Any:
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])
        builder = x509.CertificateBuilder(
            issuer_name=issuer or name,
            subject_name=name,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(minutes=5),
            not_valid_after=now + datetime.timedelta(days=days),
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(by, hashes.SHA384())

    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = signed(
        "Hardy federation",
        authority,
        None,
        authority,
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (signs, True),
        (identifier, False),
    )
    names = [_host(host) for host in hosts]
    usage = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH])
    known = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    certificate = signed(
        hosts[0],
        server,
        ca.subject,
        authority,
        (x509.SubjectAlternativeName(names), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (usage, False),
        (known, False),
    )
    write_atomic(folder / "ca.pem", ca.public_bytes(Encoding.PEM))
    write_atomic(folder / "server.pem", certificate.public_bytes(Encoding.PEM))
    _secret(folder / "server.key", server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for number in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        _secret(folder / f"node-{number}.key", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        write_atomic(
            folder / f"node-{number}.pub", key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        )


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _secret(path: Path, content: bytes) -> None:
    with disk(str(path)), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def app(folder: Path, experiment: Experiment, *, superlink: str, authority: Path, out: Path) -> None:
    """Writes a Flower app that runs the experiment, Flower's own configuration, and the settings of its environment."""
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
                    "config": {"out": str(out.absolute()), "experiment": ""},
                }
            }
        },
    }
    home = folder.absolute() / ".flwr"
    link = {"address": superlink, "root-certificates": str(authority.absolute())}
    with disk(str(folder)):
        (folder / "hardy_app").mkdir(parents=True, exist_ok=True)
        home.mkdir(exist_ok=True)
    write_atomic(folder / "pyproject.toml", dump(project).encode() + b"\n")
    write_atomic(folder / "hardy_app" / "__init__.py", b"")
    write_atomic(folder / "hardy_app" / "app.py", _APP.encode())
    write_atomic(folder / "hardy_app" / "experiment.toml", experiment.to_toml().encode() + b"\n")
    flower = {"superlink": {"default": CONNECTION, CONNECTION: link}}
    write_atomic(home / "config.toml", dump(flower).encode() + b"\n")
    settings = {**ENVIRONMENT, "FLWR_HOME": str(home)}
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()]
    write_atomic(folder / "environment", "".join(lines).encode())
