"""One attempt of a Slurm job, from its start to the decision whether the job continues."""

import argparse
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from shlex import quote
from typing import List, Optional, Sequence, Tuple

from .decisions import (
    CODES,
    FATAL,
    LIMIT,
    MAX_STALLED_ATTEMPTS,
    MISSING,
    STOPPED,
    UNFIT,
    Decision,
    Ending,
    decide,
    limit_is_near,
    seconds,
    slurm_state,
    stalled_before,
)
from .node_scripts import EVERY_NODE, FIRST_NODE, RANKS
from .tolerant_io import (
    attempt_record,
    finished_bytes,
    first_free_port,
    largest,
    link,
    message,
    nodes_of_job,
    read,
    remove,
    reported,
    run,
    slurm_record,
    write,
)

TICK = 5.0
"""Seconds between looks at the clock and at the file `lead`."""

STOPS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGQUIT)


class Supervisor:
    """One attempt of a job, from its start to the decision whether the job continues."""

    def __init__(self, plan: argparse.Namespace, command: List[str]) -> None:
        env = os.environ
        self.plan, self.command = plan, command
        self.trains = command[0] == "train"
        self.job = Path(plan.job)
        self.resume = f"sbatch {plan.job}/slurm.sh"
        number, self.restarts = int(env["SLURM_JOB_ID"]), int(env.get("SLURM_RESTART_COUNT") or 0)
        self.id = str(number)
        if plan.trials:  # whose last task has the id of the array as its SLURM_JOB_ID
            self.id = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**env)
            self.job = Path(plan.trials[int(env["SLURM_ARRAY_TASK_ID"])])
            self.resume = f"dtt sweep retry {Path(plan.job).name} {self.job.name}"
        elif plan.stages and self.trains:  # the first stage that is not done, or the last one
            stages = [Path(stage) for stage in plan.stages]
            waiting = [stage for stage in stages if attempt_record(stage).get("code") != 0]
            self.job = (waiting or stages[-1:])[0]
        self.nodes = nodes_of_job()
        self.variables = {  # of the shells on the nodes, where their names start with `_dtt_`
            "directory": str(Path.cwd()),
            "job": str(self.job),
            "tag": f"{number}-r{self.restarts}",
            "host": self.nodes[0],
            "port": str(first_free_port(10000 + (number + 7919 * self.restarts) % 20000)),
        }
        self.stop = self.job / "control/stop"
        self.stop_reason = ""  # of a request by this supervisor
        self.step: Optional["subprocess.Popen[bytes]"] = None
        # Python writes the number of each signal into the pipe. A handler that acted at once would
        # interrupt decisions, and a signal that comes before anybody waits would be lost.
        self.signals, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for kind in (*STOPS, signal.SIGCHLD):
            signal.signal(kind, lambda number, frame: None)

    def supervise(self) -> int:
        """Run the attempt; return the exit code of the script."""
        for name in ("logs", "control"):
            with reported(self.job / name):
                (self.job / name).mkdir(parents=True, exist_ok=True)
        newest = attempt_record(self.job)
        # Another job may run in the directory: its attempt has no decision yet. Two jobs would
        # overwrite each other's checkpoints.
        other = str(newest.get("slurm") or self.id)
        undecided = other != self.id and "decision" not in newest
        running = ("RUNNING", "SUSPENDED", "STOPPED")
        if undecided and slurm_record(other).get("JobState") in running:
            message(f"{self.job} is used by job {other}: this job ends")
            return UNFIT
        log = "{}/logs/{}-{}.log".format(self.plan.job, os.environ["SLURM_JOB_NAME"], self.id)
        link(self.job / "logs/latest-slurm.log", os.path.relpath(log, str(self.job / "logs")))
        self._remove_own_request()
        self.before = self._saved_steps()
        continued = self.restarts > 0
        if self.plan.progress:  # files that are begun anew are no progress
            most = newest.get("saved") if continued else 0
            self.before = max(self.before, most if isinstance(most, int) else 0)
        self.stalled = stalled_before(newest, self.before, continued)
        # `dtt job status` recognizes "N consecutive attempts".
        self.give_up = "{} consecutive attempts {}: see logs/latest.log, then run {}".format(
            MAX_STALLED_ATTEMPTS,
            "without a new checkpoint" if self.trains else "finished nothing more",
            self.resume,
        )
        if self.stalled >= MAX_STALLED_ATTEMPTS:
            return self._end(Decision(False, 1, self.give_up))
        self.stalled += 1
        if not self._begin():
            return UNFIT
        self.start, self.limit = time.time(), None if self.plan.fixed_lead else self._time_limit()
        return self._carry_out(decide(self._run(), self.resume, self.give_up))

    def _begin(self) -> bool:
        """Record the start of an attempt; return False if another job has just started it.

        Rank 0 adds the facts about the ranks. Recorded before the set-up of the nodes, so that
        attempts are counted whose node dies in it.
        """
        attempt = self.job / "attempts" / str(max(largest(self.job / "attempts"), 0) + 1)
        try:
            attempt.mkdir(parents=True)
        except FileExistsError:
            message(f"another job has started {attempt}: this job ends")
            return False
        except OSError as error:  # a full disk is for the checkpoints to report
            message(f"cannot create {attempt}: {error}")
            return True
        start = {
            "started": time.time(), "slurm": self.id, "restarts": self.restarts,
            "host": self.nodes[0], "pid": os.getpid(), "ranks": 0, "launch": "",
            "saved": self.before, "stalled": self.stalled,
        }  # fmt: skip
        write(attempt / "attempt.json", json.dumps(start, indent=1) + "\n")
        return True

    def _update(self, **facts: object) -> None:
        """Add facts to the record of the newest attempt, if there is one."""
        number = largest(self.job / "attempts")
        if number > 0:
            record = json.dumps(dict(attempt_record(self.job), **facts), indent=1)
            write(self.job / f"attempts/{number}/attempt.json", record + "\n")

    def _saved_steps(self) -> int:
        """Return a number that grows with every result from which the next attempt can start."""
        if self.trains:
            return largest(self.job / "checkpoints", "step-")
        return finished_bytes(self.plan.progress)

    def _time_limit(self) -> Optional[int]:
        return seconds(slurm_record(self.id).get("EndTime", ""))

    # ---- processes ------------------------------------------------------------------------------

    def _run(self) -> Ending:
        """Run the command; return how it ended, and record that unless the ranks have done so."""
        status = 0
        if self.plan.preflight:
            device = ["--device", "cpu"] if self.plan.preflight == "cpu" else []
            status = self._launch("preflight", ["doctor", *device, "--path", str(self.job)])
        if status == 0:
            job = [str(self.job)] if self.trains else []
            status = self._launch(self.command[0], [*self.command, *job])
        elif status not in MISSING:  # whatever else the test ends with, the node is unfit
            status = UNFIT
        record = attempt_record(self.job)
        code = record.get("code")
        if isinstance(code, int):  # torchrun exits with 1 after any failure, srun may with 0
            status = code
        elif self.trains and record.get("ranks"):  # killed: the status is not that of dtt
            code = None
        else:
            code, status = self._record_end(status)
        asked_by = str(attempt_record(self.job).get("asked_by") or "")
        stages = self.plan.stages if self.trains else []
        stage = self.job.name if stages and str(self.job) != stages[-1] else ""
        # Slurm is asked only if it matters: a controller that does not answer costs a minute.
        final = code in FATAL or (code == 0 and not stage)
        saved = self._saved_steps()
        return Ending(
            code, status, asked_by,
            slurm="" if final else slurm_state(slurm_record(self.id)),
            user_request=self._user_asked(),
            stalled=self.stalled,
            saved=saved != self.before if self.trains else saved > self.before,
            stage=stage,
        )  # fmt: skip

    def _record_end(self, status: int) -> Tuple[Optional[int], int]:
        """Record how an attempt ended that no rank of a training has started.

        Return the exit code of dtt, None if there is none, and that of this script.
        """
        code = status if status in CODES and (status or not self.trains) else None
        if code is None and self.stop_reason and not self.trains:
            code = status = STOPPED  # it died of the signal; finished work is kept
        reason = "done" if code == 0 else f"exit code {status}: see logs/latest.log"
        if code == STOPPED:
            reason = "stopped by {}".format(self.stop_reason or "a request")
            if self.command[0] == "eval":  # it may only have waited, which is no failure
                self.stalled = 0
        self._update(
            ended=time.time(), code=1 if code is None else code, reason=reason,
            step=None, rank=0, node=self.nodes[0], checkpoint=None, asked_by=self.stop_reason,
            stalled=self.stalled,
        )  # fmt: skip
        return code, status

    def _launch(self, name: str, arguments: Sequence[str]) -> int:
        """Run dtt on all nodes; return the exit code of the launcher. Each node has its own log."""
        log = "{}-{}".format(name, self.variables["tag"])
        for node in self.nodes:
            link(self.job / f"logs/latest-{node}.log", f"{log}-{node}.log")
        latest = self.job / "logs/latest.log"
        link(latest, f"{log}-{self.nodes[0]}.log")
        message("{} on {}: see {}".format(name, os.environ.get("SLURM_JOB_NODELIST"), latest))
        # As text: a cluster may be configured not to pass exported functions on to the nodes.
        shell = self._shell(log)
        every_node = shell + EVERY_NODE + RANKS * self.trains + '_dtt_program "$@"\n'
        words = ["bash", "-c", shell + FIRST_NODE, "bash", every_node, "bash", "dtt.main"]
        try:
            self.step = subprocess.Popen([*words, *arguments])
        except OSError as error:  # no memory for another process
            message(f"cannot start bash: {error}")
            return UNFIT
        while self.step.poll() is None:  # SIGCHLD ends the wait, too
            if select.select([self.signals], [], [], TICK)[0]:
                self._answer(os.read(self.signals, 4096))
            lead = read(self.job / "lead") if self.limit else ""
            if limit_is_near(time.time(), self.start, self.limit, lead):
                before, self.limit = self.limit, self._time_limit()  # a user may have changed it
                if self.limit == before:
                    self.limit = None
                    self._on_limit()
        while select.select([self.signals], [], [], 0)[0]:
            self._answer(os.read(self.signals, 4096))
        code = self.step.returncode
        return code if code >= 0 else 128 - code  # as bash counts

    def _shell(self, log: str) -> str:
        variables = dict(self.variables, log=log).items()
        assignments = "".join(f"_dtt_{name}={quote(text)}\n" for name, text in variables)
        # The claim of a rank that srun starts without the variables that sbatch sets.
        supervised = "export DTT_SUPERVISED={}\n".format(os.environ["SLURM_JOB_ID"])
        return f"{supervised}{assignments}{self.plan.functions}\n"

    # ---- stop requests --------------------------------------------------------------------------

    def _answer(self, numbers: bytes) -> None:
        for number in numbers:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self._on_limit()
            if number in (signal.SIGTERM, signal.SIGQUIT):
                message("received " + signal.Signals(number).name)
                self._request_stop("slurm: SIGTERM")

    def _on_limit(self) -> None:
        if not self.stop_reason:
            message("time limit reached soon: requesting a checkpoint and stop")
            self._request_stop(LIMIT)

    def _request_stop(self, reason: str) -> None:
        """Ask the processes to save and stop.

        Training reads a file, so that all ranks stop after the same step, and no launcher has to
        pass a signal on. The other commands handle SIGTERM.
        """
        if self.stop_reason or os.path.exists(str(self.stop)):  # Path.exists may raise
            return
        self.stop_reason = reason
        write(self.stop, reason + "\n")
        if self.trains or self.step is None:
            return
        if self.plan.mpirun:
            self.step.terminate()
        else:  # to the processes: srun would answer a signal with SIGKILL
            run("scancel", "--signal=TERM", self.id)

    def _user_asked(self) -> bool:
        return os.path.isfile(str(self.stop)) and not read(self.stop).startswith("slurm:")

    def _remove_own_request(self) -> None:
        """Remove a request of this script that no process has read: the next attempt would."""
        if not self._user_asked():
            remove(self.stop)

    # ---- the end --------------------------------------------------------------------------------

    def _carry_out(self, decision: Decision) -> int:
        """Let the job continue or end; return the exit code of the script."""
        if decision.heard:
            remove(self.stop)
        if not decision.again:
            return self._end(decision)
        how, resume = decision.reason, f"resume with {self.resume}"
        if self.plan.continuation == "none":
            return self._end(decision._replace(reason=f"{how}; {resume}"))
        self._record("again", f"{how}; requeued")
        while run("scontrol", "requeue", self.id) is None:
            state = slurm_state(slurm_record(self.id))
            if state == "ended":  # a node failed: Slurm has requeued the job by itself
                break
            if state:
                return self._end(decision._replace(reason=f"cannot be requeued; {resume}"))
            time.sleep(10)  # the controller is restarting
        return decision.code

    def _end(self, decision: Decision) -> int:
        self._record("over", decision.reason)
        # Nothing depends on the page: it comes last and may fail. A run that is done has one.
        if self.plan.report and decision.code and largest(self.job / "attempts") >= 0:
            command = f"timeout 120 python -m dtt.main report {quote(str(self.job))}"
            path = self.job / "logs/report.log"
            with reported(path), path.open("ab") as log:
                shell = f"{self._shell('report')}_dtt_set_up && {command}"
                subprocess.call(["bash", "-c", shell], stdout=log, stderr=log)
        return decision.code

    def _record(self, word: str, reason: str) -> None:
        """Record whether the job continues, for the log and `dtt job status`."""
        for number in STOPS:  # a requeue sends them, too
            signal.signal(number, signal.SIG_IGN)
        message(reason)
        self._remove_own_request()
        self._update(decision=f"{word}: {reason}", decided=time.time())


