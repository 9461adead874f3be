"""Decisions about an attempt of a Slurm job, which depend on nothing but their arguments."""

import re
from typing import Any, Dict, NamedTuple, Optional

MAX_STALLED_ATTEMPTS = 3
"""Consecutive attempts without a new checkpoint after which a job gives up."""
LIMIT = "slurm: time limit"
"""Author of a stop request before the time limit. Other requests of the supervisor also start with
`slurm:`."""
CODES = frozenset((0, 1, 2, 65, 66, 74, 75, 76, 78, 130))
"""Exit codes of dtt; any other status comes from a signal, from bash or from Slurm."""
FATAL = frozenset((2, 65, 66, 76, 130))
"""Usage, data, missing input, divergence, Ctrl-C: another attempt would end in the same way."""
MISSING = frozenset((126, 127))
"""Statuses of bash for a program that does not exist or cannot be executed: nor will it later."""
STOPPED = 75
UNFIT = 78


class Ending(NamedTuple):
    """The facts about an attempt that decide whether the job continues."""

    code: Optional[int]  # exit code of dtt; None if the processes left none
    status: int  # exit code of this script unless something else decides it
    asked_by: str = ""  # signal or author of the stop request that the processes followed
    slurm: str = "running"  # see `slurm_state`
    user_request: bool = False  # `control/stop` holds the request of a user
    stalled: int = 1  # consecutive attempts from the same checkpoint, this one included
    saved: bool = False  # there is a new checkpoint
    stage: str = ""  # name of the stage that was trained, if another one follows


class Decision(NamedTuple):
    """The decision that a job continues or ends, with its reason."""

    again: bool
    code: int  # exit code of this script
    reason: str
    heard: bool = False  # the stop request of a user has been followed and must go


def decide(ending: Ending, resume: str, give_up: str) -> Decision:
    """Return whether a job continues after an attempt.

    `resume` is the command that resumes it, `give_up` the reason after too many stalled attempts.
    """
    code = ending.code
    how = "exit code {}".format("none" if code is None else code)
    if code == 0 and not ending.stage:
        return Decision(False, 0, "done")
    if code in FATAL:
        return Decision(False, ending.status, f"{how}: fix the reported error, then run {resume}")
    if code is None and ending.status in MISSING:
        how = f"exit code {ending.status}: a program is missing or cannot be executed"
        return Decision(False, ending.status, f"{how}; see logs/, then run {resume}")
    # Whoever cancels a job does not want it back, however its processes ended.
    if ending.slurm == "cancelled":
        return Decision(False, ending.status, f"{how}; the job was cancelled")
    # Ranks cannot know who sent a signal. It was a user if Slurm runs the job as before. If Slurm
    # does not answer, it may have been a preemption: a job that runs once more does less harm than
    # one that waits unnoticed. A user who asks during the save for a time limit overrides it.
    asked_by = "a user" if ending.user_request else ending.asked_by
    by_user = ending.slurm == "running" or not re.match("SIG|slurm:|$", asked_by)
    if code == STOPPED and asked_by != LIMIT and by_user:
        reason = f"stopped on request with a checkpoint; resume with {resume}"
        return Decision(False, STOPPED, reason, heard=True)
    # A job that never saves would occupy its nodes for ever.
    if not ending.saved and ending.stalled >= MAX_STALLED_ATTEMPTS:
        return Decision(False, ending.status, f"{how}; {give_up}")
    if code == 0:
        how = f"stage {ending.stage} is done"
    # `dtt job status` recognizes a preemption by the first word.
    return Decision(True, ending.status, f"preempted, {how}" * (ending.slurm == "preempted") or how)


def slurm_state(record: Dict[str, str]) -> str:
    """Return `running`, `preempted`, `cancelled` by a user, or `ended` by Slurm itself.

    `record` holds the fields of Slurm's record of this job, with times in seconds. Without one, the
    state is empty.
    """
    # In the grace period of a preemption the job is RUNNING: Slurm signals the ranks but not this
    # script, and does not requeue the job if the ranks end by themselves. A time before the start
    # of this attempt belongs to an earlier one.
    preempted = seconds(record.get("PreemptTime", ""))
    if preempted is not None and preempted >= (seconds(record.get("StartTime", "")) or 0):
        return "preempted"
    state, reason = record.get("JobState", ""), record.get("Reason", "")
    if not state or not reason:
        return ""
    if state in ("RUNNING", "SUSPENDED", "STOPPED"):
        return "running"
    # COMPLETING can mean anything, but Slurm notes a reason only for what it does itself.
    cancelled = state == "CANCELLED" or (state, reason) == ("COMPLETING", "None")
    return "cancelled" if cancelled else "ended"


def stalled_before(newest: Dict[str, Any], saved: int, continued: bool) -> int:
    """Return the number of attempts since the newest checkpoint, from the newest attempt's record.

    `saved` is the step of that checkpoint. A submission by a user starts from 0.
    """
    count = newest.get("stalled")
    same = continued and newest.get("saved") == saved
    return count if same and isinstance(count, int) else 0


def limit_is_near(now: float, start: float, end: Optional[int], lead: str) -> bool:
    """Return True if the job must be asked to stop, with the lead that it has measured.

    Slurm's own signal uses the lead that was known at submission.
    """
    measured = seconds(lead.strip())
    if end is None or not measured:
        return False
    # A lead of more than half would leave less time to train than to stop.
    return now >= end - min(measured, (end - start) / 2)


def seconds(text: str) -> Optional[int]:
    """Return a time or duration in seconds; None for others, such as `Unknown`."""
    return int(text) if re.match("[0-9]{1,18}$", text) else None
