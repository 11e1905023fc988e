"""A stranger gets nowhere: against a real SuperLink behind its proxy, and real SuperNodes."""

import contextlib
import datetime
import http.client
import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hardy import config
from hardy.errors import HardyError

pytest.importorskip("flwr", reason="the flower extra is not installed")

from flwr.proto.fleet_pb2 import PushMessagesRequest, RegisterNodeFleetRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node

from hardy.flower import proxy as proxies
from hardy.flower.audit import Audit
from hardy.flower.certificates import Keys, certificates, load_keys, site_secret
from hardy.flower.deployment import check_connection
from hardy.flower.local import ask_flower, site
from hardy.flower.loopback import same_account
from hardy.flower.processes import descendants
from hardy.flower.proxy import NodeProxy, Refused, ServerProxy

pytestmark = pytest.mark.timeout(600)
PROTOBUF = {"content-type": "application/protobuf", "accept": "application/protobuf"}
MINE = "a secret that only the site's own state folder holds"
CONTROL = ("/v1/control/start-run", "/v1/control/list-runs", "/v1/control/register-node", "/v1/control/list-nodes")
RUNTIME = ("/v1/runtime/acquire-task", "/v1/runtime/pull-task-input", "/docs", "/openapi.json", "/v1/responses")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("closed")
    with site(folder) as made:
        made.prepare(config.Experiment(), folder / "run", 2)
        made.superlink()
        certificates(folder / "strange", hosts=["127.0.0.1"], nodes=1)
        yield made


def node_keys(place, number=0):
    return load_keys(place.folder / "keys" / f"node-{number}", "node")


@contextlib.contextmanager
def nodes_end(place, keys, agreed=(), audit=None, secret=MINE):
    made = NodeProxy(keys, ("127.0.0.1", place.port), agreed, audit or Audit(None), secret)
    try:
        yield made
    finally:
        made.server_close()


def ask(place, path, context, body=b"", source="127.0.0.1", method="POST", secret=MINE):
    """The status of an answer, or the error that there was none."""
    connection = http.client.HTTPSConnection("127.0.0.1", place.port, timeout=20, context=context)
    connection.source_address = (source, 0)
    with contextlib.closing(connection):
        try:
            connection.request(method, path, body, {**PROTOBUF, proxies.SECRET: secret})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__


def said(place):
    return (place.folder / "proxies.log").read_text()


def with_ca_only(place):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(place.folder / "keys" / "node-0" / "ca.pem")
    return context


