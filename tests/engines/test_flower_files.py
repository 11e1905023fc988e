"""Keys and app folders for a deployment, and what is refused before anything starts."""

import datetime
import shutil
import stat
import time
import tomllib
from types import SimpleNamespace

import pytest

from hardy import config
from hardy.cli import main
from hardy.errors import HardyError

pytest.importorskip("flwr", reason="the flower extra is not installed")

from cryptography import x509

from hardy.flower import local
from hardy.flower.app_folder import BUNDLE, build_app, describe_app, read_app
from hardy.flower.apps import note, outcome
from hardy.flower.certificates import certificates, load_keys
from hardy.flower.settings import read_settings


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployment") / "keys"
    certificates(folder, hosts=["server.example.org", "10.0.0.5"], nodes=2)
    return folder


def test_each_party_gets_one_folder_that_is_whole(made):
    assert sorted(path.name for path in made.iterdir()) == ["node-0", "node-1", "server"]
    ca, server, *nodes = (
        x509.load_pem_x509_certificate((made / name).read_bytes())
        for name in ("server/ca.pem", "server/server.pem", "node-0/node.pem", "node-1/node.pem")
    )
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example.org"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5"]
    usage = [c.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value for c in (server, *nodes)]
    assert [list(found) for found in usage] == [
        [x509.ExtendedKeyUsageOID.SERVER_AUTH],
        [x509.ExtendedKeyUsageOID.CLIENT_AUTH],
        [x509.ExtendedKeyUsageOID.CLIENT_AUTH],
    ]  # a node cannot pose as the server, nor the server as a node
    for certificate in (server, *nodes):
        certificate.verify_directly_issued_by(ca)
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.rglob("*.key")} == {0o600}
    assert len({path.read_bytes() for path in made.rglob("*.key")}) == 3 and not list(made.rglob("ca.key"))
    assert load_keys(made / "node-1", "node").number == 1
    assert sorted(load_keys(made / "server", "server").admitted().values()) == [0, 1]
    with pytest.raises(HardyError, match="already holds keys"):
        certificates(made, hosts=["localhost"], nodes=1)


def test_keys_that_cannot_work_are_refused_in_words(made, tmp_path):
    now = datetime.datetime.now(datetime.UTC)
    with pytest.raises(HardyError, match=r"expired on .* Make new ones with `hardy deploy certificates`"):
        load_keys(made / "node-0", "node", now + datetime.timedelta(days=366))
    with pytest.raises(HardyError, match=r"is valid from .* Set the clock"):
        load_keys(made / "server", "server", now - datetime.timedelta(days=1))
    with pytest.raises(HardyError, match=r"node-0 lacks server\.pem"):
        load_keys(made / "node-0", "server")
    mixed = shutil.copytree(made / "node-0", tmp_path / "mixed")
    shutil.copy(made / "node-1" / "node.key", mixed)
    with pytest.raises(HardyError, match=r"does not belong to node\.pem"):
        load_keys(mixed, "node")
    certificates(tmp_path / "other", hosts=["localhost"], nodes=1)
    shutil.copy(tmp_path / "other" / "node-0" / "ca.pem", mixed)
    with pytest.raises(HardyError, match="is not signed by"):
        load_keys(mixed, "node")
    (mixed / "node.key").chmod(0o640)
    with pytest.raises(HardyError, match=r"can be read by others \(mode 640\); `chmod 600"):
        load_keys(mixed, "node")


def test_old_names_say_the_new_ones(capsys, tmp_path):
    for words in (["certificates", str(tmp_path), "--nodes", "2"], ["app", "demo", str(tmp_path)], []):
        assert main(["flower", *words]) == 2
        assert "is now `hardy deploy`" in capsys.readouterr().err


