"""Ask pip-audit for known vulnerabilities of requirements.lock: `python -m tests.audit`.

The exit code is 1 if there are some. It is 0 if PyPI does not answer: a mirror has the packages but
may lack the advisories, and then nothing is known.
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


def verdict(report: str, errors: str) -> tuple[int, str]:
    """Return an exit code and a message.

    Args:
        report: pip-audit's output, JSON; empty if it failed.
        errors: its error output.
    """
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (errors.strip().splitlines() or ["no answer"])[-1]
        return 0, f"vulnerabilities are not known: PyPI cannot be reached ({last[:200]})"
    answered = [package for package in packages if "vulns" in package]
    vulnerable = [
        f"{package['name']} {package['version']}: {one['id']}, fixed in "
        f"{', '.join(one['fix_versions']) or 'no version yet'}"
        for package in answered
        for one in package["vulns"]
    ]
    if vulnerable:
        return 1, "\n".join(vulnerable)
    if not answered:
        return 0, "vulnerabilities are not known: PyPI knows none of the packages"
    return 0, f"no known vulnerability in {len(answered):,} of {len(packages):,} packages"


def main() -> int:
    """Run pip-audit and print the verdict."""
    command = [sys.executable, "-m", "pip_audit", *_COMMAND]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
        code, text = verdict(done.stdout, done.stderr)
    except subprocess.TimeoutExpired:
        code, text = verdict("", f"no answer in {_PATIENCE} s")
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