def main(argv: List[str]) -> int:
    """Supervise the attempt that the arguments describe; return the exit code of the script."""
    split = argv.index("--")
    parser = argparse.ArgumentParser(usage="supervisor OPTIONS -- COMMAND [ARGUMENT]...")
    parser.add_argument("--job", required=True, help="job directory; for an array, its parent")
    parser.add_argument("--functions", required=True, help="the functions of the job script")
    parser.add_argument("--continuation", choices=("requeue", "none"), required=True)
    parser.add_argument("--trials", nargs="*", default=[], help="job directories of an array")
    parser.add_argument("--stages", nargs="*", default=[], help="job directories of all stages")
    parser.add_argument("--progress", action="append", default=[], help="pattern of finished work")
    parser.add_argument("--preflight", help="test all processes before training: `cpu` or `gpu`")
    parser.add_argument("--fixed-lead", action="store_true", help="do not read the file `lead`")
    parser.add_argument("--mpirun", action="store_true", help="mpirun starts the processes")
    parser.add_argument("--report", action="store_true", help="write the page of a run that failed")
    plan = parser.parse_args(argv[:split])
    if "SLURM_JOB_ID" not in os.environ:
        parser.error(f"not a Slurm job: run sbatch {plan.job}/slurm.sh")
    return Supervisor(plan, argv[split + 1 :]).supervise()
