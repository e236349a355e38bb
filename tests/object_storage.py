"""Object storage on loopback: an S3 server (moto), a web server and a fault-injecting proxy.

Each runs in a separate process, because clients and tests fork.
"""

from __future__ import annotations

import contextlib
import random
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import unquote

import pytest

from fastsiam.bench.object_storage import Objects, Server
from fastsiam.pipelines import Store
from fastsiam.pipelines.remote import storage
from tests.processes import Forked, free_port, listens, wait_until

BUCKET = "bucket"
KEY, SECRET = "KEYTHATNOBODYSEES", "SECRETTHATNOBODYSEES"
"""Credentials, which must never appear in any output."""


def reconnect() -> None:
    """Close this process's connections, so that the next ones read the environment again."""
    if storage._process_client is not None:
        storage._process_client.close()
    storage._process_client = None


@contextlib.contextmanager
def connected(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, with new connections that read them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        reconnect()
        try:
            yield
        finally:
            reconnect()


@contextlib.contextmanager
def _running(serve: Callable[..., None], *arguments: object) -> Iterator[str]:
    """Run ``serve(port, *arguments)`` in a process; yield the server's address."""
    port = free_port()
    process = Forked(serve, port, *arguments)
    try:
        wait_until(process, lambda: listens(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send(9)
        process.wait(60)


def s3_server() -> AbstractContextManager[str]:
    """Run moto's S3; yield its address."""
    return _running(_serve_s3)


def _serve_s3(port: int) -> None:
    from moto.server import main

    main(["-H", "127.0.0.1", "-p", str(port)])


def web_server(
    folder: Path, *, ranges: bool = True, etags: bool = True
) -> AbstractContextManager[str]:
    """Serve a folder by HTTP; yield the address. Without ``ranges``, Range headers are ignored."""
    return _running(_serve, folder, ranges, etags)


def _serve(port: int, folder: Path, ranges: bool, etags: bool) -> None:
    settings = {"folder": folder, "ranges": ranges, "etags": etags}
    Server(("127.0.0.1", port), type("Handler", (_Files,), settings)).serve_forever()


class _Files(Objects):
    """HTTP handler that serves a folder like a web server, instead of a bucket."""

    ranges: bool
    etags: bool

    def do_GET(self) -> None:
        path = self.folder / unquote(self.path).lstrip("/")
        if path.is_dir():  # a generated index page has no Content-Length
            self.close_connection = True
            self.send_response(200)
            self.end_headers()
        elif not path.is_file():  # many servers answer 403 for missing files
            denied = "forbidden" in self.path or path.suffix == ".beton"
            self.send_error(403 if denied else 404)
        else:
            if not self.ranges:
                del self.headers["Range"]
            self._send_object(path)

    def send_header(self, keyword: str, value: str) -> None:
        if self.etags or keyword != "ETag":
            super().send_header(keyword, value)


def faulty_proxy(
    server: str, log: Path, *, delay: tuple[float, float] = (0, 0), **shares: float
) -> AbstractContextManager[str]:
    """Run a proxy in front of a loopback server that randomly injects faults; yield its address.

    Args:
        server: The server's address.
        log: Gets a line per response: the name of its fault, or "whole".
        delay: Minimum and maximum seconds before each response.
        shares: Fractions of the responses with a fault: ``errors`` (503 instead of the server's
            response), ``cuts`` (closed after half of the response) and ``stalls`` (half of the
            response, then an open connection).
    """
    return _running(_run_faulty_proxy, int(server.rpartition(":")[2]), log, delay, shares)


def _run_faulty_proxy(
    port: int, to: int, log: Path, delay: tuple[float, float], shares: dict[str, float]
) -> None:
    """Run the proxy: requests without a body, one response per connection."""
    chance, lock = random.Random(0), threading.Lock()
    shares["whole"] = 1 - sum(shares.values())

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            request = b""
            while b"\r\n\r\n" not in request:
                if not (data := self.request.recv(65536)):
                    return
                request += data
            with lock:
                wait = chance.uniform(*delay)
                (fate,) = chance.choices([*shares], [*shares.values()])
                with log.open("a") as file:
                    file.write(f"{fate}\n")
            time.sleep(wait)
            if fate == "errors":
                self.request.sendall(
                    b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
                return
            request = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
            answer = b""
            with socket.create_connection(("127.0.0.1", to)) as server:
                server.sendall(request)
                while data := server.recv(65536):
                    answer += data
            self.request.sendall(answer if fate == "whole" else answer[: len(answer) // 2])
            if fate == "stalls":
                time.sleep(3600)

    Server(("127.0.0.1", port), Handler).serve_forever()


def environment(endpoint: str, cache: Path) -> dict[str, str]:
    """Return environment variables with the endpoint and credentials for S3 clients."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(cache),
        "NO_PROXY": "127.0.0.1",
        "FASTSIAM_CLOUD_STALL": "2",
    }


def upload(endpoint: str, folder: Path, prefix: str) -> str:
    """Upload a folder's files below a prefix of the bucket; return the prefix's address."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(Bucket=BUCKET)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            client.upload_file(path, BUCKET, f"{prefix}/{path.relative_to(folder)}")
    return f"s3://{BUCKET}/{prefix}"


def read_all(store: Store) -> list[bytes]:
    """Prefetch all images, then read them."""
    store.prefetch(range(len(store)))
    return [bytes(store.read(index)) for index in range(len(store))]
