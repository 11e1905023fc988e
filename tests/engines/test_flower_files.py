"""Keys and app folders for a deployment."""

import stat
import tomllib

import pytest

from hardy import config
from hardy.cli import main
from hardy.errors import HardyError

pytest.importorskip("flwr", reason="the flower extra is not installed")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key

from hardy.flower.certificates import certificates


def test_certificates_fit_together_and_keys_are_kept_from_others(tmp_path):
    keys = tmp_path / "keys"
    assert main(["flower", "certificates", str(keys), "--hosts", "server.example.org,10.0.0.5", "--nodes", "2"]) == 0
    ca, server = (x509.load_pem_x509_certificate((keys / name).read_bytes()) for name in ("ca.pem", "server.pem"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example.org"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5"]
    assert load_pem_private_key((keys / "server.key").read_bytes(), None).public_key() == server.public_key()
    for number in range(2):
        private = load_ssh_private_key((keys / f"node-{number}.key").read_bytes(), None)
        assert private.public_key() == load_ssh_public_key((keys / f"node-{number}.pub").read_bytes())
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.glob("*.key")} == {0o600}
    with pytest.raises(HardyError, match="already holds keys"):
        certificates(keys, hosts=["localhost"], nodes=1)


def test_an_app_holds_the_experiment_and_turns_telemetry_off(tmp_path):
    folder = tmp_path / "app"
    words = ["flower", "app", "demo", str(folder), "rounds=3", "--superlink", "localhost:9092"]
    assert main([*words, "--ca", str(tmp_path / "ca.pem"), "--out", str(tmp_path / "run")]) == 0
    project = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert project["components"] == {"serverapp": "hardy_app.app:server", "clientapp": "hardy_app.app:client"}
    assert project["config"]["out"] == str(tmp_path / "run")
    assert config.read(str(folder / "hardy_app" / "experiment.toml")) == config.read("demo", ["rounds=3"])
    assert tomllib.loads((folder / ".flwr" / "config.toml").read_text())["superlink"]["hardy"] == {
        "address": "localhost:9092",
        "root-certificates": str(tmp_path / "ca.pem"),
    }
    assert "export FLWR_TELEMETRY_ENABLED=0" in (folder / "environment").read_text()
    assert main([*words, "--ca", "ca.pem", "--out", "run"]) == 2
