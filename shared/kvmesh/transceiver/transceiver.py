"""The transceiver of one engine: both sides of KV transfers behind one object that the executor drives.

All methods are called on the executor's thread. None blocks, except the two ``check_*_transfer_status`` when they are
asked to wait, for a bounded time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvmesh.cache.layout import PageLayout
from kvmesh.net.clock import Clock
from kvmesh.protocol.disagg import ContextAddress, HandOff
from kvmesh.protocol.transfer import (
    Aux,
    CancelSession,
    ControlMessage,
    Hello,
    HelloReply,
    LedgerEvent,
    Refused,
    RequestData,
    ResultAck,
    TransferResult,
)
from kvmesh.transceiver.borders import isolated_errors_total
from kvmesh.transceiver.bounce import BounceRegions
from kvmesh.transceiver.claims import sign
from kvmesh.transceiver.control import Control, Route
from kvmesh.transceiver.handshake import Handshake, Introduction
from kvmesh.transceiver.integrity import PageChecksums
from kvmesh.transceiver.ledger import Ledger
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.planes.base import DataPlane
from kvmesh.transceiver.receiver import ReceiverSide
from kvmesh.transceiver.sender import SenderSide
from kvmesh.transceiver.slices import BlockSpan
from kvmesh.transceiver.stats import collect_pins, collect_stats
from kvmesh.transceiver.tickets import Signer
from kvmesh.transceiver.timing import TransferTimes, Waiter
from kvmesh.transceiver.types import (
    PageLease,
    PeerKey,
    PoolMemory,
    StagingStats,
    TransceiverStats,
    TransferPoll,
    TransferSize,
)
from kvmesh.transceiver.workers import PeerWorkers

__all__ = ["Transceiver", "TransceiverDeadError"]

CLOSE_TIMEOUT_S: Final = 2.0


class TransceiverDeadError(RuntimeError):
    """A thread of the transceiver ended by a defect; transfers cannot go on and the engine must be restarted."""


class Transceiver:
    """See the module; made by :func:`kvmesh.transceiver.factory.create_transceiver`."""

    def __init__(
        self,
        *,
        key: PeerKey,
        layout: PageLayout,
        digest: str,
        summary: str,
        pools: Sequence[PoolMemory],
        plane: DataPlane,
        cluster_secret: bytes,
        bind_host: str,
        checksums: bool,
        bounce: BounceRegions | None = None,
        times: TransferTimes,
        clock: Clock,
        waiter: Waiter,
        staging: Callable[[], StagingStats] = StagingStats,
    ) -> None:
        self.backend_name = plane.name
        self._isolated_before = isolated_errors_total()
        self._bounce = bounce
        self._plane = plane
        self._staging = staging if bounce is None else bounce.stats
        self._control = Control(str(key), bind_host, self)
        self._ledger = Ledger(key, clock)
        self._workers = PeerWorkers("kvmesh-transfer")
        self._introduction = Introduction(key, plane.name, digest, summary, layout)
        self._addresses = Signer(cluster_secret, "address")
        engine = LocalEngine(
            key=key,
            pools=pools,
            layout=layout,
            plane=plane,
            checksums=PageChecksums(pools) if checksums else None,
            bounce=bounce,
            handshake=Handshake(self._introduction, Signer(cluster_secret, "hello"), plane.describe()),
            tickets=Signer(cluster_secret, "ticket"),
            claims=Signer(cluster_secret, "claim"),
            addresses=self._addresses,
            times=times,
            clock=clock,
            waiter=waiter,
            ledger=self._ledger,
            workers=self._workers,
            send=self._control.send,
            admit=self._control.admit,
            dial=self._control.connect,
            hang_up=self._control.disconnect,
            watch=self._control.watch,
            peer_gone=self.on_process_ended,
        )
        self._sender = SenderSide(engine)
        self._receiver = ReceiverSide(engine)
        self._closed = False

    def start(self) -> None:
        """Open the control socket.

        Raises:
            OSError: the address cannot be bound.
        """
        self._control.start()

    @property
    def control_endpoint(self) -> str:
        """Where generation engines reach this one, e.g. ``tcp://127.0.0.1:41234``."""
        return self._control.endpoint

    @property
    def address(self) -> bytes:
        """:attr:`control_endpoint` and who listens there, signed: for generation engines that ask first."""
        mine = self._introduction.key
        here = ContextAddress(control_endpoint=self.control_endpoint, instance_id=mine.instance_id, epoch=mine.epoch)
        return sign(self._addresses, here)

    # The context side.

    def respond_and_send(
        self, transfer_id: int, request_id: str, lease: PageLease, num_tokens: int, seed: int, prompt_digest: bytes
    ) -> bytes:
        """Offer the pages of a finished prompt, and keep ``lease`` until every reader of them is terminal.

        The pages must hold their final bytes: on a GPU, the stream that writes them has been waited for.

        Args:
            transfer_id: the disaggregated request id.
            request_id: for logs and the ledger.
            lease: the pages of the prompt; released by the transceiver, exactly once.
            num_tokens: length of the prompt.
            seed: the resolved sampling seed, for the generation server.
            prompt_digest: 32 bytes that name the prompt's tokens and scope; the receiver must state the same.

        Returns:
            The msgpack of a :class:`kvmesh.protocol.disagg.HandOff`.

        Raises:
            DuplicateTransferError: the transfer is open already; the lease stays the caller's.
            ValueError: the lease does not hold ``num_tokens`` tokens; the lease stays the caller's.
        """
        token = self._sender.open(transfer_id, request_id, lease, num_tokens, self.control_endpoint, prompt_digest)
        mine = self._introduction
        return msgspec.msgpack.encode(
            HandOff(
                ticket=token,
                control_endpoint=self.control_endpoint,
                instance_id=mine.key.instance_id,
                epoch=mine.key.epoch,
                layout_digest=mine.layout_digest,
                seed=seed,
            )
        )

    def let_waiting_pages_move(self) -> int:
        """Pages are short: let those that nobody has asked for move to colder tiers; returns of how many transfers."""
        return self._sender.waiting.let_move()

    def is_unread(self, transfer_id: int) -> bool:
        """Whether pages are on offer under this id, and nobody has come for them."""
        session = self._sender.table.open.get(transfer_id)
        return session is not None and session.peer is None

    def check_context_transfer_status(self, at_least: int) -> TransferPoll:
        """What ended on the context side since the last call; releases the leases of what is over.

        Args:
            at_least: how many transfers to wait for (clamped to those open), for one
                ``kv_transfer_sender_future_timeout_ms`` at most, or until the waiter is disturbed; 0 does not wait.

        Raises:
            TransceiverDeadError: transfers cannot go on.
        """
        self._check_alive()
        return self._sender.poll(at_least)

    def expect_receiver(self, transfer_id: int, request_id: str, num_tokens: int, prompt_digest: bytes) -> None:
        """Generation first: wait for the receiver of a prompt that is still to be computed (WAIT_SCHEDULER).

        Args:
            transfer_id: the disaggregated request id.
            request_id: for logs and the ledger.
            num_tokens: length of the prompt.
            prompt_digest: 32 bytes that name the prompt's tokens and scope; the receiver must state the same.

        Raises:
            DuplicateTransferError: the transfer is open already.
        """
        self._sender.early.expect(transfer_id, request_id, num_tokens, prompt_digest)

    def take_claimed(self) -> list[int]:
        """Generation first: transfers whose receiver has come since the last call."""
        return self._sender.early.take_claimed()

    def send_slice(self, transfer_id: int, lease: PageLease, spans: Sequence[BlockSpan], aux: Aux | None) -> bool:
        """Generation first: let blocks of a promised prompt go out; in order, and while others are computed.

        Args:
            transfer_id: as for :meth:`expect_receiver`.
            lease: the prompt's pages up to the last of these blocks; released by the transceiver, exactly once. They
                must hold their final bytes.
            spans: by layer group, the blocks.
            aux: how the answer goes on; with the last slice, which has every windowed layer group whole. On a plane
                where the receiver reads there is one slice only.

        Returns:
            False when the transfer is over: nothing was sent, and the executor hears of its end, or has.
        """
        return self._sender.early.send(transfer_id, lease, spans, aux)

    def send_nothing(self, transfer_id: int, aux: Aux) -> bool:
        """Generation first: the first token ended the answer, so that no pages are needed.

        Returns:
            As :meth:`send_slice`.
        """
        return self._sender.early.send_nothing(transfer_id, aux)

    # The generation side.

    def request_and_receive(
        self,
        transfer_id: int,
        request_id: str,
        handoff: HandOff,
        lease: PageLease,
        first_missing_block_per_group: Sequence[int],
        prompt_digest: bytes,
    ) -> TransferSize:
        """Ask for the pages of a prompt that are missing here, into the pages of ``lease``, which is kept meanwhile.

        Args:
            transfer_id: the disaggregated request id.
            request_id: for logs and the ledger.
            handoff: what the context server gave.
            lease: pages for the whole prompt; released by the transceiver, exactly once.
            first_missing_block_per_group: for every layer group, how many blocks from the left are held already.
            prompt_digest: names the prompt that the pages must hold.

        Returns:
            What was asked for.

        Raises:
            TicketError: 403; the ticket is forged, expired or for another transfer. The lease stays the caller's.
            PromptMismatchError: 400; the pages on offer hold another prompt. The lease stays the caller's.
            DuplicateTransferError: the transfer is open already. The lease stays the caller's.
            ValueError: the arguments do not fit together. The lease stays the caller's.
        """
        return self._receiver.open(
            transfer_id, request_id, handoff, lease, first_missing_block_per_group, prompt_digest
        )

    def claim_and_receive(
        self,
        transfer_id: int,
        request_id: str,
        address: bytes,
        lease: PageLease,
        first_missing_block_per_group: Sequence[int],
        num_tokens: int,
        prompt_digest: bytes,
    ) -> TransferSize:
        """Generation first: :meth:`request_and_receive` of a prompt that is still to be computed.

        Args:
            transfer_id: the disaggregated request id.
            request_id: for logs and the ledger.
            address: the signed address of the context engine.
            lease: pages for the whole prompt; released by the transceiver, exactly once.
            first_missing_block_per_group: for every layer group, how many blocks from the left are held already.
            num_tokens: length of the prompt.
            prompt_digest: names the prompt that the pages must hold.

        Returns:
            What was asked for.

        Raises:
            TicketError: 403; the address is forged. The lease stays the caller's.
            DuplicateTransferError: the transfer is open already. The lease stays the caller's.
            ValueError: the arguments do not fit together. The lease stays the caller's.
        """
        return self._receiver.open_claimed(
            transfer_id, request_id, address, lease, first_missing_block_per_group, num_tokens, prompt_digest
        )

    def take_aux(self, transfer_id: int) -> Aux | None:
        """What came with a generation-first transfer that is completed, once; None for any other."""
        return self._receiver.take_aux(transfer_id)

    def decline_claim(self, transfer_id: int, address: bytes) -> None:
        """Tell the page owner that a promised prompt will not be asked for, instead of :meth:`claim_and_receive`.

        Raises:
            TicketError: 403, as in :meth:`claim_and_receive`.
        """
        self._receiver.decline_claim(transfer_id, address)

    def check_gen_transfer_status(self, at_least: int) -> TransferPoll:
        """What ended on the generation side since the last call; releases the leases of what is over.

        Args:
            at_least: how many transfers to wait for (clamped to those open), for one
                ``kv_transfer_poll_interval_ms`` at most, or until the waiter is disturbed, failing those that pass
                their deadline; 0 does not wait.

        Raises:
            TransceiverDeadError: transfers cannot go on.
        """
        self._check_alive()
        return self._receiver.poll(at_least)

    def decline(self, transfer_id: int, handoff: HandOff) -> None:
        """Tell the page owner that its pages will not be asked for, instead of :meth:`request_and_receive`.

        Raises:
            TicketError: 403, as in :meth:`request_and_receive`.
        """
        self._receiver.decline(transfer_id, handoff)

    # Both sides.

    def sweep_timeouts(self) -> list[int]:
        """Transfers that have become overdue, each once; to be cancelled until :meth:`cancel_request` is True."""
        return self._sender.sweep() + self._receiver.sweep()

    def cancel_request(self, transfer_id: int) -> bool:
        """Cancel a transfer; True once nothing touches its pages any more, here or at the peer. Call until True."""
        sent, received = self._sender.cancel(transfer_id), self._receiver.cancel(transfer_id)
        return sent and received

    def on_peer_dead(self, instance_id: str, epoch: int) -> None:
        """``epoch`` and older lives of an instance are taken for dead, although they may only stand still.

        Pages that one of them was asked to write stay out of use until it is certain that it does not.
        """
        self._sender.peer_dead(instance_id, epoch)
        if self._receiver.lives.peer_dead(instance_id, epoch, certain=False):
            self._control.unwatch(instance_id, epoch)

    def drain_ledger(self) -> list[LedgerEvent]:
        """State changes since the last call, for the coordinator."""
        return self._ledger.drain()

    @property
    def has_tracked_transfers(self) -> bool:
        """Whether any lease is held here, or a receiver waits.

        An idle executor must not wait without bound then.
        """
        tables = (self._sender.table, self._receiver.table)
        return len(self._sender.early.early) > 0 or any(len(table.open) + len(table.quarantine) > 0 for table in tables)

    @property
    def awaits_quiet(self) -> bool:
        """Whether a look of this engine is due soon, also without transfers that are open here.

        Peers wait for one, or ended transfers for a peer.
        """
        return (
            self._sender.waiting.any_put_off
            or len(self._sender.table.quarantine) + len(self._receiver.table.quarantine) > 0
        )

    def stats(self) -> TransceiverStats:
        """Gauges and counters."""
        return collect_stats(
            self._sender,
            self._receiver,
            staging=self._staging(),
            bounce=self._bounce,
            dropped_messages=self._control.dropped_total,
            isolated_errors=isolated_errors_total() - self._isolated_before,
            ledger_dropped=self._ledger.dropped_total,
        )

    def pins(self) -> list[tuple[float, int]]:
        """Of every open transfer, the monotonic time at which it began, and how many pages it pins here."""
        return collect_pins(self._sender, self._receiver)

    def shutdown(self) -> None:
        """Close everything and release every lease; idempotent. Takes a few seconds at most."""
        if self._closed:
            return
        self._closed = True
        self._sender.table.stop_movers()
        self._receiver.table.stop_movers()
        self._control.close(CLOSE_TIMEOUT_S)
        self._workers.close(CLOSE_TIMEOUT_S)
        self._plane.close()
        self._sender.table.close()
        self._receiver.table.close()
        if self._bounce is not None:
            self._bounce.close()

    # The control thread (see ControlHandler).

    def on_message(self, route: Route, message: ControlMessage) -> None:
        """Hand a message to the side that it concerns; one that comes from the wrong side is ignored."""
        if isinstance(route, bytes):
            match message:
                case Hello():
                    self._sender.on_hello(route, message)
                case RequestData():
                    self._sender.on_request(route, message)
                case ResultAck():
                    self._sender.on_ack(route, message)
                case CancelSession():
                    self._sender.on_cancel(route, message)
                case _:
                    self._control.dropped_total += 1
            return
        match message:
            case HelloReply():
                self._receiver.lives.on_reply(route, message)
            case TransferResult():
                self._receiver.answers.on_result(route, message)
            case Refused():
                self._receiver.answers.on_refused(route, message)
            case CancelSession():
                self._receiver.answers.on_cancel(route, message)
            case _:
                self._control.dropped_total += 1

    def on_connected(self, endpoint: str) -> None:
        """See :class:`kvmesh.transceiver.control.ControlHandler`."""
        self._receiver.lives.on_connected(endpoint)

    def on_disconnected(self, endpoint: str) -> None:
        """See :class:`kvmesh.transceiver.control.ControlHandler`."""
        self._receiver.lives.on_disconnected(endpoint)

    def on_process_ended(self, peer: PeerKey) -> None:
        """See :class:`kvmesh.transceiver.control.ControlHandler`."""
        self._sender.peer_dead(*peer)
        self._receiver.lives.peer_dead(*peer)

    def _check_alive(self) -> None:
        if (error := self._control.error or self._workers.error) is not None:
            raise TransceiverDeadError(f"a transfer thread ended: {error!r}") from error
