"""The program of the process that makes requests of object storage, by obstore.

obstore's threads do not outlive a fork: a process that is forked from one that has used it waits
for ever. Loaders fork. So obstore is used in no process but this one, which is started anew for
each process that reads, forks nothing, and ends when its pipe does. It imports nothing of the
program, which makes its start short, and runs as a script.

A request is (number, name, arguments). The answer is (number, kind, value). Of the kind "bytes",
the value follows as a message of its own; "value" is a result; any other kind is a ``Failure``'s.
"""

from __future__ import annotations

import configparser
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PARALLEL = 64
"""Requests at a time."""
STALL_SECONDS = "FASTSIAM_CLOUD_STALL"
"""The variable that says how long a request may bring nothing; 10 s if it is not set."""
PATIENCE_SECONDS = "FASTSIAM_CLOUD_PATIENCE"
"""The variable that says for how long failed requests are made again; 120 s if it is not set."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 8.0

Facts = tuple[int, int, str]
"""Of an object: bytes, when it was written (seconds since 1970), etag ("" if it has none)."""
Where = tuple[str, str, str]
"""Scheme, bucket or server, key."""


class Failure(Exception):
    """A request that failed for good.

    Args:
        kind: what became of it: "absent", "missing", "refused", "changed", "no-ranges", "failed".
        reason: why, in words that hold no part of a request: they could hold a signature.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class _Cut(Exception):
    """An answer that holds fewer bytes than it should."""


