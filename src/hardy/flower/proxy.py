"""The two ends of the only way between a site and the server.

Flower serves the nodes, the control of runs and the processes of apps on one port, without authentication of whoever
starts runs. So Flower listens on loopback only, on both machines, and what nodes need passes here:

    SuperNode -> NodeProxy  ==== mutual TLS ====  ServerProxy -> SuperLink
"""

import contextlib
import hashlib
import http.client
import json
import logging
import socket
import ssl
import sys
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from hardy.core.files import write_atomic
from hardy.core.json_files import read_json
from hardy.flower.audit import Audit
from hardy.flower.certificates import Keys
from hardy.flower.loopback import same_account

FLEET = {
    f"/v1/fleet/{name}"
    for name in (
        *("register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat"),
        *("pull-messages", "push-messages", "get-run", "get-fab"),
        *("push-object", "pull-object", "confirm-message-received"),
    )
}
"""what a node may ask for; nothing else of Flower passes"""
CLOCK = "/hardy/clock"
"""answered by the server's end itself"""
SECRET = "hardy-site"
"""the header with which a node's end shows the secret of its state folder"""
LARGEST = 64 * 2**20
"""bytes of one request; Flower cuts tensors into pieces of 5 MiB"""
PULL = "/v1/fleet/pull-messages"
HOLD = 10.0
"""seconds for which a node's question is held while there is no message for it; Flower's client waits for 30"""
_LOOK = 0.05
"""seconds between two looks at a bell"""
ALONE = 60.0
"""seconds for which a certificate stays with the address it was last used from"""
_HANDSHAKE = 10.0
_IDLE = 75.0
_HOP = {"connection", "keep-alive", "host", "content-length", "transfer-encoding", "date", "server", SECRET}
_LOG = logging.getLogger("hardy.deploy")


class Peer(NamedTuple):
    """Who is at the other end of a connection."""

    certificate: bytes | None
    address: str
    port: int


class Refused(Exception):
    """A request that goes no further, in words."""


@dataclass(frozen=True)
class HttpRequest:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: bytes
    peer: Peer


