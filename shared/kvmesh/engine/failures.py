"""The answers to requests that fail inside the engine."""

from __future__ import annotations

from kvmesh.engine.sequence import Sequence
from kvmesh.protocol.errors import ApiError, bad_request

__all__ = [
    "broken_logits",
    "deadline_exceeded",
    "duplicate_request_id",
    "duplicate_transfer_id",
    "internal_error",
    "legs_differ",
    "sampling_failed",
]


def duplicate_request_id(request_id: str) -> ApiError:
    """400: a request of this id is running."""
    return bad_request(f"Request id {request_id!r} is already running.", code="duplicate_request_id")


def duplicate_transfer_id(transfer_id: int) -> ApiError:
    """400: a transfer of this id is open."""
    return bad_request(f"Disaggregated request id {transfer_id} is already in use.", code="duplicate_transfer_id")


def deadline_exceeded(seq: Sequence) -> ApiError:
    """504: the request's time is over."""
    return ApiError(
        504,
        f"The request was not finished by its deadline (it was {seq.phase.value}).",
        type="timeout_error",
        code="deadline_exceeded",
    )


def broken_logits() -> ApiError:
    """500: the model's logits are not finite."""
    return internal_error("The model gave no usable probabilities for this request.")


def sampling_failed() -> ApiError:
    """400: the request's own parameters rule every token out."""
    return bad_request(
        "The request's sampling parameters leave no token to choose; loosen its penalties, biases or stop ids.",
        code="sampling_failed",
    )


def legs_differ() -> ApiError:
    """502: the context server ended the answer with its first token, and by this leg's parameters it goes on."""
    return ApiError(
        502,
        "The context server took the first token for the last; send both legs with the same sampling parameters.",
        type="server_error",
        code="legs_differ",
    )


def internal_error(message: str) -> ApiError:
    """500: a defect, or a fault of the machine."""
    return ApiError(500, message, type="internal_error", code="model_error")
