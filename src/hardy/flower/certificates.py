"""Keys and certificates of a deployment, one folder for each party, and what is checked before they are used.

The certificate of a node is its identity: it names the client's number. The server lists the certificates it admits.
"""

import datetime
import ipaddress
import os
import re
import secrets
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardy.core.files import disk, write_atomic
from hardy.errors import HardyError

_NODE = re.compile(r"node-(\d+)")


def require_flower() -> None:
    """An error with the remedy where Flower is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise HardyError(
            f"engine flower needs Flower ({error}); install it with `pip install 'hardy-fl[flower]'`."
        ) from None


def certificates(folder: Path, *, hosts: Sequence[str], nodes: int, days: int = 365) -> None:
    """Writes the folder `server` and a folder `node-N` for each node; every party gets its own folder and no other.

    Each holds ca.pem and the party's certificate and key; `server` also holds the certificates of the nodes it admits.
    The authority's own key is used once and not kept. Existing files are never overwritten.
    """
    require_flower()
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    if nodes < 1:
        raise HardyError(f"--nodes is {nodes}; it must be 1 or more.")
    if days < 1:
        raise HardyError(f"--days is {days}; it must be 1 or more.")
    if not hosts or not all(re.fullmatch(r"[A-Za-z0-9.:_*-]+", host) for host in hosts):
        raise HardyError(f"--hosts is {','.join(hosts)!r}; name the server's hosts: server.example.org,10.0.0.1.")
    if (folder / "server").exists():
        raise HardyError(f"{folder} already holds keys (server, ...); choose another folder.")
    authority = _Authority(days)
    ca = authority.certificate.public_bytes(Encoding.PEM)
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    made = {"server": authority.issue(hosts[0], x509.ExtendedKeyUsageOID.SERVER_AUTH, names)}
    for number in range(nodes):
        made[f"node-{number}"] = authority.issue(f"node-{number}", x509.ExtendedKeyUsageOID.CLIENT_AUTH)
    with disk(str(folder)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for party, (certificate, key) in made.items():
        with disk(str(folder / party)):
            (folder / party).mkdir(mode=0o700)
        own = "server" if party == "server" else "node"
        write_atomic(folder / party / "ca.pem", ca)
        write_atomic(folder / party / f"{own}.pem", certificate)
        _write_secret(folder / party / f"{own}.key", key)
        if own == "node":
            write_atomic(folder / "server" / f"{party}.pem", certificate)


class _Authority:
    """Signs the certificates of one deployment, and is gone."""

    def __init__(self, days: int) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        self.key, self.days = ec.generate_private_key(ec.SECP384R1()), days
        self.identifier = x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())
        signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self.name = _common_name("Hardy federation")
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self.certificate = self._sign(self.name, self.key, (constraints, True), (signs, True), (self.identifier, False))

    def issue(self, name: str, usage: Any, *more: Any) -> tuple[bytes, bytes]:
        """A certificate and its key, for one use: as a server, or as a client."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        key = ec.generate_private_key(ec.SECP384R1())
        made = self._sign(
            _common_name(name),
            key,
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.ExtendedKeyUsage([usage]), True),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self.identifier), False),
            *((extension, False) for extension in more),
        )
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return made.public_bytes(Encoding.PEM), secret

    def _sign(self, subject: Any, key: Any, *extensions: Any) -> Any:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            issuer_name=self.name,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(minutes=5),
            not_valid_after=now + datetime.timedelta(days=self.days),
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(self.key, hashes.SHA384())


@dataclass(frozen=True)
class Keys:
    """The folder of one party, checked."""

    folder: Path
    role: str
    """server or node"""
    number: int | None
    """of a node: its client's number"""

    def file(self, suffix: str) -> str:
        return str(self.folder / f"{self.role}.{suffix}")

    def context(self) -> ssl.SSLContext:
        """TLS 1.3 in which both sides show a certificate of this deployment."""
        server = self.role == "server"
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(str(self.folder / "ca.pem"))
        made.load_cert_chain(self.file("pem"), self.file("key"))
        return made

    def admitted(self) -> dict[bytes, int]:
        """Certificate -> number, of the nodes the server admits now. Without its file a node is shut out."""
        found = {}
        for path in self.folder.glob("node-*.pem"):
            if match := _NODE.fullmatch(path.stem):
                found[ssl.PEM_cert_to_DER_cert(path.read_text("ascii"))] = int(match[1])
        return found


def load_keys(folder: Path, role: str, now: datetime.datetime | None = None) -> Keys:
    """A party's keys; an error if they are incomplete, readable by others, not valid now, or do not fit together."""
    require_flower()
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    now = now or datetime.datetime.now(datetime.UTC)
    for name in ("ca.pem", f"{role}.pem", f"{role}.key"):
        if not (folder / name).is_file():
            raise HardyError(
                f"{folder} lacks {name}; name the folder of this party that `hardy deploy certificates` has written."
            )
    key = folder / f"{role}.key"
    if (mode := stat.S_IMODE(key.stat().st_mode)) & 0o077:
        raise HardyError(f"{key} can be read by others (mode {mode:o}); `chmod 600 {key}`, and think of it as known.")
    ca, own = (x509.load_pem_x509_certificate((folder / n).read_bytes()) for n in ("ca.pem", f"{role}.pem"))
    for name, found in (("ca.pem", ca), (f"{role}.pem", own)):
        if now < found.not_valid_before_utc:
            raise HardyError(
                f"{folder / name} is valid from {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on; this machine's "
                f"clock says {now:%Y-%m-%d %H:%M}. Set the clock."
            )
        if now > found.not_valid_after_utc:
            raise HardyError(
                f"{folder / name} expired on {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; this machine's clock says "
                f"{now:%Y-%m-%d %H:%M}. Make new ones with `hardy deploy certificates`, or set the clock."
            )
    try:
        own.verify_directly_issued_by(ca)
    except Exception:
        raise HardyError(f"{folder / role}.pem is not signed by {folder / 'ca.pem'}; take both from one set.") from None
    if load_pem_private_key(key.read_bytes(), None).public_key() != own.public_key():
        raise HardyError(f"{key} does not belong to {role}.pem; take both from one set.")
    subject = str(own.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)
    match = _NODE.fullmatch(subject)
    if role == "node" and not match:
        raise HardyError(
            f"{folder / 'node.pem'} names {subject!r}, not node-0, node-1, ...; it is no node's certificate."
        )
    return Keys(folder, role, int(match[1]) if match else None)


def _common_name(name: str) -> Any:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def site_secret(path: Path) -> str:
    """What a site shows beside its certificate: made at its first start, and kept in its state folder."""
    if not path.exists():
        _write_secret(path, secrets.token_hex(32).encode())
    with disk(str(path)):
        return path.read_text("ascii")


def _write_secret(path: Path, content: bytes) -> None:
    with disk(str(path)), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
