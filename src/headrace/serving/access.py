"""Who may ask the server."""

import hmac
import reprlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ..utils.errors import InputError
from .refusals import Refused, error_response

PUBLIC = ("/health",)  # paths that are answered without the key


@dataclass(frozen=True)
class Access:
    """hosts: names of this machine, beside localhost, under which it is asked. key: what requests must bring as
    `Authorization: Bearer KEY`; None: nothing. without_key: an address of a network is served without a key.

    Raises InputError for a key that no header can hold."""

    hosts: tuple[str, ...] = ()
    key: str | None = None
    without_key: bool = False

    def __post_init__(self) -> None:
        if self.key is not None and not (self.key and self.key.isascii() and self.key.isprintable()):
            raise InputError("--api-key is empty, or not all of it is printable ASCII; expected a secret text")

    def check_address(self, address: str) -> None:
        """Raises InputError for an address that other machines reach, without a key."""
        ip = ip_address(address.partition("%")[0])  # without the interface of a link-local address
        if self.key is None and not self.without_key and not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback:
            raise InputError(
                f"{address} can be reached by other machines, and there is no key; expected --api-key or "
                "HEADRACE_API_KEY, or --no-api-key to answer everyone"
            )


LOCAL = Access()


class Keyed:
    """Refuses requests without the key, which it compares in a time that does not depend on what they bring."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self.app
        if scope["type"] == "http" and scope["path"] not in PUBLIC and not self._brings_key(request := Request(scope)):
            refusal = Refused(
                401, "the API key is missing or wrong; expected the header Authorization: Bearer KEY",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
            answer = await error_response(request, refusal)
        await answer(scope, receive, send)

    def _brings_key(self, request: Request) -> bool:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self.key)


class KnownHosts:
    """Refuses requests whose Host is a name that is not known. Without this, a web page whose name is made to point to
    this machine could read the answers (DNS rebinding). An address in place of a name is accepted."""

    def __init__(self, app: ASGIApp, names: Iterable[str]):
        self.app, self.names = app, {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self.app
        if scope["type"] == "http" and not self._known(host := Request(scope).headers.get("host", "localhost")):
            sentence = (
                f"the Host {reprlib.repr(host)} is not known; start the server with --allow-host to accept a name"
            )
            answer = await error_response(Request(scope), Refused(403, sentence))
        await answer(scope, receive, send)

    def _known(self, host: str) -> bool:
        with suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            with suppress(ValueError):
                return bool(ip_address(name))
            return name in self.names
        return False
