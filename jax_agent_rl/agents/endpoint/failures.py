"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``.

Clients repeat what failed with 408, 409, 429 or 5xx unless ``x-should-retry`` says no: a repeated request is only
wanted where it could go better.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ValidationError

from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    EngineDiedError,
    HistoryEditedError,
    JaxAgentRLError,
    PromptTooLongError,
    TemplateError,
    TurnRefusedError,
)
from jax_agent_rl.types import FinishReason

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        body: the JSON body.
        retry: whether the same request could succeed later.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        kind = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error"}
        kind |= {413: "invalid_request_error", 429: "rate_limit_error"}
        self.status = status
        self.retry = retry
        error = {"message": message, "type": kind.get(status, "server_error"), "param": param, "code": code}
        self.body: dict[str, Any] = {"error": error}


def error_code(status: int) -> str | None:
    """Return the error code of a refusal by the server itself."""
    return {401: "invalid_api_key", 404: "unknown_url"}.get(status)


def as_api_error(error: Exception) -> ApiError:
    """Convert a failure for the client; log unexpected ones."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return _from_validation(error)
        case JaxAgentRLError():
            return _from_failure(error)
        case RecursionError():
            return ApiError(400, "the request is nested too deep (arguments of a tool call?); send a flatter one")
        case UnicodeEncodeError():
            return ApiError(400, f"the request holds a lone surrogate, which is not text: {error.reason}")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")


def _from_validation(error: ValidationError) -> ApiError:
    """Return an error with a request's first problem and the number of others."""
    problems = error.errors(include_url=False)
    first = problems[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not supported; leave it out", param=param.split(".")[0])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}={first['input']!r:.120}: {message}{more}", param=param.split(".")[0])


def _from_failure(error: JaxAgentRLError) -> ApiError:
    """Convert a failure of ours for the client."""
    text = str(error)
    match error:
        case PromptTooLongError() | TurnRefusedError(finish_reason=FinishReason.RESPONSE_LENGTH):
            return ApiError(400, text, code="context_length_exceeded", param="messages")
        case TurnRefusedError():
            return ApiError(400, text, code=str(error.finish_reason))
        case TemplateError() | HistoryEditedError():
            return ApiError(400, text, code=str(error.drop_reason), param="messages")
        case EngineDiedError() | BackendClosedError():
            return ApiError(503, text, code="engine_gone")
        case BackendError():
            return ApiError(500, text, code="backend_error", retry=True)
    return ApiError(500, text, code="internal_error")
