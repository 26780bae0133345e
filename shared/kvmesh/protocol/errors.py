"""The one error that a user of any service can see, with OpenAI's JSON shape."""

from __future__ import annotations

from typing import Any

__all__ = ["ApiError", "bad_request", "unavailable"]


class ApiError(Exception):
    """An error with an HTTP status and a sentence that says what to do.

    Attributes:
        status: HTTP status code.
        type: OpenAI error type, e.g. ``invalid_request_error``.
        code: machine-readable code, e.g. ``model_not_found``.
        message: one sentence for a person, naming the remedy.
        param: the request field at fault, if one is.
        retry_after_s: seconds for the ``Retry-After`` header (429 and 503).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON body of OpenAI's API: ``{"error": {message, type, param, code}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400 for a request that can never succeed as it stands."""
    return ApiError(400, message, code=code, param=param)


def unavailable(message: str, *, code: str = "service_unavailable", retry_after_s: int = 1) -> ApiError:
    """A 503 for a request that may succeed when sent again."""
    return ApiError(503, message, type="service_unavailable_error", code=code, retry_after_s=retry_after_s)
