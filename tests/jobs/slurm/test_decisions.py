"""What the supervisor of a Slurm job decides, fact by fact, and that an old Python can run it."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from dtt.jobs.slurm.job_script import SUPERVISOR
from dtt.jobs.slurm.supervisor import decisions
from dtt.jobs.slurm.supervisor.decisions import LIMIT, Ending

ALICE = "alice: dtt job stop"
FIX = "fix the reported error, then run RESUME"


@pytest.mark.parametrize(
    ("code", "facts", "again", "reason"),
    [
        (0, {}, False, "done"),
        (0, {"asked_by": LIMIT}, False, "done"),
        (0, {"slurm": "cancelled"}, False, "done"),
        (0, {"stage": "pretrain"}, True, "stage pretrain is done"),
        (0, {"stage": "pretrain", "slurm": "preempted"}, True, "preempted, stage pretrain is done"),
        (0, {"stage": "pretrain", "slurm": "cancelled"}, False, "was cancelled"),
        (2, {}, False, FIX),
        (65, {}, False, FIX),
        (66, {}, False, FIX),
        (76, {"asked_by": LIMIT}, False, FIX),
        (130, {}, False, FIX),
        (1, {}, True, "exit code 1"),
        (74, {}, True, "exit code 74"),
        (78, {}, True, "exit code 78"),
        (1, {"asked_by": "slurm: SIGTERM"}, True, "exit code 1"),
        (1, {"slurm": "preempted"}, True, "preempted, exit code 1"),
        (1, {"slurm": "cancelled"}, False, "exit code 1; the job was cancelled"),
        (1, {"slurm": ""}, True, "exit code 1"),
        (None, {}, True, "exit code none"),
        (None, {"asked_by": LIMIT}, True, "exit code none"),
        # a stop request of a user
        (75, {"asked_by": ALICE}, False, "stopped on request"),
        (75, {"asked_by": ALICE, "slurm": "ended"}, False, "stopped on request"),
        (75, {"asked_by": ALICE, "slurm": "preempted"}, False, "stopped on request"),
        (75, {"asked_by": LIMIT, "user_request": True}, False, "stopped on request"),
        (75, {"asked_by": "SIGTERM", "user_request": True, "slurm": ""}, False, "on request"),
        (75, {"asked_by": ""}, False, "stopped on request"),
        # a signal: from a user only if Slurm runs the job as before
        (75, {"asked_by": "SIGTERM"}, False, "stopped on request"),
        (75, {"asked_by": "slurm: SIGTERM"}, False, "stopped on request"),
        (75, {"asked_by": "SIGTERM", "slurm": "preempted"}, True, "preempted, exit code 75"),
        (75, {"asked_by": "SIGTERM", "slurm": "ended"}, True, "exit code 75"),
        (75, {"asked_by": "slurm: SIGTERM", "slurm": "ended"}, True, "exit code 75"),
        (75, {"asked_by": "SIGTERM", "slurm": ""}, True, "exit code 75"),
        (75, {"asked_by": "", "slurm": ""}, True, "exit code 75"),
        (75, {"asked_by": "SIGTERM", "slurm": "cancelled"}, False, "was cancelled"),
        # the time limit
        (75, {"asked_by": LIMIT}, True, "exit code 75"),
        (75, {"asked_by": LIMIT, "slurm": "cancelled"}, False, "was cancelled"),
        # too many attempts
        (1, {"stalled": 2}, True, "exit code 1"),
        (1, {"stalled": 3}, False, "exit code 1; GIVE UP"),
        (75, {"stalled": 3, "asked_by": LIMIT}, False, "exit code 75; GIVE UP"),
        (1, {"stalled": 3, "saved": True}, True, "exit code 1"),
    ],
)
def test_how_an_attempt_ended_decides_whether_the_job_continues(
    code: int | None, facts: dict[str, Any], again: bool, reason: str
) -> None:
    made = decisions.decide(
        Ending(code, 137 if code is None else code, **facts), "RESUME", "GIVE UP"
    )
    assert (made.again, made.code) == (again, 137 if code is None else code)
    assert reason in made.reason
    assert again is False or made.reason == reason
    assert made.heard == ("on request" in reason)


@pytest.mark.parametrize(
    ("record", "state"),
    [
        ({}, ""),
        ({"JobState": "RUNNING"}, ""),
        ({"JobState": "RUNNING", "Reason": "None"}, "running"),
        ({"JobState": "SUSPENDED", "Reason": "None"}, "running"),
        ({"JobState": "CANCELLED", "Reason": "None"}, "cancelled"),
        ({"JobState": "COMPLETING", "Reason": "None"}, "cancelled"),
        ({"JobState": "COMPLETING", "Reason": "NodeDown"}, "ended"),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, "ended"),
        ({"JobState": "NODE_FAIL", "Reason": "NodeDown"}, "ended"),
        ({"PreemptTime": "1100", "StartTime": "1000"}, "preempted"),
        # of an earlier attempt, or of none
        (
            {
                "PreemptTime": "900",
                "StartTime": "1000",
                "JobState": "RUNNING",
                "Reason": "None",
            },
            "running",
        ),
        ({"PreemptTime": "None", "JobState": "RUNNING", "Reason": "None"}, "running"),
    ],
)
def test_the_state_is_derived_from_the_record_of_slurm(record: dict[str, str], state: str) -> None:
    assert decisions.slurm_state(record) == state


@pytest.mark.parametrize(
    ("newest", "saved", "continued", "count"),
    [({"saved": 10, "stalled": 2}, 10, True, 2), ({"saved": 10, "stalled": 2}, 20, True, 0),
     ({"saved": 10, "stalled": 2}, 10, False, 0), ({}, -1, True, 0),
     ({"saved": -1, "stalled": 1}, -1, True, 1), ({"saved": -1, "stalled": "x"}, -1, True, 0)],
)  # fmt: skip
def test_attempts_count_from_the_newest_checkpoint(
    newest: dict[str, Any], saved: int, continued: bool, count: int
) -> None:
    assert decisions.stalled_before(newest, saved, continued) == count


@pytest.mark.parametrize(
    ("now", "end", "lead", "near"),
    [(879, 1000, "120\n", False), (880, 1000, "120\n", True), (499, 1000, "900\n", False),
     (500, 1000, "900\n", True), (999, None, "120\n", False), (999, 1000, "", False),
     (999, 1000, "soon\n", False), (999, 1000, "0\n", False)],
)  # fmt: skip
def test_the_lead_before_the_limit_is_at_most_half_of_the_time(
    now: int, end: int | None, lead: str, near: bool
) -> None:
    assert decisions.limit_is_near(now, 0, end, lead) == near


def test_python_3_6_can_run_it_without_other_packages() -> None:
    allowed = {
        "argparse", "contextlib", "glob", "importlib", "json", "os", "pathlib", "re", "select",
        "shlex", "signal", "socket", "subprocess", "sys", "time", "typing",
    }  # fmt: skip
    for path in SUPERVISOR.glob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 6))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(str(node.module))
            assert set(names) <= allowed, path
