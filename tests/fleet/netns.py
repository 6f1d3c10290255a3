"""A host on a network of its own, whose way to each service can be cut alone: Linux network namespaces, as root.

There are two namespaces, the host's and the far side's, with a link between them for each service. On the far side a
relay listens, and passes on to a port of 127.0.0.1. Neither namespace has a way out: whatever is cut, no packet for an
address of these links ever leaves the machine.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

#: Addresses of the links, four for each. They are for documentation (RFC 5737), so nobody has them.
ADDRESSES = IPv4Network("198.51.100.0/24")
#: A card that nobody has. What is sent to it is dropped at the other end, as on a path that is broken further on.
NOBODY = "02:00:00:00:00:01"
#: Seconds that a change of the network may take.
TIMEOUT_S = 20
#: Bytes that a relay passes on at once.
CHUNK_BYTES = 64 * 1024

_NAMESPACES = Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000


class NamespaceError(Exception):
    """This machine, or this user, has no network namespaces to give."""


@dataclass(frozen=True, slots=True)
class Link:
    """The way to one service: `host` and `far` are its two ends."""

    name: str
    host: IPv4Address
    far: IPv4Address
    port: int

    @property
    def authority(self) -> str:
        """Where the host finds the service, as a URL has it."""
        return f"{self.far}:{self.port}"


class Island:
    """The host's namespace, and the links to its services by name."""

    def __init__(self, host: str, far: str) -> None:
        self._host = host
        self._far = far
        self.links: dict[str, Link] = {}

    def inside(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Return the command that becomes `argv` in the host's namespace."""
        return ("ip", "netns", "exec", self._host, *argv)

    @contextmanager
    def dropping(self, *names: str) -> Iterator[None]:
        """Drop every packet on these links, silently and in both directions, while the block runs."""
        ends = [end for name in names for end in self._ends(self.links[name])]
        try:
            for namespace, device, peer in ends:
                neighbour = (peer, "dev", device, "lladdr", NOBODY, "nud", "permanent")
                _ip("-n", namespace, "neigh", "replace", *neighbour)
            yield
        finally:
            for namespace, device, peer in ends:
                _ip("-n", namespace, "neigh", "del", peer, "dev", device)

    def unacknowledged(self) -> int:
        """Return how many bytes the host's kernel has sent, or will still send, without an acknowledgement yet."""
        _, *connections = _run(*self.inside(("cat", "/proc/net/tcp"))).splitlines()
        queues = [connection.split()[4] for connection in connections]  # TX:RX in hexadecimal
        return sum(int(queue.partition(":")[0], 16) for queue in queues)

    def connect(self, name: str, index: int) -> socket.socket:
        """Lay the link `name`, the island's `index`th; return the socket that listens at its far end."""
        base = ADDRESSES.network_address + 4 * index
        host, far = base + 1, base + 2
        _ip("-n", self._host, "link", "add", "name", name, "type", "veth", "peer", "name", name, "netns", self._far)
        for namespace, address in ((self._host, host), (self._far, far)):
            _ip("-n", namespace, "addr", "add", f"{address}/30", "dev", name)
            _ip("-n", namespace, "link", "set", "dev", name, "up")
        with _entered(self._far):
            listening = socket.create_server((str(far), 0))
        self.links[name] = Link(name, host, far, listening.getsockname()[1])
        return listening

    def _ends(self, link: Link) -> list[tuple[str, str, str]]:
        return [(self._host, link.name, str(link.far)), (self._far, link.name, str(link.host))]


@contextmanager
def island(services: Mapping[str, int]) -> Iterator[Island]:
    """Make an island with a link to each service, given as its name and its port of 127.0.0.1.

    Raises:
        NamespaceError: there are no namespaces here.
    """
    mark = uuid.uuid4().hex[:12]
    with ExitStack() as stack:
        host, far = (stack.enter_context(_namespace(f"fleet-{mark}-{side}")) for side in ("host", "far"))
        made = Island(host, far)
        listening = [
            (stack.enter_context(made.connect(name, index)), port)
            for index, (name, port) in enumerate(services.items())
        ]
        stack.enter_context(_relays(listening))
        yield made


def refusal() -> str:
    """Return why there can be no island on this machine; "" when there can be."""
    try:
        with island({"probe": 0}) as probe, probe.dropping("probe"):
            _run(*probe.inside(("true",)))
    except (NamespaceError, OSError) as error:
        return f"no network namespaces here: {error}"
    return ""


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "dev", "lo", "up")
        yield name
    finally:
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    except FileNotFoundError:
        raise NamespaceError(f"there is no command {command[0]!r}") from None
    except subprocess.CalledProcessError as error:
        raise NamespaceError(f"{' '.join(command)}: {error.stderr.strip()}") from error


@contextmanager
def _entered(namespace: str) -> Iterator[None]:
    """Let the sockets that this thread makes belong to `namespace` while the block runs."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(_NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(home)
    finally:
        os.close(home)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))


@contextmanager
def _relays(listening: Sequence[tuple[socket.socket, int]]) -> Iterator[None]:
    """Pass on what comes to each socket to a port of 127.0.0.1, in a thread, while the block runs."""
    stop = asyncio.Event()

    async def serve() -> None:
        for server, port in listening:
            await asyncio.start_server(partial(_relay, port), sock=server)
        await stop.wait()

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        thread = threading.Thread(target=runner.run, args=(serve(),), name="relays")
        loop = runner.get_loop()
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()


async def _relay(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.close()
        return
    await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on until either side has ended, and then end the other: each waits for the other's end in its own pump."""
    try:
        with suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                writer.write(chunk)
                await writer.drain()
    finally:
        writer.close()
