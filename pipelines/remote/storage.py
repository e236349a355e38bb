"""Requests to object storage and web servers, made with obstore.

obstore runs its own threads, which do not survive a fork. Processes that read remote data are
therefore started by forkserver (``pipelines.workers``). In a process that was forked anyway, a
request raises an error instead of hanging.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import math
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar

from fastsiam.config.urls import Url
from fastsiam.errors import DataError, FastSiamError, FileLostError, WorkerError

log = logging.getLogger(__name__)

PARALLEL = 64
"""Maximum number of concurrent requests of a process."""
_BLOCK = 2**23
"""Maximum bytes of a request of ``read``."""
STALL_SECONDS = "FASTSIAM_CLOUD_STALL"
"""Environment variable: seconds without data after which a request fails. Default: 10."""
PATIENCE_SECONDS = "FASTSIAM_CLOUD_PATIENCE"
"""Environment variable: seconds for which failed requests are retried. Default: 120."""
_SECONDS_TO_REPORT = 10.0
"""Seconds without an answer about an object or a folder after which a warning is logged."""
_PAUSE = 0.2
"""Seconds to wait before retrying a request that obstore does not retry itself."""
_CREDENTIALS_LAST = timedelta(minutes=15)
"""Lifetime of AWS credentials that obstore assumes; it reuses them until 5 minutes before the end.
Those of a role or login may expire 10 to 15 minutes after botocore returns them."""
_SECONDS_TO_STOP = 5.0
_SECONDS_TO_NOTICE = 0.1
"""Seconds in which obstore's threads end cancelled requests; later they would abort Python."""

Range = tuple[int, int]
"""First byte, and the byte after the last."""
Result = TypeVar("Result")


class Facts(NamedTuple):
    """Size, modification time and ETag of an object, which identify its version."""

    size: int
    """In bytes."""
    modified: int
    """In seconds since 1970."""
    etag: str
    """The ETag that the server reports, or ""."""


class Level(NamedTuple):
    """What is directly below a prefix."""

    files: dict[str, Facts]
    """Facts of the objects, by name."""
    folders: frozenset[str]
    """Names of the sub-prefixes."""


def heads(urls: Sequence[Url], *, denied_is_absent: bool = False) -> list[Facts | None]:
    """Return the facts of objects; None for each object that does not exist.

    Args:
        urls: addresses of the objects.
        denied_is_absent: whether to return None for objects to which access is denied.

    Raises:
        DataError: access is denied, or the server cannot be reached.
    """

    async def head(store: Any, key: str) -> Facts | None:
        try:
            return _facts(await store.head_async(key))
        except Exception as error:
            if isinstance(error, FileNotFoundError) or (denied_is_absent and _is_denied(error)):
                return None
            raise

    return results([partial(_request, url, head) for url in urls], about=urls[0])


def level(url: Url) -> Level:
    """List the objects and sub-prefixes directly below a prefix.

    Raises:
        DataError: access is denied, the bucket does not exist, or it cannot be reached.
    """

    async def list_level(store: Any, key: str) -> Level:
        try:
            listing = await store.list_with_delimiter_async(key or None)
        except Exception as error:
            if isinstance(error, FileNotFoundError) or _status(error) == 404:
                raise DataError(
                    f"{url} does not exist: check the address and the bucket's name"
                ) from None
            raise
        return Level(
            {PurePosixPath(meta["path"]).name: _facts(meta) for meta in listing["objects"]},
            frozenset(PurePosixPath(prefix).name for prefix in listing["common_prefixes"]),
        )

    return results([partial(_request, url, list_level)], about=url)[0]


def read(url: Url, facts: Facts, start: int, stop: int) -> memoryview:
    """Fetch a range of an object in blocks, concurrently; see ``get``."""
    cuts = [*range(start, stop, _BLOCK), stop]
    parts = results([partial(get, url, facts, *block) for block in itertools.pairwise(cuts)])
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


async def get(url: Url, facts: Facts, start: int, stop: int) -> memoryview:
    """Fetch a range of an object.

    Raises:
        DataError: access is denied, or the server cannot be reached.
        FileLostError: the object was deleted, or is no longer the version that ``facts`` describe.
    """

    from obstore.exceptions import PreconditionError

    async def get_range(store: Any, key: str) -> memoryview:
        response = await store.get_async(key, options={"range": (start, stop)})
        if not is_same(_facts(response.meta), facts):
            raise PreconditionError  # If-Match would not do: web servers may ignore it
        data = memoryview(await response.bytes_async())
        if len(data) != stop - start:
            raise EOFError
        return data

    return await _request(url, get_range)


