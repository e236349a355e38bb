"""On ``PYTHONPATH``, Python runs this first: it makes the rank ``$FAULT_RANK`` fail in mid-run.

``$FAULT`` says how; the fault comes after the rank's third step, where the ranks agree to go on.
"""

from __future__ import annotations

import os
import signal
import time


def _fault(*_: object) -> int:
    match os.environ["FAULT"]:
        case "error":
            return 1 // 0
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or it would wait for the next step
            time.sleep(600)
        case name:
            os.kill(os.getpid(), signal.Signals[name])
    raise AssertionError("still here")


if os.environ.get("RANK") == os.environ.get("FAULT_RANK", "none"):
    from fastsiam.distributed import StopSignals

    _agree = StopSignals._agree
    _votes = iter((_agree, _agree, _agree, _fault))
    StopSignals._agree = lambda self, *own: next(_votes)(self, *own)  # type: ignore[assignment, method-assign]
