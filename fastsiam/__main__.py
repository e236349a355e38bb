"""Entry point of ``fastsiam`` and ``python -m fastsiam``; torchrun runs it on every rank."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C before and after the command exits without a traceback."""
    try:
        from fastsiam.cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)  # SIGNALLED + SIGINT, without further imports


if __name__ == "__main__":
    main()
