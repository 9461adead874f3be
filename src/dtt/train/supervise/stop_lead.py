"""The time before a limit of the job at which a run must be asked to save and stop."""

from __future__ import annotations

from collections import deque

from dtt.artifacts.jobdir import JobDir
from dtt.base.log import log
from dtt.base.reading import waiting_for_space
from dtt.mesh.process import in_words

RECENT = 10
"""Number of most recent log lines and saves of which the slowest counts."""


class StopLead:
    """The duration of the slowest recent step and save, which a job script reads from a file."""

    def __init__(self, job: JobDir, after_save: float = 0.0) -> None:
        """Create the record of `job`, without durations.

        After its last save, a run that stops may go on for `after_save` seconds.
        """
        self._job, self._after_save = job, after_save
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._saves: deque[float] = deque(maxlen=RECENT)

    @property
    def slowest_save(self) -> float:
        """The seconds of the slowest recent save, until it was verified."""
        return max(self._saves)

    def add_step(self, seconds: float) -> None:
        """Add the seconds per step of a log line."""
        self._steps.append(seconds)

    def add_save(self, seconds: float) -> None:
        """Add the seconds of a save, until it was verified."""
        self._saves.append(seconds)

    def write(self) -> None:
        """Write the file; call it after a save.

        On a full disk it logs a warning at once, and the next save writes the file again: waiting
        for space, or ending the run, is up to the checkpoints.
        """
        try:
            with waiting_for_space(None):
                save = self.slowest_save + self._after_save
                self._job.write_lead(max(self._steps, default=0.0), save)
        except OSError as error:
            log.warning("lead is not up to date: %s", in_words(error))