def test_with_nothing_or_the_authoritys_certificate_alone_nobody_gets_an_answer(place):
    nothing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nothing.check_hostname, nothing.verify_mode = False, ssl.CERT_NONE
    register = RegisterNodeFleetRequest(public_key=b"x").SerializeToString()
    for context in (nothing, with_ca_only(place)):
        for path in (*sorted(proxies.FLEET), *CONTROL, *RUNTIME, proxies.CLOCK):
            assert isinstance(ask(place, path, context, register), str), path
    with socket.create_connection(("127.0.0.1", place.port), 20) as plain:
        plain.sendall(b"POST /v1/control/list-runs HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        plain.settimeout(20)
        with contextlib.suppress(OSError):
            assert not plain.recv(1000).startswith(b"HTTP")
    assert "refused: no connection with 127.0.0.1" in said(place)


def test_another_authoritys_certificate_is_worth_nothing(place):
    stranger = load_keys(place.folder / "strange" / "node-0", "node").context()
    stranger.load_verify_locations(place.folder / "keys" / "node-0" / "ca.pem")
    assert isinstance(ask(place, "/v1/fleet/register-node", stranger), str)
    stranger = load_keys(place.folder / "strange" / "node-0", "node")
    with (
        nodes_end(place, stranger) as end,
        pytest.raises(HardyError, match=r"no connection to 127.0.0.1:.* certificate"),
    ):
        check_connection(end, end.upstream)


def test_a_node_reaches_what_nodes_need_and_no_control(place):
    context = node_keys(place).context()
    assert ask(place, proxies.CLOCK, context) == 200
    assert ask(place, "/v1/fleet/pull-messages", context) == 401  # Flower's own answer: no signature
    for path in (*CONTROL, *RUNTIME, "/v1/fleet/../control/list-runs", "//v1/control/list-runs"):
        assert ask(place, path, context) == 403, path
        assert ask(place, path, context, method="GET") == 501, path
    assert "/v1/control/start-run is nothing a node needs" in said(place)
    huge = ask(place, "/v1/fleet/push-object", context, b"x" * (proxies.LARGEST + 1))
    assert huge == 413 or isinstance(huge, str)  # not read to its end


def test_a_node_cannot_speak_for_another(place):
    forged = PushMessagesRequest(node=Node(node_id=1), messages_list=[Message(metadata=Metadata(src_node_id=2))])
    assert ask(place, "/v1/fleet/push-messages", node_keys(place).context(), forged.SerializeToString()) == 403
    assert "node-0 sends a message in another's name" in said(place)


def test_stolen_keys_are_of_no_use_without_the_sites_own_secret(place, tmp_path):
    """The thief has the whole folder node-1, the address and the experiment; the site may be away or not."""
    context = node_keys(place, 1).context()
    assert ask(place, proxies.CLOCK, context) == 200  # the site was here before
    for secret in ("", "short", "x" * 64):
        for path in (*sorted(proxies.FLEET), proxies.CLOCK):
            assert ask(place, path, context, secret=secret) == 403, path
    assert "node-1 shows no secret of its site" in said(place)
    assert "the certificate of node-1 belongs to a site with another --state folder" in said(place)
    with (
        nodes_end(place, node_keys(place, 1), secret=site_secret(tmp_path / "site-1.key")) as end,
        pytest.raises(
            HardyError, match=r"does not admit this node: the certificate of node-1 .*takes node-1 out of sites"
        ),
    ):
        check_connection(end, end.upstream)
    known = place.folder / "server" / "sites.json"
    kept = json.loads(known.read_text())
    assert MINE not in known.read_text() and stat.S_IMODE((tmp_path / "site-1.key").stat().st_mode) == 0o600
    known.write_text(json.dumps({name: pair for name, pair in kept.items() if name != "node-1"}))
    try:
        assert ask(place, proxies.CLOCK, context, secret="the site lost its state folder, and has another") == 200
        assert ask(place, proxies.CLOCK, context) == 403
    finally:
        known.write_text(json.dumps(kept))
    assert ask(place, proxies.CLOCK, context) == 200


def test_a_whole_site_that_was_copied_is_shut_out_while_the_site_is_there_or_once_it_is_struck_off(place):
    context = node_keys(place, 1).context()
    assert ask(place, proxies.CLOCK, context) == 200
    for path in ("/v1/fleet/register-node", "/v1/fleet/pull-messages", proxies.CLOCK):
        assert ask(place, path, context, source="127.0.0.2") == 403
    assert "the certificate of node-1 is in use from 127.0.0.1" in said(place)
    listed = place.folder / "keys" / "server" / "node-1.pem"
    kept = listed.read_bytes()
    listed.unlink()
    try:
        keys = node_keys(place, 1)
        with nodes_end(place, keys) as end, pytest.raises(HardyError, match="does not admit this node: a certificate"):
            check_connection(end, end.upstream)
    finally:
        listed.write_bytes(kept)
    key_alone = with_ca_only(place)  # node.key without node.pem
    with pytest.raises(ssl.SSLError):
        key_alone.load_cert_chain(place.folder / "keys" / "node-0" / "node.pem", keys.file("key"))


def test_the_secret_goes_no_further_than_the_servers_end(place, monkeypatch):
    """It is shown to the server's end on every request, and Flower does not see it."""
    passed = []
    monkeypatch.setattr(http.client.HTTPConnection, "request", lambda *words: passed.append(words[-1]))
    monkeypatch.setattr(
        http.client.HTTPConnection, "getresponse", lambda self: SimpleNamespace(status=1, getheaders=dict, read=bytes)
    )
    question = proxies.HttpRequest(
        "/v1/fleet/get-run", {"Hardy-Site": "forged", "a": "b"}, b"", proxies.Peer(None, "", 1)
    )
    with nodes_end(place, node_keys(place)) as end:
        end.forward(question)
    place.proxies["superlink"].forward(question)
    assert passed == [{"a": "b", proxies.SECRET: MINE}, {"a": "b"}]


@pytest.mark.parametrize("off", [-9, 2], ids=["expired", "not yet"])
def test_certificates_out_of_their_time_make_no_connection(place, tmp_path, monkeypatch, off):
    """Also those of a peer that does not look at its own."""
    then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=off)
    clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda zone: then), timedelta=datetime.timedelta, UTC=None)
    with monkeypatch.context() as patch:
        patch.setattr("hardy.flower.certificates.datetime", clock)
        certificates(tmp_path / "keys", hosts=["127.0.0.1"], nodes=1, days=7)
    with pytest.raises(HardyError, match="expired on" if off < 0 else "is valid from"):
        load_keys(tmp_path / "keys" / "server", "server")
    keys = [
        Keys(tmp_path / "keys" / party, party.partition("-")[0], number)
        for party, number in (("server", None), ("node-0", 0))
    ]
    with ServerProxy(("127.0.0.1", 0), keys[0], place.control, tmp_path / "nodes.json") as server:
        port = server.start()
        with nodes_end(SimpleNamespace(port=port), keys[1]) as end, pytest.raises(HardyError, match="certificate"):
            check_connection(end, end.upstream)
        context = keys[1].context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        assert isinstance(ask(SimpleNamespace(port=port), proxies.CLOCK, context), str)  # the server looks as well
        server.shutdown()


