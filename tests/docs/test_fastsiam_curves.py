"""The results page has the table that the script computes from the records."""

from __future__ import annotations

import runpy

from tests.conftest import ROOT


def test_results_page_contains_table_of_records() -> None:
    script = runpy.run_path(str(ROOT / "docs/scripts/fastsiam_curves.py"))
    assert script["table"]() in (ROOT / "docs" / "results.md").read_text()
