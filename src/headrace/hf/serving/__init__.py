"""An OpenAI-compatible server of one model: requests.py, what may be asked; engine.py, what generates; routes.py,
what is between them.

Requests wait for each other; nothing is batched.
"""

import socket
from pathlib import Path

import uvicorn

from ...utils.errors import InputError
from .routes import Limits, application


def serve(checkpoint: Path, host: str, port: int, limits: Limits, device: str | None = None) -> None:
    """Until interrupted. InputError where the checkpoint, or the address, cannot be used."""
    with listening(host, port) as listener:
        app = application(checkpoint, limits, device)
        address, number = listener.getsockname()[:2]
        print(f"serving {checkpoint} on http://{f'[{address}]' if ':' in address else address}:{number}/v1", flush=True)
        config = uvicorn.Config(app, log_level="info", lifespan="off", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run([listener])


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there. Bound before the model is read: an address that is taken is said at once."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port={port}; expected 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise InputError(f"--host={host!r} and --port={port} cannot be listened on: {error.strerror}") from None
