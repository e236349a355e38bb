"""Check requirements.lock for known vulnerabilities with pip-audit: `python -m tests.audit`.

The exit code is 1 if a package is vulnerable. It is 0 if PyPI does not answer: a mirror serves the
packages, but may lack the advisories.
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


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", *_COMMAND]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        packages = json.loads(result.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        print(f"cannot check for vulnerabilities: PyPI does not answer ({error})")
        return 0
    answered = [package for package in packages if "vulns" in package]
    vulnerable = [package for package in answered if package["vulns"]]
    for package in vulnerable:
        for one in package["vulns"]:
            versions = ", ".join(one["fix_versions"]) or "no version yet"
            print(f"{package['name']} {package['version']}: {one['id']}, fixed in {versions}")
    print(f"PyPI has {len(answered)} of {len(packages)} packages; vulnerable: {len(vulnerable)}")
    return int(bool(vulnerable))


if __name__ == "__main__":
    sys.exit(main())
