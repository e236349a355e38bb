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
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
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
        except FileNotFoundError:
            return None
        except Exception as error:
            if denied_is_absent and _is_denied(error):
                return None
            raise

    return _answers(urls, head)


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
            {_name(meta["path"]): _facts(meta) for meta in listing["objects"]},
            frozenset(map(_name, listing["common_prefixes"])),
        )

    return _answers([url], list_level)[0]


def _name(path: str) -> str:
    """Return the last component of an object's or a prefix's path."""
    return path.rstrip("/").rpartition("/")[2]


def _answers(urls: Sequence[Url], ask: Callable[[Any, str], Awaitable[Result]]) -> list[Result]:
    """Ask about objects and wait for all answers; log a warning if that takes long."""
    warning = (
        f"no answer yet about {urls[0]}; trying for up to "
        f"{_seconds(PATIENCE_SECONDS, 120):g} s (${PATIENCE_SECONDS})"
    )
    timer = threading.Timer(_SECONDS_TO_REPORT, log.warning, [warning])
    timer.daemon = True
    timer.start()
    try:
        return results([partial(_request, url, ask) for url in urls])
    finally:
        timer.cancel()


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
    options: Any = {"range": (start, stop)}
    if facts.etag and url.scheme in ("s3", "gs", "az"):
        options["if_match"] = f'"{facts.etag}"'

    async def get_range(store: Any, key: str) -> memoryview:
        response = await store.get_async(key, options=options)
        if not is_same(_facts(response.meta), facts):  # web servers may ignore If-Match
            raise _changed_error(url)
        data = memoryview(await response.bytes_async())
        if len(data) != stop - start:
            raise EOFError("UnexpectedEof")
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


def results(requests: Sequence[Callable[[], Coroutine[Any, Any, Result]]]) -> list[Result]:
    """Make requests concurrently and wait for all; the first error cancels the others."""
    futures = [submit(request) for request in requests]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


async def _request(url: Url, ask: Callable[[Any, str], Awaitable[Result]]) -> Result:
    """Make a request, and retry it as long as that can help.

    obstore retries most failures itself: 5xx, 408, 429, failed connections, and response bodies
    that are cut off or stall. It does not retry bodies of lists, or of objects without an ETag.
    """
    connections, end = client(), time.monotonic() + _seconds(PATIENCE_SECONDS, 120)
    while True:
        try:
            async with connections.limit:
                return await ask(connections.store(url), url.key)
        except FastSiamError:
            raise
        except Exception as error:
            final = _final_error(url, error)
            if final is not None or time.monotonic() + _PAUSE > end:
                # Do not show obstore's error text: it may contain a signed request.
                raise final or _unreachable_error(url, error) from None
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
        self._stores: dict[tuple[str, str], Any] = {}
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="fastsiam-storage", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def store(self, url: Url) -> Any:
        """Return the obstore store of a URL's bucket or server."""
        if (url.scheme, url.host) not in self._stores:
            self._stores[url.scheme, url.host] = _open_store(url)
        return self._stores[url.scheme, url.host]

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


def _open_store(url: Url) -> Any:
    from obstore import store

    stall = timedelta(seconds=_seconds(STALL_SECONDS, 10))
    options: dict[str, Any] = {
        "client_options": {
            "allow_http": True,  # for addresses that say http://
            "connect_timeout": stall,
            "read_timeout": stall,
            "timeout": 6 * stall,
            "pool_max_idle_per_host": str(PARALLEL),
        },
        "retry_config": {
            "max_retries": 1000,
            "retry_timeout": timedelta(seconds=_seconds(PATIENCE_SECONDS, 120)),
            "backoff": {"max_backoff": timedelta(seconds=8)},
        },
    }
    if url.scheme == "s3":
        options |= aws_profile()
    return store.from_url(f"{url.scheme}://{url.host}", **options)


