"""An OpenAI-compatible server of one model: requests.py checks requests, engine.py generates text for all of them
together, routes.py connects the two, protocol.py ends connections that send no request.
"""

import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import uvicorn

from ..utils.errors import InputError
from .protocol import Protocol
from .routes import Limits, application


def serve(
    checkpoint: Path,
    host: str,
    port: int,
    limits: Limits,
    device: str | None = None,
    *,
    name: str | None = None,
    hosts: Iterable[str] = (),
) -> None:
    """Serves a checkpoint until interrupted. name, hosts: as for `application`, which also knows `host`.

    Raises InputError if the checkpoint, device or address cannot be used."""
    with listening(host, port) as listener:
        app = application(checkpoint, limits, device, name=name, hosts=[host, *hosts])
        address, number = listener.getsockname()[:2]
        print(f"serving {checkpoint} on http://{f'[{address}]' if ':' in address else address}:{number}/v1", flush=True)
        uvicorn.Server(settings(app, log_level="info")).run([listener])


def settings(app: Any, **more: Any) -> uvicorn.Config:
    """The settings of uvicorn for an application."""
    return uvicorn.Config(app, http=Protocol, ws="none", lifespan="off", timeout_graceful_shutdown=1, **more)


def listening(host: str, port: int) -> socket.socket:
    """A listening socket. It is bound before the model is read, so that a used address is reported at once."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port={port}; expected 0 to 65535")
    if not host:  # the system would listen on all addresses
        raise InputError("--host='' is empty; expected a name or an address, or 0.0.0.0 for all addresses")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise InputError(f"--host={host!r} and --port={port} cannot be used as an address: {error.strerror}") from None