class HttpReply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE
    server: "Proxy"

    def setup(self) -> None:
        certificate = None
        if isinstance(self.request, ssl.SSLSocket):  # here, in a thread of its own: who stalls holds up nobody
            self.request.settimeout(_HANDSHAKE)
            self.request.do_handshake()
            certificate = self.request.getpeercert(binary_form=True)
        self.peer = Peer(certificate, *self.client_address[:2])
        super().setup()

    def finish(self) -> None:
        self.server.hang_up()
        super().finish()

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > LARGEST:
            self._answer(HttpReply(413, {}, b""))
            self.close_connection = True
            return
        body = self.rfile.read(int(length))
        self._answer(self.server.answer(HttpRequest(self.path, dict(self.headers.items()), body, self.peer)))

    def _answer(self, reply: HttpReply) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("content-length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, *words: Any) -> None:
        """Heartbeats and polls are not worth a line each."""


class Proxy(ThreadingHTTPServer):
    """Passes on the requests of nodes, and nothing else; each connection has its own thread."""

    daemon_threads = True
    request_queue_size = 128
    shown: Mapping[str, str] = {}
    """headers of its own, on every request that it passes on"""

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.tls, self._own = tls, threading.local()

    def start(self) -> int:
        """Serves from now on, in the background; returns the port."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return int(self.server_address[1])

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        if self.tls:
            connection = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, ssl.SSLError | TimeoutError):
            self.refused(f"no connection with {client_address[0]}: {error}")
        elif not isinstance(error, ConnectionError):
            _LOG.warning("connection with %s: %r", client_address[0], error)

    def refused(self, why: str) -> None:
        _LOG.warning("refused: %s", why)

    def answer(self, question: HttpRequest) -> HttpReply:
        """The upstream's answer, if the request may pass and the answer too."""
        try:
            if question.path not in FLEET:
                raise Refused(f"{question.path} is nothing a node needs")
            self.check(question)
            try:
                reply = self.forward(question)
            except (OSError, http.client.HTTPException) as error:
                _LOG.warning("cannot reach the other end: %s", error)
                return HttpReply(502, {}, b"")  # Flower tries again
            return self.inspect(question, reply)
        except Refused as why:
            self.refused(f"{question.peer.address}: {why}")
            return HttpReply(403, {}, b"")

    def forward(self, question: HttpRequest) -> HttpReply:
        """Over this thread's connection, which is made anew if the other end has closed it meanwhile: a message is many
        requests, and each new connection costs more than what it carries."""
        held = getattr(self._own, "connection", None)
        if held is not None:
            with contextlib.suppress(ConnectionError):
                return self._send(held, question)
        self._own.connection = self.connect()
        return self._send(self._own.connection, question)

    def _send(self, connection: http.client.HTTPConnection, question: HttpRequest) -> HttpReply:
        headers = {name: value for name, value in question.headers.items() if name.lower() not in _HOP}
        try:
            connection.request("POST", question.path, question.body, {**headers, **self.shown})
            came = connection.getresponse()
            return HttpReply(came.status, dict(came.getheaders()), came.read())
        except BaseException:
            self.hang_up()
            raise

    def hang_up(self) -> None:
        """Closes this thread's connection."""
        if (held := getattr(self._own, "connection", None)) is not None:
            held.close()
            self._own.connection = None

    def connect(self) -> http.client.HTTPConnection:
        raise NotImplementedError

    def check(self, question: HttpRequest) -> None:
        """Raises Refused."""

    def inspect(self, question: HttpRequest, reply: HttpReply) -> HttpReply:
        """What goes back, or Refused."""
        return reply


class ServerProxy(Proxy):
    """The server's end: admits listed certificates, each of the site that came with it first and from one address at a
    time, and says which node is whom."""

    def __init__(self, address: tuple[str, int], keys: Keys, superlink: int, nodes: Path) -> None:
        self.keys, self.superlink, self.nodes = keys, superlink, nodes
        self._sites = Sites(nodes.with_name("sites.json"))
        self._seen: dict[int, tuple[str, float]] = {}
        self._online = _remembered_nodes(nodes)
        self._turns: dict[int, object] = {}
        self._lock = threading.Lock()
        write_atomic(nodes, json.dumps(self._online).encode())
        super().__init__(address, keys.context())

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.superlink, timeout=120)

    def answer(self, question: HttpRequest) -> HttpReply:
        if question.path == CLOCK:
            try:
                self.check(question)
            except Refused as why:
                self.refused(f"{question.peer.address}: {why}")
                return HttpReply(403, {}, str(why).encode())
            return HttpReply(200, {}, repr(time.time()).encode())
        if question.path == PULL:
            return self._hold(question)
        return super().answer(question)

    def _hold(self, question: HttpRequest) -> HttpReply:
        """Answers when there is a message, when the node has asked again, or after a while: so a message waits for no
        poll, and an idle node asks seldom. Whoever sends a message rings the bell of its node."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse

        end, turn = time.monotonic() + HOLD, object()
        node = _node_of(PullMessagesRequest, question.body)
        self._turns[node] = turn
        while True:
            rung = bell(self.nodes, node)
            reply = super().answer(question)
            empty = reply.status == 200 and not PullMessagesResponse.FromString(reply.body).messages_list
            while empty and rung == bell(self.nodes, node):
                if time.monotonic() > end or self._turns.get(node) is not turn:
                    return reply
                time.sleep(_LOOK)
            if not empty:
                return reply

    def check(self, question: HttpRequest) -> None:
        number = self._number(question.peer)
        now = time.monotonic()
        with self._lock:
            self._sites.recognise(number, question.peer.certificate or b"", question.headers)
            address, when = self._seen.get(number, (question.peer.address, now))
            if address != question.peer.address and now - when < ALONE:
                raise Refused(f"the certificate of node-{number} is in use from {address}")
            self._seen[number] = question.peer.address, now
        if question.path == "/v1/fleet/push-messages":
            from flwr.proto.fleet_pb2 import PushMessagesRequest

            sent = _parse(PushMessagesRequest, question.body)
            if any(m.metadata.src_node_id != sent.node.node_id for m in sent.messages_list):
                raise Refused(f"node-{number} sends a message in another's name")

    def _number(self, peer: Peer) -> int:
        found = self.keys.admitted().get(peer.certificate or b"")
        if found is None:
            raise Refused("a certificate of ours that is not on the server's list (node-N.pem in its keys)")
        return found

    def inspect(self, question: HttpRequest, reply: HttpReply) -> HttpReply:
        if question.path == "/v1/fleet/activate-node" and reply.status == 200:
            from flwr.proto.fleet_pb2 import ActivateNodeResponse

            number = self._number(question.peer)
            with self._lock:
                self._online[str(number)] = _parse(ActivateNodeResponse, reply.body).node_id
                write_atomic(self.nodes, json.dumps(self._online).encode())
            _LOG.info("node-%d is online from %s", number, question.peer.address)
        if question.path in ("/v1/fleet/push-messages", "/v1/fleet/push-object") and reply.status == 200:
            node = self._online.get(str(self._number(question.peer)), 0)
            ring(self.nodes, f"from-{node}")  # the run looks for a reply only then
        return reply


class Sites:
    """Which site each certificate belongs to: the one that came with it first. A site shows a secret that it has made
    itself and keeps in its state folder, so the keys alone, stolen on their way or from a backup, are of no use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = self._read()

    def recognise(self, number: int, certificate: bytes, headers: Mapping[str, str]) -> None:
        """Raises Refused unless the secret among the headers is the one first shown with the certificate."""
        secret = next((value for name, value in headers.items() if name.lower() == SECRET), "")
        name, found = f"node-{number}", [_sha256(certificate), _sha256(secret.encode())]
        if len(secret) < 32:
            raise Refused(f"{name} shows no secret of its site; it was not started by `hardy deploy node`")
        if self._known.get(name) == found:
            return
        self._known = self._read()  # the operator may have taken a line out
        known = self._known.get(name, found)
        if known[0] == found[0] and known != found:
            raise Refused(
                f"the certificate of {name} belongs to a site with another --state folder. If that folder is lost, the "
                f"server's operator takes {name} out of {self.path.name} in the server's state"
            )
        self._known[name] = found
        write_atomic(self.path, json.dumps(self._known, indent=1).encode())

    def _read(self) -> dict[str, list[str]]:
        if not self.path.exists():
            return {}
        found = read_json(self.path, dict, "Restore it; without it a stolen key would be as good as the site's.")
        return {str(name): [str(one) for one in pair] for name, pair in found.items()}


