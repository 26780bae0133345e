"""Runs before a member of the chart's etcd: refuses to start one that would make two clusters of one, or none.

etcd keeps its members and their addresses in its own files from its first start on and ignores the flags that name
others later, so that a changed number of members, or other addresses, do harm without a word. Helm refuses such changes
when it sees what runs; this is for those that render the chart without looking (Argo CD, ``helm template``).
"""

from __future__ import annotations

import argparse
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

__all__ = ["Verdict", "judge", "main"]

PATIENCE_S = 300.0
"""How long a new member waits for others; the kubelet then starts it again."""
ASK_AGAIN_S = 1.0
ASK_TIMEOUT_S = 2.0

_REFUSED = 1
_OTHERWISE = ", or start an empty etcd (docs/kubernetes.md, etcd)"

Members = Mapping[str, str]
"""Peer URL by name."""


class Verdict(NamedTuple):
    """What becomes of a member. Without a refusal, and not told to wait, it starts."""

    refusal: str | None = None
    wait: bool = False
    note: str | None = None


class _Listed(msgspec.Struct):
    """One entry of ``/members`` at a peer port."""

    peer_urls: list[str] = msgspec.field(name="peerURLs", default_factory=list)


def judge(
    name: str, wanted: Members, recorded: Members | None, *, has_data: bool, running: Sequence[str] | None
) -> Verdict:
    """Whether the member may start.

    Args:
        name: of the member.
        wanted: all members as the chart's values have them now, in their order.
        recorded: as they were when this member's volume was first used; None: not known.
        has_data: whether the volume has the data of a member.
        running: peer URLs of the members of the cluster that another member answers for; None: no other answers.
    """
    if has_data:
        if recorded is None or len(recorded) == 1 == len(wanted) or recorded == wanted:
            return Verdict()
        if len(recorded) == 1:
            return Verdict(note="goes on as the only member: etcd.replicas cannot change, and others will not start")
        if len(recorded) != len(wanted):
            return Verdict(
                f"this volume is of an etcd of {len(recorded)} members, and etcd.replicas is {len(wanted)}, which "
                f"cannot change; set it to {len(recorded)}{_OTHERWISE}"
            )
        return Verdict(
            "this volume is of an etcd whose members know each other by other addresses "
            f"({', '.join(recorded.values())}); set tls.enabled back{_OTHERWISE}"
        )
    if running is None:
        # The first begins; the others come after it, so that nobody begins beside a cluster that cannot be seen yet.
        return Verdict(wait=name != next(iter(wanted)))
    if urlsplit(wanted[name]).netloc in {urlsplit(url).netloc for url in running}:
        return Verdict()
    return Verdict(
        f"an etcd of {len(running)} members runs ({', '.join(running)}), and this is none of them: etcd.replicas "
        f"cannot change; set it to {len(running)}{_OTHERWISE}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the status says whether etcd may start."""
    parser = argparse.ArgumentParser(prog="etcd_guard", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="of etcd")
    parser.add_argument(
        "--record", type=Path, required=True, help="file beside it, with the members at the first start"
    )
    parser.add_argument("--name", required=True, help="of this member")
    parser.add_argument("--members", required=True, help="all members, as etcd's --initial-cluster")
    parser.add_argument("--tls", type=Path, help="folder with tls.crt, tls.key and ca.crt")
    args = parser.parse_args(argv)
    wanted = dict(pair.split("=", 1) for pair in args.members.split(","))
    context = _context(args.tls)
    verdict = _wait(args, wanted, lambda: _running(args.name, wanted, context))
    if verdict.refusal is not None:
        sys.stderr.write(f"{verdict.refusal}\n")
        return _REFUSED
    if verdict.note is not None:
        sys.stderr.write(f"{verdict.note}\n")
    else:
        _record(args.record, wanted)
    return 0


def _wait(args: argparse.Namespace, wanted: Members, running: Callable[[], Sequence[str] | None]) -> Verdict:
    has_data = (args.data_dir / "member").is_dir()
    recorded = _recorded(args.record)
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        verdict = judge(args.name, wanted, recorded, has_data=has_data, running=None if has_data else running())
        if not verdict.wait:
            return verdict
        if time.monotonic() > deadline_s:
            return Verdict(f"no other member of {', '.join(wanted)} answers")
        time.sleep(ASK_AGAIN_S)


def _running(name: str, wanted: Members, context: ssl.SSLContext | None) -> Sequence[str] | None:
    """What the first other member that answers says."""
    for other, url in wanted.items():
        if other == name:
            continue
        try:
            with urllib.request.urlopen(f"{url}/members", timeout=ASK_TIMEOUT_S, context=context) as answer:  # noqa: S310
                listed = msgspec.json.decode(answer.read(1 << 20), type=list[_Listed])
        except (OSError, HTTPException, msgspec.DecodeError):
            continue
        return [url for member in listed for url in member.peer_urls]
    return None


def _context(tls: Path | None) -> ssl.SSLContext | None:
    if tls is None:
        return None
    context = ssl.create_default_context(cafile=str(tls / "ca.crt"))
    context.load_cert_chain(tls / "tls.crt", tls / "tls.key")
    return context


def _recorded(path: Path) -> Members | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return None


def _record(path: Path, members: Members) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(members))
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