def is_same(one: Facts, other: Facts) -> bool:
    """Return whether size and ETag are equal; compare times if either ETag is missing."""
    field_index = 2 if one.etag and other.etag else 1
    return one.size == other.size and one[field_index] == other[field_index]


def submit(request: Callable[[], Coroutine[Any, Any, Result]]) -> Future[Result]:
    """Start a request; to stop it, cancel the future."""
    loop = client().loop  # before the coroutine exists, which would otherwise warn after an error
    return asyncio.run_coroutine_threadsafe(request(), loop)


def result(request: Future[Result]) -> Result:
    """Wait for a request and return its result.

    Raises:
        WorkerError: this process was forked from the one that made the request.
    """
    client()
    return request.result()


def results(
    requests: Sequence[Callable[[], Coroutine[Any, Any, Result]]], *, about: Url | None = None
) -> list[Result]:
    """Make requests concurrently and wait for all; the first error cancels the others.

    Args:
        requests: the requests.
        about: the address to name in a warning if the answers take long; None for no warning.
    """
    futures = [submit(request) for request in requests]
    try:
        if about and wait(futures, _SECONDS_TO_REPORT).not_done:
            seconds = f"{_seconds(PATIENCE_SECONDS, 120):g} s (${PATIENCE_SECONDS})"
            log.warning(f"no answer yet about {about}; trying for up to {seconds}")
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


async def _request(url: Url, ask: Callable[[Any, str], Awaitable[Result]]) -> Result:
    """Make a request, and retry it as long as that can help.

    obstore retries most failures itself: 5xx, 408, 429, failed connections, and response bodies
    that are cut off or stall. It does not retry bodies of lists, or of objects without an ETag.
    """
    connections, end = client(), math.inf
    while True:
        try:
            async with connections.limit:
                if end == math.inf:  # waiting for other requests does not count
                    end = time.monotonic() + _seconds(PATIENCE_SECONDS, 120)
                return await ask(connections.store(url.scheme, url.host), url.key)
        except FastSiamError:
            raise
        except Exception as error:
            is_last = time.monotonic() + _PAUSE > end
            if (final := _final_error(url, error, is_last=is_last)) is not None:
                # Do not show obstore's error text: it may contain a signed request.
                raise final from None
        await asyncio.sleep(_PAUSE)


class _Client:
    """The connections of a process, and the thread that runs their event loop."""

    def __init__(self) -> None:
        if find_spec("obstore") is None:
            raise DataError(
                "reading from object storage needs obstore: pip install 'fastsiam[cloud]'"
            )
        self.loop, self.limit = asyncio.new_event_loop(), asyncio.Semaphore(PARALLEL)
        self.chunks = asyncio.Semaphore(PARALLEL)
        """Limits the chunks that are being fetched or written to the cache."""
        self.process = os.getpid()
        self.store = cache(_open_store)
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="fastsiam-storage", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Cancel all requests before the interpreter exits."""

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if tasks:
                await asyncio.sleep(_SECONDS_TO_NOTICE)

        atexit.unregister(self.close)
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(cancel(), self.loop).result(_SECONDS_TO_STOP)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_SECONDS_TO_STOP)


_process_client: _Client | None = None
_starting = threading.Lock()


def client() -> _Client:
    """Return this process's client, which is created at the first call."""
    global _process_client
    if _process_client is None:
        with _starting:
            _process_client = _process_client or _Client()
    if _process_client.process != os.getpid():
        raise WorkerError(
            "this process was forked from one that reads from object storage, so it cannot "
            "read from there; start it with forkserver or spawn"
        )
    return _process_client


def _facts(meta: Any) -> Facts:
    etag = (meta["e_tag"] or "").removeprefix("W/").strip('"')
    return Facts(int(meta["size"]), int(meta["last_modified"].timestamp()), etag)


def _open_store(scheme: str, host: str) -> Any:
    """Return the obstore store of a bucket or server."""
    from obstore import store

    stall = timedelta(seconds=_seconds(STALL_SECONDS, 10))
    options: dict[str, Any] = {
        "client_options": {
            "allow_http": True,  # for addresses that say http://
            "connect_timeout": stall,
            "read_timeout": stall,
            "timeout": timedelta(days=1),  # for a complete response, which may be slow but steady
            "pool_max_idle_per_host": str(PARALLEL),
        },
        "retry_config": {
            "max_retries": 1000,
            "retry_timeout": timedelta(seconds=_seconds(PATIENCE_SECONDS, 120)),
            "backoff": {"max_backoff": timedelta(seconds=8)},
        },
    }
    if scheme == "s3":
        options |= aws_profile()
    return store.from_url(f"{scheme}://{host}", **options)


