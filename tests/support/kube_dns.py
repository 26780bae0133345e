"""A small DNS server for a test cluster: answers the names of Services from their endpoints, as CoreDNS would.

A ClusterIP Service is answered with its ClusterIP (kube-proxy takes it from there), a headless one with the addresses
of its pods, ``POD.SERVICE`` with that pod's.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import time
import urllib.request
from typing import Any, NamedTuple

DOMAIN = "cluster.local"
FRESH_S = 0.3  # how long an answer of the API server is believed
A, NXDOMAIN = 1, 3


class Question(NamedTuple):
    """One question of a DNS packet: who asks for what."""

    id: int
    name: str
    kind: int
    raw: bytes


class KubeDns(threading.Thread):
    """Serves until :meth:`close`.

    Args:
        address: where to listen, UDP port 53.
        api: base URL of the API server.
        token: for it.
    """

    def __init__(self, address: str, api: str, token: str) -> None:
        super().__init__(daemon=True)
        self._api = api
        self._token = token
        self._context = ssl._create_unverified_context()
        self._read_s = -FRESH_S
        self._names: dict[str, list[str]] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))
        self._socket.settimeout(0.2)
        self._closed = threading.Event()

    def run(self) -> None:
        while not self._closed.is_set():
            try:
                packet, client = self._socket.recvfrom(4096)
            except TimeoutError:
                continue
            question = parse(packet)
            self._socket.sendto(answer(question, self._addresses(question.name)), client)

    def close(self) -> None:
        """Stop serving."""
        self._closed.set()
        self.join()
        self._socket.close()

    def _addresses(self, name: str) -> list[str] | None:
        if time.monotonic() - self._read_s > FRESH_S:
            try:
                self._names = names_of(self._get("/api/v1/services"), self._get("/api/v1/endpoints"))
                self._read_s = time.monotonic()
            except OSError:
                pass  # the API server is away for a moment: the last answer stands
        return self._names.get(name)

    def _get(self, path: str) -> list[dict[str, Any]]:
        request = urllib.request.Request(self._api + path, headers={"Authorization": f"Bearer {self._token}"})
        with urllib.request.urlopen(request, timeout=5, context=self._context) as response:
            return json.load(response)["items"]


def names_of(services: list[dict[str, Any]], endpoints: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Every name that the cluster's DNS knows, with its addresses."""
    names: dict[str, list[str]] = {}
    headless = set()
    for item in services:
        name, ip = full_name(item), item["spec"].get("clusterIP")
        names[name] = [] if ip == "None" else [ip]
        if ip == "None":
            headless.add(name)
    for item in endpoints:
        name = full_name(item)
        if name not in headless:
            continue
        for subset in item.get("subsets") or []:
            for address in subset.get("addresses") or []:
                if address["ip"] not in names[name]:
                    names[name].append(address["ip"])
                if hostname := address.get("hostname"):
                    names[f"{hostname}.{name}"] = [address["ip"]]
    return {name: addresses for name, addresses in names.items() if addresses}


def full_name(item: dict[str, Any]) -> str:
    """Of a Service, or of endpoints, which have its name."""
    return f"{item['metadata']['name']}.{item['metadata']['namespace']}.svc.{DOMAIN}"


def parse(packet: bytes) -> Question:
    """The first question of a packet."""
    labels, at = [], 12
    while length := packet[at]:
        labels.append(packet[at + 1 : at + 1 + length].decode())
        at += 1 + length
    (kind,) = struct.unpack_from("!H", packet, at + 1)
    return Question(struct.unpack_from("!H", packet)[0], ".".join(labels).lower(), kind, packet[12 : at + 5])


def answer(question: Question, addresses: list[str] | None) -> bytes:
    """The packet that answers a question; a name without addresses does not exist."""
    given = (addresses or []) if question.kind == A else []
    flags = 0x8580 | (0 if addresses else NXDOMAIN)
    records = b"".join(struct.pack("!HHHIH", 0xC00C, A, 1, 1, 4) + socket.inet_aton(ip) for ip in given)
    return struct.pack("!HHHHHH", question.id, flags, 1, len(given), 0, 0) + question.raw + records
