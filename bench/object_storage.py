"""A local S3 server with added latency, for ``bench storage``. Does not import torch.

The server runs in its own process and serves the files of a folder as objects of a bucket. It
supports what read-only S3 clients need: objects, byte ranges, and lists of objects by prefix.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bench"


@contextlib.contextmanager
def serve(folder: Path, seconds: float) -> Iterator[int]:
    """Serve the files of a folder, with each response delayed by ``seconds``; yield the port."""
    handler = type("Handler", (Objects,), {"folder": folder, "seconds": seconds})
    with Server(("127.0.0.1", 0), handler) as server:
        process = multiprocessing.get_context("fork").Process(
            target=server.serve_forever, daemon=True
        )
        process.start()
        try:
            yield server.server_port
        finally:
            process.kill()
            process.join()


def environment(port: int) -> dict[str, str]:
    """Return environment variables that point S3 clients at the server, without credentials."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }


class Server(ThreadingHTTPServer):
    """HTTP server with a thread per connection, for many parallel clients."""

    request_queue_size = 1024  # the default of 5 refuses connections

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: clients may disconnect early."""


class Objects(BaseHTTPRequestHandler):
    """Handler of S3's GET and HEAD requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder: Path
    seconds: float

    def do_HEAD(self) -> None:
        """Answer like GET, without the body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Send an object, a list of objects, or an error."""
        time.sleep(self.seconds)
        address = urlsplit(self.path)
        path = self.folder / unquote(address.path).removeprefix(f"/{BUCKET}").strip("/")
        prefix = parse_qs(address.query).get("prefix", [""])[0]
        if ".." in (path / prefix).parts:  # other users of this machine can connect, too
            self.send_error(404)
        elif path == self.folder:
            self._send_list(prefix)
        elif path.is_file():
            self._send_object(path)
        else:
            self.send_error(404)

    def _send_object(self, path: Path) -> None:
        size, etag, modified = _facts(path)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, end = 0, size
        if match:
            first, end = int(match[1]), min(int(match[2] or size) + 1, size)
        self.send_response(206 if match else 200)
        self.send_header("Content-Length", str(end - first))
        if match:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size}")
        self.send_header("ETag", etag)
        self.send_header("Last-Modified", self.date_time_string(int(modified)))
        self.end_headers()
        if self.command == "GET" and end > first:
            with path.open("rb") as file:
                self.connection.sendfile(file, first, end - first)

    def _send_list(self, prefix: str) -> None:
        """Send the names of the objects and prefixes directly below a prefix."""
        text = "<ListBucketResult><IsTruncated>false</IsTruncated>"
        for path in sorted((self.folder / prefix).glob("*")):
            key = path.relative_to(self.folder)
            if path.is_dir():
                text += f"<CommonPrefixes><Prefix>{key}/</Prefix></CommonPrefixes>"
            else:
                size, etag, modified = _facts(path)
                text += f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>{etag}</ETag>"
                date = datetime.fromtimestamp(modified, UTC).isoformat(timespec="milliseconds")
                text += f"<LastModified>{date}</LastModified></Contents>"
        data = f"{text}</ListBucketResult>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


def _facts(path: Path) -> tuple[int, str, float]:
    """Return a file's size in bytes, ETag, and modification time in seconds."""
    stat = path.stat()
    return stat.st_size, f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"', stat.st_mtime
