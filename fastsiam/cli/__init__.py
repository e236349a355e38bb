"""The command line: connects options to functions. Each module has commands of one topic.

Only the commands that need torch import it, so that ``--help`` is fast.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

import fastsiam
from fastsiam.child_process import begin, is_worker
from fastsiam.cli import bench, convert, evaluate, export, inspection, study, train
from fastsiam.cli.options import Commands
from fastsiam.errors import ERROR, RANK_LOST, SIGNALLED, FastSiamError, Interrupted, OtherRankError
from fastsiam.files import reason

_EXIT_DELAY = 0.5
"""Seconds that a rank waits before it exits because another rank is gone, or, except for the first
rank of a machine, before it prints its error. The launcher polls ten times a second, reports the
rank that it sees exit first and ends the others."""

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Line breaks and other control characters, which file names may contain."""

app = Commands(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich truncates option names at 80 columns
    help="SimSiam pre-training at the speed of the hardware.",
)
for _commands in (train, evaluate, export, inspection):
    app.add_typer(_commands.app)
app.add_typer(convert.app, name="convert")
app.add_typer(evaluate.measures, name="eval")
app.add_typer(bench.app, name="bench")
app.add_typer(study.app, name="study")


def main() -> None:
    """Run the command line. An expected error is printed as one line, with exit code 1.

    If one of several ranks fails, it exits at once. Otherwise the interpreter would wait for NCCL,
    NCCL for the other ranks, and they for this one.
    """
    _open_closed_streams()
    if isinstance(out := sys.stdout, io.TextIOWrapper):
        # Names in settings and paths need not be ASCII, and paths need not be UTF-8.
        out.reconfigure(encoding="utf-8", errors="surrogateescape")
        if "write" not in vars(out):
            vars(out).update(write=_reporting(out.write), flush=_reporting(out.flush))
    sys.unraisablehook = _repeat_interrupt
    begin()
    try:
        _run()
    except BaseException as error:
        is_success = isinstance(error, SystemExit) and not error.code
        if is_success or not is_worker():
            raise
        _exit_immediately(error)


def _repeat_interrupt(ignored: sys.UnraisableHookArgs) -> None:
    """Send Ctrl-C again if it was ignored because it came while a finalizer ran."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(ignored)


def _open_closed_streams() -> None:
    """Open standard output and error as ``/dev/null`` if the program was started without them.

    Otherwise the next opened file would get their descriptors, and libraries would write to it.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            _discard(number)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _discard(number: int) -> None:
    """Redirect a file descriptor to ``/dev/null``."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _reporting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of standard output, so that write errors are reported in one line.

    If the reader of a pipe is gone, the program exits silently.
    """

    def call(*text: str) -> Any:
        if text == ("",):  # a probe of Typer, which ignores the error of a full disk
            return 0
        try:
            return method(*text)
        except OSError as error:
            _discard(1)  # otherwise the interpreter would try again at exit
            if error.errno == errno.EPIPE:
                sys.exit(ERROR)
            raise FastSiamError(f"cannot write to standard output: {reason(error)}") from error

    return call


def _run() -> None:
    """Run the command line; print expected errors, and exit with their exit codes."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except Interrupted as error:
        if os.environ.get("RANK", "0") == "0":
            _say(error)
        sys.exit(error.exit_code)
    except OtherRankError:
        from fastsiam.distributed import wait_for_failed_rank

        wait_for_failed_rank()
        sys.exit(RANK_LOST)
    except FastSiamError as error:
        if os.environ.get("FASTSIAM_DEBUG"):
            raise
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_EXIT_DELAY)  # if the first rank fails too, the launcher ends this one
        _say(error, "error: ")
        sys.exit(ERROR)
    except RuntimeError as error:
        from fastsiam.distributed import peer_is_gone, peer_is_late

        late = peer_is_late(error)
        if not late and not peer_is_gone(error):
            raise
        if os.environ.get("FASTSIAM_DEBUG"):
            traceback.print_exc()
        if late:
            _say(
                "another rank did not answer within --rank-timeout; see the messages of the other "
                "ranks, or pass a longer --rank-timeout if one was only slow",
                "error: ",
            )
        time.sleep(_EXIT_DELAY)
        sys.exit(RANK_LOST)


def _say(error: object, prefix: str = "") -> None:
    """Print an error's message, followed by its notes in brackets."""
    notes = [f"({note})" for note in getattr(error, "__notes__", ())]
    with contextlib.suppress(OSError):  # an unwritable log must not change the exit code
        print(_escape(" ".join([f"{prefix}{error}", *notes])), file=sys.stderr)


def _escape(text: str) -> str:
    """Replace control characters by their escape sequences."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


class _LogFormatter(logging.Formatter):
    """Formats each message of fastsiam as one line of printable text."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escape(record.message) if record.name.startswith("fastsiam.") else record.message


def _exit_immediately(error: BaseException) -> NoReturn:
    """Exit without cleanup, with the exit code that the interpreter would have used."""
    code: object = SIGNALLED + signal.SIGINT if isinstance(error, KeyboardInterrupt) else ERROR
    try:
        if isinstance(error, SystemExit):
            code = error.code or 0
        else:
            rank, trace = os.environ.get("RANK", "0"), "".join(traceback.format_exception(error))
            # in one write, because other ranks may write too
            sys.stderr.write(f"rank {rank} failed with an unexpected error\n{trace}")
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 1)


def _version(show: bool) -> None:
    if show:
        print(f"fastsiam {fastsiam.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if os.environ.get("RANK", "0") == "0":
        handler = logging.StreamHandler()
        handler.setFormatter(_LogFormatter())
        logging.basicConfig(handlers=[handler])
        logging.getLogger("fastsiam").setLevel(logging.INFO)
