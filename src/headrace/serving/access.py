"""Who may ask the server."""

import hmac
import re
import reprlib
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
    """hosts: names of this machine, beside localhost and any address, under which it is asked. Without this, a web page
    whose name is made to point to this machine could read the answers (DNS rebinding). key: what requests must bring as
    `Authorization: Bearer KEY`; None: nothing. without_key: an address of a network is served without a key.

    Raises InputError for a key that no header can hold, and for a host that is neither a name nor an address."""

    hosts: tuple[str, ...] = ()
    key: str | None = None
    without_key: bool = False

    def __post_init__(self) -> None:
        key = self.key
        if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
            wrong = "is empty, has a space around it, or not all of it is printable ASCII"
            raise InputError(f"--api-key {wrong}; expected a secret text")
        for host in self.hosts:
            _sent(host)

    def check_address(self, address: str) -> None:
        """Raises InputError for an address that other machines reach, without a key."""
        ip = ip_address(address.partition("%")[0])  # without the interface of a link-local address
        if self.key is None and not self.without_key and not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback:
            raise InputError(
                f"{address} can be reached by other machines, and there is no key; expected --api-key or "
                "HEADRACE_API_KEY, or --no-api-key to answer everyone"
            )

    def refusal(self, request: Request) -> Refused | None:
        """Why a request is not answered; None: it is."""
        if not self._knows(host := request.headers.get("host", "localhost")):
            shown = reprlib.repr(host)
            return Refused(403, f"the Host {shown} is not known; start the server with --allow-host to accept a name")
        if self.key is None or request.scope["path"] in PUBLIC or self._is_brought(self.key, request):
            return None
        return Refused(
            401, "the API key is missing or wrong; expected the header Authorization: Bearer KEY",
            code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip

    def _knows(self, host: str) -> bool:
        with suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            with suppress(ValueError):
                return bool(ip_address(name))
            return name in ("localhost", *map(_sent, self.hosts))
        return False

    def _is_brought(self, key: str, request: Request) -> bool:
        """Compared in a time that does not depend on what is brought."""
        scheme, _, brought = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(brought.strip().encode("latin-1"), key.encode())


def _sent(host: str) -> str:
    """A name as clients send it, or an address. InputError for what is neither."""
    with suppress(ValueError):
        if re.fullmatch(r"[\w.-]+", name := host.encode("idna").decode().lower()) or ip_address(host):
            return name
    raise InputError(f"--allow-host={host!r}; expected a name such as example.com, without a scheme or port")


LOCAL = Access()


class Guarded:
    """Refuses the requests that `access` does."""

    def __init__(self, app: ASGIApp, access: Access):
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self.app
        if scope["type"] == "http" and (refusal := self.access.refusal(request := Request(scope))):
            answer = await error_response(request, refusal)
        await answer(scope, receive, send)
