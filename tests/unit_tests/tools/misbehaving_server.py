"""An OpenAI-compatible server in a thread of the test that misbehaves on demand."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Act = Callable[[int, dict[str, Any]], Any]


def says(text: str, finish: str = "stop", tokens: int = 3) -> dict[str, Any]:
    """The body of a good answer."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def echo(number: int, body: dict[str, Any]) -> dict[str, Any]:
    """Answers depend only on the question."""
    return says("to " + body["messages"][-1]["content"])


class Server:
    """`act(number of the request, its body)` gives a body, a status, or 'half', 'close', 'garbage'.

    Args:
        models: status of the list of models.

    Attributes:
        requests: bodies, in the order in which they came.
    """

    def __init__(self, act: Act = echo, port: int = 0, models: int = 200) -> None:
        self.act, self.requests, self.lock = act, [], threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(models, {"object": "list", "data": [{"id": "m", "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer.lock:
                    outer.requests.append(body)
                    number = len(outer.requests) - 1
                found = outer.act(number, body)
                if found == "close":
                    self.close_connection = True
                elif found == "half":
                    self._send(200, says("never read"), share=0.5)
                elif found == "garbage":
                    self._send(200, {"choices": []})
                elif isinstance(found, tuple):
                    self._send(found[0], {"error": {"message": "no"}}, **found[1])
                elif isinstance(found, int):
                    self._send(found, {"error": {"message": "no"}})
                else:
                    self._send(200, found)

            def _send(self, status: int, body: Any, share: float = 1.0, **headers: str) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # who asked may have been killed
                    self.wfile.write(data[: int(len(data) * share)])
                self.close_connection = share < 1

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> Server:
        self.thread.start()
        return self

    def __exit__(self, *args: Any) -> None:
        self.http.shutdown()
        self.http.server_close()
