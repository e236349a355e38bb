"""``python -m fastsiam``: what torchrun starts on every rank."""

from fastsiam.cli import main

if __name__ == "__main__":
    main()
