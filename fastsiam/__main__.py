"""Entry point of ``fastsiam`` and ``python -m fastsiam``; torchrun runs it on every rank."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C during its import exits without a traceback."""
    try:
        from fastsiam.cli import main
    except KeyboardInterrupt:
        sys.exit(130)  # SIGNALLED + SIGINT, without further imports
    main()


if __name__ == "__main__":
    main()
