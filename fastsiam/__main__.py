"""Entry point of ``fastsiam`` and ``python -m fastsiam``, which torchrun starts on every rank."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is imported ends the program without a traceback."""
    try:
        from fastsiam.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