class NodeProxy(Proxy):
    """The site's end: shows the site's certificate, and lets an app through only if the site has agreed to it.

    Flower's SuperNode can demand a signature of each app, but its free server never hands one out. So this end signs
    the apps on the site's list with a key of its own, the only one that the SuperNode trusts; any other app is answered
    to the server with an error, and never unpacked.
    """

    def __init__(self, keys: Keys, server: tuple[str, int], agreed: Sequence[str], audit: Audit, secret: str) -> None:
        from cryptography.hazmat.primitives.asymmetric import ed25519

        self.upstream, self.agreed, self.audit, self.shown = server, frozenset(agreed), audit, {SECRET: secret}
        self._tls, self._signs = keys.context(), ed25519.Ed25519PrivateKey.generate()
        self.delivered: Callable[[], None] = lambda: None
        super().__init__(("127.0.0.1", 0), None)

    def trusted(self) -> str:
        """The SuperNode's list of whom to trust, as YAML."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        words = self._signs.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")
        return f"site: {json.dumps(words)}\n"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPSConnection(*self.upstream, timeout=120, context=self._tls)

    def clock(self) -> float:
        """Seconds by which this machine's clock is ahead of the server's, at least: the answer may have been on its way
        for as long as we waited. Refused if the server does not let us in."""
        with contextlib.closing(self.connect()) as connection:
            connection.connect()
            began = time.time()
            connection.request("POST", CLOCK, b"", dict(self.shown))
            came = connection.getresponse()
            said = came.read()
        if came.status != 200:
            raise Refused(said.decode("utf-8", "replace"))
        return clock_difference(float(said), began, time.time())

    def refused(self, why: str) -> None:
        super().refused(why)
        self.audit.write("refused", why=why)

    def check(self, question: HttpRequest) -> None:
        if not same_account((question.peer.address, question.peer.port), ("127.0.0.1", self.server_address[1])):
            raise Refused("another account of this machine asks for the node's connection")

    def inspect(self, question: HttpRequest, reply: HttpReply) -> HttpReply:
        if reply.status != 200:
            return reply
        if question.path == "/v1/fleet/get-run":
            from flwr.proto.run_pb2 import GetRunResponse

            run = _parse(GetRunResponse, reply.body).run
            if run.primary_task_type not in ("", "flwr-serverapp"):
                raise Refused(f"run {run.run_id} is a {run.primary_task_type}, no federated run")
        if question.path == "/v1/fleet/get-fab":
            return reply._replace(body=self._app(question, reply))
        if question.path == "/v1/fleet/confirm-message-received":
            self.delivered()  # all of it is here: the app can be started
        return reply

    def _app(self, question: HttpRequest, reply: HttpReply) -> bytes:
        from flwr.proto.fab_pb2 import GetFabRequest, GetFabResponse
        from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign

        asked, found = _parse(GetFabRequest, question.body), _parse(GetFabResponse, reply.body)
        digest = hashlib.sha256(found.fab.content)
        name, now = digest.hexdigest(), int(time.time())
        found.fab.verifications.clear()
        if name in self.agreed:
            signature = urlsafe_b64encode(self._signs.sign(create_message_to_sign(digest.digest(), now))).decode()
            found.fab.verifications["valid_license"] = "agreed by the site"
            found.fab.verifications["site"] = json.dumps({"signed_at": now, "signature": signature})
            self.audit.write("app", run=str(asked.run_id), app=name)
        else:
            found.fab.content = b""
            self.refused(f"run {asked.run_id}: app {name} is not one that this site has agreed to")
        return bytes(found.SerializeToString())


def bell(nodes: Path, node: int | str) -> int:
    """When somebody last rang for a node, or it has (`from-N`); 0: nobody has."""
    try:
        return bell_file(nodes, node).stat().st_mtime_ns
    except OSError:
        return 0


def ring(nodes: Path, node: int | str) -> None:
    """Says that there is a message for a node, or from it."""
    place = bell_file(nodes, node)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    place.touch()


def bell_file(nodes: Path, node: int | str) -> Path:
    """An empty file beside the server's list of nodes."""
    return nodes.with_name("bells") / str(node)


def _node_of(kind: Any, body: bytes) -> int:
    try:
        return int(_parse(kind, body).node.node_id)
    except Refused:
        return 0


def clock_difference(there: float, sent: float, came: float) -> float:
    """By how much a clock is ahead of another one, at least, which was read at some time between two of its own.

    >>> clock_difference(100.0, 110.0, 112.0), clock_difference(100.0, 95.0, 111.0), clock_difference(100.0, 80.0, 90.0)
    (10.0, 0.0, -10.0)
    """
    return max(sent - there, 0.0) + min(came - there, 0.0)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _remembered_nodes(path: Path) -> dict[str, int]:
    """Which node is whom, from before the server was started again: nodes that find it back do not register anew."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return {str(int(number)): int(node) for number, node in json.loads(path.read_text("utf-8")).items()}
    return {}


def _parse(kind: Any, body: bytes) -> Any:
    try:
        return kind.FromString(body)
    except Exception:  # protobuf's own error has no stub
        raise Refused(f"no {kind.__name__}") from None
