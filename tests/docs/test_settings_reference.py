"""The page of all settings is the one that the script prints."""

from __future__ import annotations

import subprocess
import sys

from fastsiam.config.train import train_settings
from tests.conftest import ROOT


def test_page_of_settings_is_current() -> None:
    """If not: python docs/scripts/settings.py > docs/settings-reference.md."""
    page = (ROOT / "docs" / "settings-reference.md").read_text()
    command = [sys.executable, "docs/scripts/settings.py"]  # other tests may register methods here
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert page == printed
    for name, one in train_settings().items():
        assert f"| `--{one.flag}` |" in page if one.option else f"| `{name}` |" in page
