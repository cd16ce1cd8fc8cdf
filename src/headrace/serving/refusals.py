"""Errors in the format of OpenAI."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from ..utils.errors import InputError


class Refused(HTTPException):
    """The refusal of a request; `param` is the invalid field."""

    def __init__(
        self, status: int, sentence: str, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(status, sentence, headers)
        self.param, self.code = param, code


def failed(error: BaseException) -> str:
    """The sentence about a failure that is no mistake of the client."""
    return f"the server failed with {type(error).__name__}; its log says where"


async def error_response(request: Request, error: Any) -> JSONResponse:
    """Every error in the format of OpenAI: a refusal, a 404 or 405 of the router, an InputError of the model (such as
    for a text longer than its learned positions), or a failure of the server."""
    status, headers, param, code = getattr(error, "status_code", 500), getattr(error, "headers", None), None, None
    if isinstance(error, Refused):
        sentence, param, code = error.detail, error.param, error.code
    elif isinstance(error, HTTPException):
        sentence = f"{request.method} {request.url.path} is not served"
    elif isinstance(error, InputError):
        status, sentence = 400, str(error)
    else:
        sentence = failed(error)
        headers = {"connection": "close"}  # as uvicorn closes it after a failure, and the client would use it again
    kinds = {404: "not_found_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    kind = kinds.get(status, "invalid_request_error")
    return JSONResponse({"error": {"message": sentence, "type": kind, "param": param, "code": code}}, status, headers)
