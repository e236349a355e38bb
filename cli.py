"""Run fastsiam from a checkout without installing it: ``python cli.py train --help``."""

from fastsiam.__main__ import main

if __name__ == "__main__":
    main()
