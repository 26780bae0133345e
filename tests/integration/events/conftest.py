"""The publisher whose every message a test can choose."""

from __future__ import annotations

from wire_publisher import event_payload, follow, wire_publisher

__all__ = ["event_payload", "follow", "wire_publisher"]