def main() -> None:
    """Answer the requests that come by the pipe whose number is the program's argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the reader that is told to leave,
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # and the pipe ends with it
    pipe, one_at_a_time = Connection(int(sys.argv[1])), threading.Lock()

    def answer(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            made = patiently(_REQUESTS[name], *arguments)
            kind, value = ("bytes", None) if name == "get" else ("value", made)
        except Failure as failure:
            kind, value = failure.kind, failure.reason
        except BaseException as error:
            kind, value = "failed", type(error).__name__
        with one_at_a_time:
            pipe.send((number, kind, value))
            if kind == "bytes":
                pipe.send_bytes(made)

    with ThreadPoolExecutor(PARALLEL) as pool:
        try:
            while (request := pipe.recv()) is not None:
                pool.submit(answer, *request)
        except (EOFError, OSError):
            pass
        os._exit(0)  # nobody waits for what is under way


def patiently(request: Callable[..., Any], where: Where, *arguments: Any) -> Any:
    """Make a request, again and again with longer and longer pauses while that can help.

    That no credentials are found can pass if there were some: a machine's own are renewed.

    Raises:
        Failure: it cannot help, or patience ends.
    """
    end, pause = time.monotonic() + _seconds(PATIENCE_SECONDS, 120), _FIRST_PAUSE
    while True:
        try:
            made = request(where, *arguments)
            _answered.add(where[:2])
            return made
        except Failure:
            raise
        except Exception as error:
            found = _explained(error)
            wait = pause * random.uniform(0.5, 1.5)  # or all that failed at once come back at once
            helps = found.kind == "failed" or (
                found.reason == _NO_CREDENTIALS and where[:2] in _answered
            )
            if not helps or time.monotonic() + wait > end:
                raise found from error
        time.sleep(wait)
        pause = min(2 * pause, _LONGEST_PAUSE)


def head(where: Where) -> Facts | None:
    """Return the facts of an object, None if there is none."""
    import obstore

    try:
        return _facts(obstore.head(_store(where), where[2]))
    except FileNotFoundError:
        return None


def level(where: Where) -> tuple[dict[str, Facts], list[str]]:
    """List what lies directly below a prefix: objects by their names, and the names of prefixes."""
    import obstore

    try:
        found = obstore.list_with_delimiter(_store(where), where[2] or None)
    except Exception as error:
        raise (Failure("absent", "") if _status(error) == 404 else error) from error
    own = {str(meta["path"]).rpartition("/")[2]: _facts(meta) for meta in found["objects"]}
    return own, [str(path).rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]


def get(where: Where, facts: Facts, start: int, stop: int) -> memoryview:
    """Return a range of the bytes of an object that must have the given facts.

    Raises:
        Failure: it has others.
    """
    import obstore

    found = obstore.get(_store(where), where[2], options={"range": (start, min(stop, facts[0]))})
    if not _are_of_one(_facts(found.meta), facts):
        raise Failure("changed", "")
    data = memoryview(found.bytes())
    if len(data) != stop - start:
        raise _Cut
    return data


_REQUESTS: dict[str, Callable[..., Any]] = {"head": head, "level": level, "get": get}
_answered: set[tuple[str, str]] = set()
"""Buckets and servers that have given something."""
_stores: dict[tuple[str, str], Any] = {}
_making = threading.Lock()


def _are_of_one(one: Facts, other: Facts) -> bool:
    """Tell whether facts are of the same version: by etag, or by time where one has no etag."""
    by = 2 if one[2] and other[2] else 1
    return one[0] == other[0] and one[by] == other[by]


def _facts(meta: Any) -> Facts:
    etag = (meta["e_tag"] or "").removeprefix("W/").strip('"')
    return int(meta["size"]), int(meta["last_modified"].timestamp()), etag


def _store(where: Where) -> Any:
    """Return the client of a bucket or server, made once."""
    scheme, host, _ = where
    with _making:
        if (scheme, host) not in _stores:
            _stores[scheme, host] = _made(scheme, host)
        return _stores[scheme, host]


def _made(scheme: str, host: str) -> Any:
    from obstore import store

    stall = timedelta(seconds=_seconds(STALL_SECONDS, 10))
    how: dict[str, Any] = {
        "client_options": {
            "allow_http": True,  # of those who wrote http://
            "connect_timeout": stall,
            "read_timeout": stall,
            "timeout": 6 * stall,
            "pool_max_idle_per_host": str(PARALLEL),
        },
        "retry_config": {"max_retries": 0},  # ``patiently`` does that, for every kind of failure
    }
    if scheme == "s3":
        return store.S3Store(host, **aws_profile(), **how)
    if scheme == "gs":
        return store.GCSStore(host, **how)
    if scheme == "az":
        return store.AzureStore(host, **how)
    return store.HTTPStore(f"{scheme}://{host}", **how)


def aws_profile() -> dict[str, Any]:
    """Return what the profile of the user's AWS files says that the environment does not.

    The files are those of AWS's own programs. A profile that has no keys of its own, but says how
    to get some (single sign-on, roles), is left to boto3.

    Raises:
        Failure: there is no such profile, or boto3 is missing or gets no keys.
    """
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_SKIP_SIGNATURE" in os.environ:
        return {}
    named = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    profile = named or "default"
    found: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", profile if profile == "default" else f"profile {profile}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(Path(os.environ.get(variable) or f"~/.aws/{file}").expanduser())
        except (OSError, RuntimeError, configparser.Error):
            raise Failure("refused", f"the file of {variable} cannot be read") from None
        if parser.has_section(section):
            found |= dict(parser.items(section))
    if named and not found:
        raise Failure("refused", f"there is no profile {named} in ~/.aws")
    given: dict[str, Any] = {}
    if "region" in found and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(os.environ):
        given["region"] = found["region"]
    if "endpoint_url" in found and not {"AWS_ENDPOINT", "AWS_ENDPOINT_URL"} & set(os.environ):
        given["endpoint"] = found["endpoint_url"]
    if "aws_access_key_id" in found:
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        return given | {name: found[name] for name in names if name in found}
    if _KEPT_ELSEWHERE & set(found):
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider

            return given | {"credential_provider": Boto3CredentialProvider()}
        except Exception:  # it is not installed, or finds nothing
            raise Failure(
                "refused",
                f"the profile {profile} holds no keys, but tells how to get some: pip install "
                "boto3, and log in",
            ) from None
    return given


_KEPT_ELSEWHERE = {"role_arn", "sso_session", "sso_start_url", "credential_process"}
"""What a profile says whose keys are to be had from somebody else."""


def _explained(error: Exception) -> Failure:
    """Tell what became of a request by the error that obstore raised.

    Nothing of the error's text is passed on but a status: it may hold a whole signed request.
    """
    if isinstance(error, FileNotFoundError):
        return Failure("missing", "")
    name, text = type(error).__name__, f"{error} {error.__cause__ or ''}"
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return Failure("refused", "")
    if isinstance(error, _Cut):
        return Failure("failed", "the answer was cut short")
    if name == "NotSupportedError" or "non-partial response" in text or "non partial" in text:
        return Failure("no-ranges", "")
    if re.search(r"169\.254\.169\.254|metadata\.google|MissingAccount|TokenRequest", text):
        return Failure("refused", _NO_CREDENTIALS)
    if code := _status(error):
        if code in (401, 403):
            return Failure("refused", "")
        if code in (301, 307, 308):
            return Failure("refused", "it lies in another region: set AWS_REGION")
        if code == 416:
            return Failure("changed", "")
        kind = "refused" if 400 <= code < 500 and code not in (408, 429) else "failed"
        return Failure(kind, f"the server answers {code}")
    for words, reason in _REASONS:
        if re.search(words, text, re.IGNORECASE):
            return Failure("failed", reason)
    return Failure("failed", "the connection failed")


def _status(error: Exception) -> int:
    """Return the status of an answer that obstore takes for an error, 0 if there was none."""
    found = re.search(r"[Ss]tatus(?: ?[Cc]ode)?[:( ]+(\d{3})\b", str(error))
    return int(found[1]) if found else 0


_NO_CREDENTIALS = "no credentials were found"
_REASONS = (
    ("IncompleteBody|UnexpectedEof", "the answer was cut short"),
    ("certificate", "the server's certificate is not trusted"),
    ("dns|resolve", "the server's name is not known"),
    ("refused", "the server refuses connections"),
    ("timed ?out|timeout", "the server does not answer in time"),
)


def _seconds(variable: str, default: float) -> float:
    try:
        return float(os.environ.get(variable) or default)
    except ValueError:
        return default


if __name__ == "__main__":
    main()
