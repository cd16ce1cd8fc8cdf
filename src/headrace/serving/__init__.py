"""An OpenAI-compatible server of one model: requests.py checks requests, engine.py generates text for all of them
together, routes.py connects the two, access.py says who may ask, tokenizing.py keeps the tokenizer in a process of
its own, protocol.py limits connections.
"""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from ..utils.errors import InputError, require
from .access import LOCAL, Access
from .protocol import Listener, Protocol, most_descriptors
from .routes import Limits, application


def serve(
    checkpoint: Path, host: str, port: int, limits: Limits, device: str | None = None, *, access: Access = LOCAL,
    **more: Any,
) -> None:  # fmt: skip
    """Serves a checkpoint until interrupted. access: as for `application`, with `host`; more: its other arguments.

    Raises InputError if the checkpoint, device or address cannot be used, or if others reach the address and access
    needs no key."""
    with listening(host, port) as listener:
        address, number = listener.getsockname()[:2]
        access.check_address(address)
        listener.most = most_descriptors(limits.connections)
        access = replace(access, hosts=(host, *access.hosts))
        app = application(checkpoint, limits, device, access=access, **more)
        print(f"serving {checkpoint} on http://{f'[{address}]' if ':' in address else address}:{number}/v1", flush=True)
        uvicorn.Server(settings(app, log_level="info")).run([listener])


def settings(app: Any, **more: Any) -> uvicorn.Config:
    """The settings of uvicorn for an application."""
    fixed: Any = {"http": Protocol, "loop": "asyncio", "ws": "none", "lifespan": "off"}  # other loops ignore Listener
    return uvicorn.Config(app, **fixed, timeout_graceful_shutdown=1, **more)


def listening(host: str, port: int) -> Listener:
    """A listening socket. It is bound before the model is read, so that a used address is reported at once."""
    require(0 <= port <= 65535, f"--port={port}; expected 0 to 65535")
    if not host:  # the system would listen on all addresses
        raise InputError("--host='' is empty; expected a name or an address, or 0.0.0.0 for all addresses")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        host.encode("idna")  # as the socket does, which it leaves open if this fails
        return Listener(fileno=socket.create_server((host, port), family=family).detach())
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", error)
        raise InputError(f"--host={host!r} and --port={port} cannot be used as an address: {reason}") from None
