"""Object storage on loopback: an S3 server (moto), a web server and a fault-injecting proxy.

Each runs in a separate process, because clients and tests fork.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

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


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # the default of 5 refuses connections of parallel clients


def web_server(
    folder: Path, *, ranges: bool = True, etags: bool = True
) -> AbstractContextManager[str]:
    """Serve a folder by HTTP; yield the address. Without ``ranges``, Range headers are ignored."""
    return _running(_serve, folder, ranges, etags)


def _serve(port: int, folder: Path, ranges: bool, etags: bool) -> None:
    settings = {"folder": folder, "ranges": ranges, "etags": etags}
    _Server(("127.0.0.1", port), type("Handler", (_Files,), settings)).serve_forever()


class _Files(BaseHTTPRequestHandler):
    """HTTP handler that serves files with ranges, ETag and Last-Modified."""

    protocol_version = "HTTP/1.1"
    folder: Path
    ranges: bool
    etags: bool

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.folder / unquote(self.path).lstrip("/")
        if path.is_dir():  # a generated index page has no Content-Length
            self.close_connection = True
            self.send_response(200)
            self.end_headers()
            return
        if not path.is_file():  # many servers answer 403 for missing files
            denied = "forbidden" in self.path or path.suffix == ".beton"
            self.send_error(403 if denied else 404)
            return
        facts = path.stat()
        size = facts.st_size
        first, last = 0, size - 1
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if byte_range and self.ranges:
            first, last = int(byte_range[1]), min(int(byte_range[2]), size - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(last + 1 - first))
        if self.etags:
            self.send_header("ETag", f'"{facts.st_mtime_ns:x}-{size:x}"')
        self.send_header("Last-Modified", self.date_time_string(int(facts.st_mtime)))
        self.end_headers()
        if body:
            with path.open("rb") as file:
                file.seek(first)
                self.wfile.write(file.read(last + 1 - first))

    def log_message(self, format: str, *arguments: object) -> None:
        """Suppress the request log."""


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

    _Server(("127.0.0.1", port), Handler).serve_forever()


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