def test_an_app_holds_the_experiment_and_turns_telemetry_off(tmp_path, capsys):
    folder = tmp_path / "app"
    words = ["deploy", "app", "demo", str(folder), "rounds=3", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    project = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert project["components"] == {"serverapp": "hardy_app.app:server", "clientapp": "hardy_app.app:client"}
    assert project["config"]["out"] == str(tmp_path / "run")
    assert config.read(str(folder / "hardy_app" / "experiment.toml")) == config.read("demo", ["rounds=3"])
    link = tomllib.loads((folder / ".flwr" / "config.toml").read_text())["superlink"]["hardy"]
    assert link == {"address": "127.0.0.1:9093", "insecure": True}
    assert "export FLWR_TELEMETRY_ENABLED=0" in (folder / "environment").read_text()
    name, texts = read_app(folder / BUNDLE)
    assert name in capsys.readouterr().out and build_app(folder) == name  # the same bytes each time
    assert "rounds = 3" in texts["hardy_app/experiment.toml"]
    assert main(words) == 2  # never overwritten


def test_a_site_sees_what_it_agrees_to(tmp_path):
    main(["deploy", "app", "demo", str(tmp_path / "app"), "--out", str(tmp_path / "run")])
    assert "Hardy's own app, unchanged" in describe_app(tmp_path / "app")
    (tmp_path / "app" / "hardy_app" / "more.py").write_text("import os")
    build_app(tmp_path / "app")
    assert "IT BRINGS CODE OF ITS OWN" in describe_app(tmp_path / "app")
    toml = tmp_path / "app" / "hardy_app" / "experiment.toml"
    toml.write_text(toml.read_text().replace('"tiny_cnn"', '"my_nets:resnet"'))
    build_app(tmp_path / "app")
    assert "it needs code that it does not bring: my_nets\n" in describe_app(tmp_path / "app")
    with pytest.raises(HardyError, match="is no app"):
        describe_app(tmp_path / "app" / "pyproject.toml")


def test_a_site_is_told_what_to_do_about_code_that_the_experiment_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HARDY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import hardy\n\n\ndef mine():\n    return hardy.Method(name='mine')\n")
    (tmp_path / "parts.py").write_text("")
    words = ["deploy", "app", "demo", "app", "method=mine.py:mine", "--import", "parts.py", "--out", "run"]
    assert main(words) == 0
    told = describe_app(tmp_path / "app").partition("\n\n")[0]
    assert f"it needs code that it does not bring: {tmp_path}/parts.py, {tmp_path}/mine.py\n" in told
    assert told.endswith("hardy deploy node ... allow_import=parts.py,mine.py")
    assert read_settings(["allow_import=parts.py, mine.py,mypackage.nets"]) == {
        "allow_import": f"{tmp_path}/parts.py,{tmp_path}/mine.py,mypackage.nets"  # a node works elsewhere
    }
    with pytest.raises(HardyError, match=r"allow_import names .*/gone\.py, which is not there\. Give the path of this"):
        read_settings(["allow_import=gone.py"])


def test_settings_of_a_node_are_checked():
    assert read_settings(["data=/data/a.npz", "classes=10", "kind=AT"]) == {
        "data": "/data/a.npz",
        "classes": 10,
        "kind": "AT",
    }
    with pytest.raises(HardyError, match=r"unknown setting of a node 'clases'\. Did you mean 'classes'"):
        read_settings(["clases=10"])
    with pytest.raises(HardyError, match="it must be one word or one number"):
        read_settings(["data=[1]"])


def test_a_question_that_is_not_answered_does_not_end_a_run(tmp_path, monkeypatch):
    """On a busy machine Flower's command line takes minutes; a server that is gone never answers."""
    monkeypatch.setattr(local, "_LOOK", 0.0)
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
    asked = []

    def status():
        asked.append(len(asked))
        if len(asked) == 4:
            note(tmp_path, run="7", error=None)
        if len(asked) in (1, 2, 4):
            raise HardyError("flwr list has not answered")
        return "running"

    local.follow(tmp_path, "7", 1, status=status)
    asked.clear()

    def unanswered():
        asked.append(0)
        raise HardyError("flwr list has not answered")

    with pytest.raises(HardyError, match="has not answered"):
        local.follow(tmp_path, "8", 1, status=unanswered)
    assert len(asked) == 3
    (tmp_path / ".outcome.json").write_text("[" * 100_000)
    assert outcome(tmp_path, "7") is None