def test_clocks_that_differ_are_refused(place, monkeypatch):
    with nodes_end(place, node_keys(place)) as end:
        check_connection(end, end.upstream)
        monkeypatch.setattr(NodeProxy, "clock", lambda self: -42.0)
        with pytest.raises(HardyError, match=r"clock is 42 s behind the server's; at most 5 s are allowed\. Synchron"):
            check_connection(end, end.upstream)


def test_an_answer_that_takes_its_time_is_no_wrong_clock():
    """On a busy machine it may take more than the seconds by which clocks may differ."""
    assert proxies.clock_difference(100.0, sent=80.0, came=120.0) == 0
    assert proxies.clock_difference(100.0, sent=110.0, came=130.0) == 10
    assert proxies.clock_difference(100.0, sent=70.0, came=90.0) == -10


def test_flower_itself_listens_on_loopback_and_answers_one_account(place):
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", place.control), 5)  # any address but 127.0.0.1
    ask_flower(place.environment, "list", "hardy")  # the operator's own account
    code = (
        f"import http.client as h; c = h.HTTPConnection('127.0.0.1', {place.control}); "
        "c.request('POST', '/v1/control/list-runs', b''); print(c.getresponse().status)"
    )
    if os.getuid() == 0 and sys.platform == "linux":  # only root can start a process of another account
        python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
        done = subprocess.run([python, "-c", code], user=65534, capture_output=True, text=True, cwd="/", check=False)
        assert done.stdout.strip() == "403", done.stderr


def test_the_nodes_end_answers_one_account(monkeypatch):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        with socket.create_connection(one.getsockname()) as other:
            ends = other.getsockname(), one.getsockname()
            assert same_account(*ends) and not same_account(ends[0], ("127.0.0.1", 1))
            with monkeypatch.context() as patch:
                patch.setattr(os, "getuid", lambda: 12345)
                assert not same_account(*ends)
        assert not same_account(*ends)  # closed by its owner: it is nobody's


