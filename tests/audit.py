"""Asks whether a package of requirements.lock has a known vulnerability: `python -m tests.audit`.

pip-audit asks PyPI. Where that cannot be reached, nothing is known, which is said and is no error:
a mirror has the packages and may lack the advisories.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements.lock"
_COMMAND = (
    "--requirement", str(LOCK), "--no-deps", "--disable-pip", "--format", "json",
    "--progress-spinner", "off", "--timeout", "5",
)  # fmt: skip
_PATIENCE = 120


def verdict(printed: str, complaint: str) -> tuple[int, str]:
    """Return an exit code and a text for people.

    Args:
        printed: pip-audit's report as JSON; empty if it has none.
        complaint: what it wrote of errors.
    """
    try:
        packages = json.loads(printed)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = next(reversed([x for x in complaint.splitlines() if x.strip()]), "no answer")
        return 0, f"vulnerabilities are not known: PyPI could not be asked ({last[:200]})"
    asked = [one for one in packages if "vulns" in one]
    found = [
        f"{one['name']} {one['version']}: {own['id']}, mended in "
        f"{', '.join(own['fix_versions']) or 'no version yet'}"
        for one in asked
        for own in one["vulns"]
    ]
    if found:
        return 1, "\n".join(found)
    if not asked:
        return 0, "vulnerabilities are not known: PyPI has not answered for any package"
    return 0, f"no known vulnerability in {len(asked):,} of {len(packages):,} packages"


def main() -> int:
    """Ask, and print what is known."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip_audit", *_COMMAND],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
        code, text = verdict(done.stdout, done.stderr)
    except subprocess.TimeoutExpired:
        code, text = verdict("", f"no answer in {_PATIENCE} s")
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
