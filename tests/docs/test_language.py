"""Pages, docstrings, comments and messages avoid phrases that read as translated."""

from __future__ import annotations

import re
import subprocess

from tests.conftest import ROOT

BANNED = {
    r"\b(goes|go|gone|going) on\b": "resume, continue",
    r"\banew\b": "again, new",
    r"\bof ours\b": "fastsiam's",
    r"\bsuch of\b": "name the things",
    r"\bwhoever\b": "name the person or program",
    r"\bbut for\b": "except for",
    r"\bfor want of\b": "because no ... is available",
    r"\bin the (place|stead) of\b": "instead of",
    r"\bin the midst\b": "in the middle, halfway",
    r"\bin vain\b": "say what did not happen",
    r"\bput aside\b": "renamed, moved",
    r"\b(is|are) none\b": "say what is missing",
    r"\bwhat (is said|there is to)\b": "message, text",
    r"\b(what )?becomes? of\b": "say what happens",
    r"\b(hence|thereby|thereof)\b": "so",
    r" (colors?|center crops?|organized)[ ,.;)]": "British spelling",
}
"""Patterns of phrases, and what to write instead. Case-sensitive: ``is None`` is code."""
THIS_FILE = "tests/docs/test_language.py"


def test_banned_phrases_are_absent() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.toml"], cwd=ROOT, capture_output=True, text=True
    )
    if tracked.returncode:
        pages = (str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
        tracked.stdout = "\n".join(pages)
    matches = []
    for name in tracked.stdout.split():
        if name not in (THIS_FILE, "CHANGELOG.md") and (ROOT / name).is_file():
            text = (ROOT / name).read_text("utf-8")
            for phrase, instead in BANNED.items():
                for match in re.finditer(phrase, text):
                    line = text.count("\n", 0, match.start()) + 1
                    matches.append(f"{name}:{line}: {match[0]!r} ({instead})")
    assert not matches, "\n".join(matches)