def test_every_process_has_telemetry_and_look_ups_off(place):
    family = [place.processes["superlink"].pid, *descendants(place.processes["superlink"].pid)]
    assert len(family) > 1
    for process in family:
        with contextlib.suppress(FileNotFoundError):
            words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            for setting in (b"FLWR_TELEMETRY_ENABLED=0", b"FLWR_DISABLE_UPDATE_CHECK=1", b"ORT_DISABLE_TELEMETRY=1"):
                assert setting in words
    code = """
import urllib.request, requests
def never(*words, **options): raise SystemExit("a look-up")
urllib.request.urlopen = requests.post = requests.Session.request = never
from flwr.supercore.telemetry import EventType, event
from flwr.supercore.update_check import warn_if_flwr_update_available
future = event(EventType.RUN_SUPERLINK_ENTER)
warn_if_flwr_update_available(process_name="flower-superlink")
print("quiet", future.result() if future else "")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=place.environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("quiet") and "look-up" not in done.stdout + done.stderr


STRANGE = """
import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()
HERE = Path("{folder}")
(HERE / "imported").open("a").write("x")  # by the server, and by nobody else


@server.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    content = RecordDict({{"asked": ConfigRecord({{"what": "pixels"}})}})
    replies = list(grid.send_and_receive([Message(content, node, "query") for node in nodes], timeout=300))
    said = [reply.error.reason if reply.has_error() else "content" for reply in replies]
    (HERE / "draft").write_text(json.dumps(said))
    (HERE / "draft").rename(HERE / "replies")


@client.query()
def steal(message, context):
    (HERE / "ran").write_text("on the site")
    return Message(RecordDict({{"pixels": ConfigRecord({{"all": "of them"}})}}), reply_to=message)
"""


@pytest.mark.slow
def test_an_app_that_the_site_has_not_agreed_to_never_runs_there(tmp_path):
    """Even the server's operator, who may start any run, gets an error from the site, and the site goes on."""
    with site(tmp_path / "flower") as place:
        place.prepare(config.Experiment(), tmp_path / "run", 1)
        place.superlink()
        place.supernode(0)
        (place.folder / "app" / "hardy_app" / "app.py").write_text(STRANGE.format(folder=tmp_path))
        place.submit()
        end = time.monotonic() + 300
        while not (tmp_path / "replies").exists():
            assert time.monotonic() < end, place.log("node-0")
            time.sleep(0.5)
        assert json.loads((tmp_path / "replies").read_text()) == ["The FAB could not be verified."]
        assert place.processes["node-0"].poll() is None
        lines = [json.loads(line) for line in (place.folder / "state" / "audit.jsonl").read_text().splitlines()]
    assert (tmp_path / "imported").read_text() == "x" and not (tmp_path / "ran").exists()
    assert [line["event"] for line in lines] == ["start", "refused"]
    assert "is not one that this site has agreed to" in lines[1]["why"]
    assert not list((place.folder / "state").rglob("hardy_app"))  # it was not even unpacked


def test_an_agreed_app_is_signed_and_another_is_emptied(place, tmp_path):
    import hashlib

    from flwr.proto.fab_pb2 import Fab, GetFabRequest, GetFabResponse
    from flwr.supercore.fab import Fab as Found
    from flwr.supernode.start_client_internal import _verify_fab

    audit = Audit(tmp_path / "audit.jsonl")
    with nodes_end(place, node_keys(place), [hashlib.sha256(b"agreed").hexdigest()], audit) as end:
        pass  # it need not listen
    asked = proxies.HttpRequest(
        "/v1/fleet/get-fab", {}, GetFabRequest(run_id=7).SerializeToString(), proxies.Peer(None, "127.0.0.1", 1)
    )
    trusted = {"site": json.loads(end.trusted().removeprefix("site: "))}

    def through(content):
        came = GetFabResponse(fab=Fab(content=content, verifications={"valid_license": "x", "site": "forged"}))
        reply = end.inspect(asked, proxies.HttpReply(200, {}, came.SerializeToString()))
        return GetFabResponse.FromString(reply.body).fab

    good, bad = through(b"agreed"), through(b"another")
    assert _verify_fab(Found(good.hash_str, good.content, dict(good.verifications)), trusted)
    assert bad.content == b"" and not bad.verifications
    forged = Found("", b"another", dict(good.verifications))  # somebody else's signature on it
    assert not _verify_fab(forged, trusted)
    assert [json.loads(line)["event"] for line in audit.path.read_text().splitlines()] == ["app", "refused"]
    with pytest.raises(Refused, match="flwr-agentapp, no federated run"):
        from flwr.proto.run_pb2 import GetRunResponse, Run

        other = GetRunResponse(run=Run(run_id=7, primary_task_type="flwr-agentapp")).SerializeToString()
        end.inspect(proxies.HttpRequest("/v1/fleet/get-run", {}, b"", asked.peer), proxies.HttpReply(200, {}, other))