def aws_profile() -> dict[str, Any]:
    """Return obstore settings for the user's AWS profile, which obstore does not read itself.

    botocore finds the keys: of the profile, a login (single sign-on), a role or the machine. If
    the environment has keys, or botocore finds none, obstore looks for credentials.

    Raises:
        DataError: the profile does not exist or yields no keys, or boto3 is missing.
    """
    if {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"} & set(os.environ):
        return {}
    profile = os.environ.get("AWS_PROFILE")
    try:
        import botocore.session
        from obstore.auth.boto3 import Boto3CredentialProvider

        session = botocore.session.Session()
        options: dict[str, Any] = {}
        region = session.get_config_variable("region")
        if region and "AWS_REGION" not in os.environ:
            options["region"] = region
        if profile or session.get_credentials() is not None:
            options["credential_provider"] = Boto3CredentialProvider(session, ttl=_CREDENTIALS_LAST)
        return options
    except ImportError:
        raise DataError(
            "reading from s3:// needs boto3: pip install 'fastsiam[cloud]', or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    except Exception as error:  # botocore's messages name the profile, but contain no keys
        raise DataError(
            f"cannot get AWS credentials from profile {profile or 'default'}: "
            f"{' '.join(str(error).split())}; check ~/.aws, or log in again"
        ) from None


def _final_error(url: Url, error: Exception, *, is_last: bool) -> FastSiamError | None:
    """Return the error to raise for a failed request; None if it should be retried.

    Args:
        url: the address.
        error: the error of obstore.
        is_last: whether requests have failed for ``PATIENCE_SECONDS``.
    """
    name, status = type(error).__name__, _status(error)
    text = f"{error} {error.__cause__ or ''}"
    if isinstance(error, FileNotFoundError):
        return FileLostError(
            f"{url} was deleted while it was read; restore it, then start the same command again "
            "to resume"
        )
    if name == "PreconditionError" or status in (412, 416):
        return FileLostError(
            f"{url} was overwritten while it was read; start the same command again to read the "
            "new version"
        )
    if name == "NotSupportedError" or re.search("non-partial response|non partial", text):
        return DataError(
            f"cannot read {url} in place: its server does not support range requests; copy the "
            "file to a disk"
        )
    if re.search(r"169\.254\.169\.254|metadata\.google|MissingAccount|TokenRequest", text):
        reason = "no credentials found"
    elif _is_denied(error):
        reason = "access denied"
    elif status in (301, 307, 308):
        reason = "the bucket is in another region: set AWS_REGION"
    elif 400 <= status < 500 and status not in (408, 429):
        reason = f"the server answers {status}"
    elif is_last:
        reason = f"the server answers {status}" if status else "the connection failed"
        return DataError(
            f"cannot read {url}: {reason}, for {_seconds(PATIENCE_SECONDS, 120):g} s "
            f"(${PATIENCE_SECONDS}); check the network and the address, then start the same "
            "command again to resume"
        )
    else:
        return None
    return DataError(
        f"cannot read {url}: {reason}; check the address, the permissions and "
        f"{_CREDENTIALS.get(url.scheme, _NO_CREDENTIALS)}"
    )


def _is_denied(error: Exception) -> bool:
    denials = ("PermissionDeniedError", "UnauthenticatedError")
    return type(error).__name__ in denials or _status(error) in (401, 403)


_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID or AWS_PROFILE (a public bucket: AWS_SKIP_SIGNATURE=true)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS (a public bucket: GOOGLE_SKIP_SIGNATURE=true)",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_CREDENTIALS = "that the file is public: requests to web servers carry no credentials"


def _status(error: Exception) -> int:
    """Return the HTTP status in an error message of obstore; 0 if it has no status."""
    match = re.search(r"[Ss]tatus(?: ?[Cc]ode)?[:( ]+(\d{3})\b", str(error))
    return int(match[1]) if match else 0


def _seconds(variable: str, default: float) -> float:
    try:
        return float(os.environ.get(variable) or default)
    except ValueError:
        return default
