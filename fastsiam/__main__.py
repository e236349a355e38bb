"""Entry point of ``python -m fastsiam``, which torchrun starts on every rank."""

from fastsiam.cli import main

if __name__ == "__main__":
    main()