def aws_profile() -> dict[str, Any]:
    """Return obstore settings for the user's AWS profile, which obstore does not read itself.

    boto3 reads the profile: keys, roles and logins (single sign-on). If there are no AWS
    configuration files, or the environment has keys, the result is empty. obstore then uses
    credentials from the environment or the machine.

    Raises:
        DataError: the profile does not exist or yields no keys, or boto3 is missing.
    """
    profile = os.environ.get("AWS_PROFILE")
    files = os.environ.get("AWS_CONFIG_FILE"), os.environ.get("AWS_SHARED_CREDENTIALS_FILE")
    default_paths = Path("~/.aws/config").expanduser(), Path("~/.aws/credentials").expanduser()
    if {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"} & set(os.environ) or not (
        profile or any(files) or any(path.is_file() for path in default_paths)
    ):
        return {}
    try:
        import botocore.session
        from obstore.auth.boto3 import Boto3CredentialProvider

        session = botocore.session.Session(profile=profile)
        options: dict[str, Any] = {}
        region = session.get_config_variable("region")
        if region and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(os.environ):
            options["region"] = region
        if profile or session.get_credentials() is not None:
            options["credential_provider"] = Boto3CredentialProvider(session, ttl=_CREDENTIALS_LAST)
        return options
    except ImportError:
        raise DataError(
            "reading the profiles in ~/.aws needs boto3: pip install 'fastsiam[cloud]', or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    except Exception as error:  # botocore's messages name the profile, but contain no keys
        raise DataError(
            f"cannot get AWS credentials from profile {profile or 'default'}: "
            f"{' '.join(str(error).split())}; check ~/.aws, or log in again"
        ) from None


def _final_error(url: Url, error: Exception) -> FastSiamError | None:
    """Return the error to raise for a failed request; None if a retry can help."""
    name, status, reason = type(error).__name__, _status(error), ""
    text = f"{error} {error.__cause__ or ''}"
    if isinstance(error, FileNotFoundError):
        return FileLostError(
            f"{url} was deleted while it was read; restore it, then start the same command again "
            "to resume"
        )
    if name == "PreconditionError" or status in (412, 416):
        return _changed_error(url)
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
    if not reason:
        return None
    return DataError(
        f"cannot read {url}: {reason}; check the address, the permissions and "
        f"{_CREDENTIALS[url.scheme]}"
    )


def _is_denied(error: Exception) -> bool:
    denials = ("PermissionDeniedError", "UnauthenticatedError")
    return type(error).__name__ in denials or _status(error) in (401, 403)


def _changed_error(url: Url) -> FileLostError:
    return FileLostError(
        f"{url} was overwritten while it was read; start the same command again to read the new "
        "version"
    )


def _unreachable_error(url: Url, error: Exception) -> DataError:
    """Return the error for a request that kept failing for ``PATIENCE_SECONDS``."""
    reason = f"the server answers {_status(error)}" if _status(error) else "the connection failed"
    seconds = _seconds(PATIENCE_SECONDS, 120)
    return DataError(
        f"cannot read {url}: {reason}, for {seconds:g} s (${PATIENCE_SECONDS}); check the network "
        "and the address, then start the same command again to resume"
    )


_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID or AWS_PROFILE (a public bucket: AWS_SKIP_SIGNATURE=true)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS (a public bucket: GOOGLE_SKIP_SIGNATURE=true)",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "https": "that the file is public: requests to web servers carry no credentials",
    "http": "that the file is public: requests to web servers carry no credentials",
}


def _status(error: Exception) -> int:
    """Return the HTTP status in an error message of obstore; 0 if it has no status."""
    match = re.search(r"[Ss]tatus(?: ?[Cc]ode)?[:( ]+(\d{3})\b", str(error))
    return int(match[1]) if match else 0


def _seconds(variable: str, default: float) -> float:
    try:
        return float(os.environ.get(variable) or default)
    except ValueError:
        return default
