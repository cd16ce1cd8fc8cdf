"""Who may ask the server, and how many at once."""

import logging
import re
import resource
import select
import socket
import threading
import time

import openai
import pytest
import uvicorn
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from groups import refused
from headrace.serving import listening, settings
from headrace.serving.access import Access, Guarded
from headrace.serving.protocol import most_descriptors
from headrace.utils.errors import InputError
from served import ASCII, connect, get, save, serving

KEY = "s3cret key"


async def fine(scope, receive, send):
    await JSONResponse("fine")(scope, receive, send)


# The header Host of a request to a server that knows itself as "here".
HOSTS = {
    "localhost": True, "LOCALHOST:8000": True, "127.0.0.1:8000": True, "[::1]:8000": True, "192.0.2.7": True,
    "here:80": True, "Here": True, "evil.example": False, "evil.example:8000": False, "localhost.evil.example": False,
    "127.0.0.1.evil.example": False, "[::1": False, "": False, "here@evil.example": False, "localhost:evil": True,
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_unknown_host_names_are_refused(host):
    """It may come from a web page whose name was made to point to this machine."""
    answer = TestClient(Guarded(fine, Access(("here",)))).get("/", headers={"host": host})
    if HOSTS[host]:
        assert answer.json() == "fine"
    else:
        sentence = f"the Host {host!r} is not known; start the server with --allow-host to accept a name"
        assert answer.status_code == 403 and answer.json()["error"]["message"] == sentence


def test_hosts_are_compared_as_clients_send_them():
    for named, sent in (
        ("münchen.example", "xn--mnchen-3ya.example:80"),
        ("Here_1", "here_1"),
        ("fe80::1%eth0", "[::1]"),
    ):
        assert TestClient(Guarded(fine, Access((named,)))).get("/", headers={"host": sent}).json() == "fine"


@pytest.mark.parametrize("host", ["example.com:8000", "https://example.com", "*.example.com", "", "a b", "a..b"])
def test_what_is_no_host_name_is_refused(host):
    with pytest.raises(InputError, match=re.escape(f"--allow-host={host!r}; expected a name")):
        Access((host,))


# The header Authorization of a request.
BROUGHT = {
    f"Bearer {KEY}": True, f"bearer {KEY}": True, f"Bearer  {KEY} ": True, f"Basic {KEY}": False, KEY: False,
    f"Bearer {KEY}x": False, f"Bearer {KEY[:-1]}": False, f"Bearer {KEY.upper()}": False, "Bearer": False, "": False,
    f"Bearer {KEY}\xe9": False,
}  # fmt: skip


@pytest.mark.parametrize("brought", BROUGHT)
def test_requests_without_the_key_are_refused(brought):
    client = TestClient(Guarded(fine, Access(key=KEY)), base_url="http://localhost")
    answer = client.get("/v1/models", headers={"authorization": brought.encode("latin-1")})
    if BROUGHT[brought]:
        assert answer.json() == "fine"
    else:
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert client.get("/v1/models").status_code == 401 and client.get("/health").json() == "fine"
    assert client.get("/v1/models", headers={"host": "localhost/health?"}).status_code == 401


def test_server_asks_for_its_key(tmp_path):
    with serving(save(tmp_path, ASCII), access=Access(key=KEY)) as base:
        assert connect(base, KEY).completions.create(model=None, prompt="a", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            connect(base).completions.create(model=None, prompt="a", max_tokens=1)
        assert get(f"{base}/metrics").status_code == 401


@pytest.mark.parametrize("key", ["", "ключ", "a\nb", " key", "key "])
def test_keys_that_no_header_can_hold_are_refused(key):
    assert "--api-key is empty, has a space around it, or not all of it" in refused(lambda: Access(key=key))


@pytest.mark.parametrize(
    ("address", "is_open"),
    [("127.0.0.1", False), ("127.9.9.9", False), ("::1", False), ("::ffff:127.0.0.1", False), ("0.0.0.0", True),
     ("::", True), ("192.0.2.7", True), ("10.0.0.1", True), ("fe80::1%eth0", True), ("::ffff:192.0.2.7", True)],
)  # fmt: skip
def test_addresses_that_others_reach_need_a_key(address, is_open):
    for access in (Access(key=KEY), Access(without_key=True)):
        access.check_address(address)
    if is_open:
        said = refused(lambda: Access().check_address(address))
        assert "can be reached by other machines, and there is no key" in said
    else:
        Access().check_address(address)


def test_command_refuses_other_addresses_without_a_key(tmp_path, refusal, monkeypatch):
    """Before it reads the model; with a key, also of the environment, it goes on to read it."""
    (tmp_path / "config.json").write_text("{}")
    asked = ("serve", tmp_path, "--host", "0.0.0.0", "--port", 0)
    assert "expected --api-key or HEADRACE_API_KEY, or --no-api-key" in refusal(*asked)
    for more in (("--no-api-key",), ("--api-key", KEY)):
        assert "has model_type=None" in refusal(*asked, *more)
    monkeypatch.setenv("HEADRACE_API_KEY", KEY)
    assert "has model_type=None" in refusal(*asked)
    both = refusal(*asked, "--no-api-key")
    assert "--no-api-key beside a key, of --api-key or HEADRACE_API_KEY; expected one" in both


def test_more_connections_than_file_descriptors_are_closed(monkeypatch):
    """They cost one line of log, and the server answers when the others are gone."""
    lines = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "warning", lambda *line: lines.append(line[0] % line[1:]))
    monkeypatch.setattr(logging.getLogger("asyncio"), "error", lambda *line, **_: lines.append(line))
    with listening("127.0.0.1", 0) as listener:
        server = uvicorn.Server(settings(fine, log_config=None))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        address = listener.getsockname()
        idle = [socket.socket() for _ in range(150)]
        listener.most = listener.fileno() + 190  # beyond which the other ends of 150 are
        for each in idle:
            each.connect(address)
        while not select.select(idle, [], [], 1)[0]:  # it says nothing to them, so one that can be read has ended
            assert thread.is_alive()
        for each in idle:
            each.close()
        assert get(f"http://127.0.0.1:{address[1]}/").json() == "fine"
        server.should_exit = True
        thread.join()
    assert lines == [f"all {listener.most} connections are in use; more are closed"]


@pytest.mark.parametrize(("limit", "wanted", "given", "left"), [
    ((64, 64), 1024, (64, 64), 48), ((64, 4096), 1024, (1040, 4096), 1024), ((9000, 9000), 1024, None, 1024),
    ((256, resource.RLIM_INFINITY), 1024, (1040, resource.RLIM_INFINITY), 1024), ((64, 500), 1024, (500, 500), 484),
])  # fmt: skip
def test_limit_on_file_descriptors_is_raised_as_far_as_connections_need(monkeypatch, limit, wanted, given, left):
    now = [limit]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: now.append(limits))
    assert most_descriptors(wanted) == left and now[-1] == (given or limit)