def pulled(place, messages):
    """What the SuperLink would answer: nothing, until there is a message."""
    from flwr.proto.fleet_pb2 import PullMessagesResponse

    found = [Message(metadata=Metadata(message_id="m"))] if messages else []
    return proxies.HttpReply(200, {}, PullMessagesResponse(messages_list=found).SerializeToString())


def waiting(place, monkeypatch, there, secret=MINE):
    """A node's question for messages, asked in a thread; when it was answered."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest

    monkeypatch.setattr(ServerProxy, "forward", lambda self, question: pulled(place, there.is_set()))
    body, answered = PullMessagesRequest(node=Node(node_id=77)).SerializeToString(), []

    def asks():
        status = ask(place, proxies.PULL, node_keys(place).context(), body, secret=secret)
        answered.append((status, time.monotonic()))

    thread = threading.Thread(target=asks, daemon=True)
    thread.start()
    return thread, answered


def test_a_node_is_told_at_once_when_there_is_a_message(place, monkeypatch):
    """Its question is held; whoever has sent a message rings."""
    there, end = threading.Event(), place.proxies["superlink"]
    thread, answered = waiting(place, monkeypatch, there)
    thread.join(1.5)
    assert thread.is_alive(), answered
    there.set()
    thread.join(0.5)
    assert thread.is_alive()  # nobody has rung
    proxies.ring(end.nodes, 78)
    thread.join(0.5)
    assert thread.is_alive()  # that was another's bell
    rung = time.monotonic()
    proxies.ring(end.nodes, 77)
    thread.join(10)
    ((status, when),) = answered
    assert status == 200 and when - rung < 5


def test_what_a_node_has_sent_is_heard(place, monkeypatch):
    end, nodes = place.proxies["superlink"], place.folder / "server" / "nodes.json"
    monkeypatch.setattr(ServerProxy, "forward", lambda self, question: proxies.HttpReply(answer, {}, b""))
    monkeypatch.setitem(end._online, "0", 91)
    for answer, heard in ((500, False), (200, True)):
        assert ask(place, "/v1/fleet/push-object", node_keys(place).context()) == answer
        assert bool(proxies.bell(nodes, "from-91")) is heard


def test_a_question_is_not_held_for_good_nor_beside_a_newer_one(place, monkeypatch):
    monkeypatch.setattr(proxies, "HOLD", 0.3)
    thread, answered = waiting(place, monkeypatch, threading.Event())
    thread.join(20)
    assert answered[0][0] == 200
    monkeypatch.setattr(proxies, "HOLD", 60.0)
    first, answered = waiting(place, monkeypatch, threading.Event())
    time.sleep(1)
    monkeypatch.setattr(proxies, "HOLD", 0.3)
    second, _ = waiting(place, monkeypatch, threading.Event())
    first.join(20)
    second.join(20)
    assert answered[0][0] == 200  # a connection that is gone takes no message with it


def test_strangers_questions_are_not_held(place, monkeypatch):
    began = time.monotonic()
    thread, answered = waiting(place, monkeypatch, threading.Event(), secret="x" * 64)
    thread.join(20)
    assert answered[0][0] == 403 and answered[0][1] - began < proxies.HOLD


def test_connections_are_kept_and_made_anew_when_the_other_end_has_gone(place):
    with nodes_end(place, node_keys(place)) as end:
        question = proxies.HttpRequest(proxies.CLOCK, {}, b"", proxies.Peer(None, "", 1))
        ports = []
        for turn in range(4):
            assert end.forward(question).status == 200
            ports.append(end._own.connection.sock.getsockname()[1])
            if turn == 1:
                end._own.connection.sock.shutdown(socket.SHUT_RDWR)
        end.hang_up()
    assert ports[0] == ports[1] != ports[2] == ports[3]
