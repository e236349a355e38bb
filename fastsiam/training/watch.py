"""Says and writes down the alarms of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastsiam.console import Console
from fastsiam.training.alarms import Alarms
from fastsiam.training.log import MetricsLog
from fastsiam.training.vitals import VitalSigns


class Watch:
    """Looks at the run and its machine at each log point, on rank 0.

    Args:
        log: of the run, which holds the alarms that it has said already.
        console: where they are said.
        device: what trains.
    """

    def __init__(self, log: MetricsLog, *, console: Console, device: torch.device) -> None:
        self._log, self._console = log, console
        self._signs = VitalSigns(log.path.parent, device)
        self._alarms = Alarms(log.alarms)

    def look(self, values: Mapping[str, Any]) -> None:
        """Take a log point's values, as they were written; warn of what is wrong."""
        for alarm in self._alarms.note(values, self._signs.read()):
            self._log.write("alarm", alarm.record())
            self._console.warn(alarm.text)
