"""Metrics of the steps since the last call."""

from __future__ import annotations

from dtt.track.base import Record
from dtt.train.actions.action import StepAction, Stop, every
from dtt.train.components import Run
from dtt.train.state import Position


class Log(StepAction):
    """Speed, epochs and finished saves, every `train.log_every` steps."""

    name = "log"

    def rule(self, position: Position) -> bool:
        """Return True for each position after which it runs."""
        period = every(self.cfg.train.log_every, position)
        return position.step > 0 and (period or position.step == self.steps())

    def work(self, run: Run, stop: Stop) -> list[Record]:
        """Return the metrics since the last call."""
        step, meter = run.position.step, run.observers.meter
        startup = run.observers.time_breakdown.startup_record(meter)
        reading = meter.read()
        run.observers.time_breakdown.write(step, meter)
        run.stop_lead.add_step(reading["seconds_per_step"] or 0.0)
        steps = run.schedule.expected_steps(step)
        run.watchdog.expect(steps)
        epochs = run.dataset.epochs(run.position.samples)
        return [
            *([] if startup is None else [startup]),
            {"kind": "perf", "step": step, "steps": steps, **reading},
            {"kind": "data", "step": step, "epochs": epochs},
            *finished_saves(run),
        ]


def finished_saves(run: Run) -> list[Record]:
    """Return the `save` records of the saves that have finished since the last call."""
    saves, stop_lead = run.saver.finished(), run.stop_lead
    records = []
    for saved in saves:
        following, during = run.observers.meter.slowdown(saved.began, saved.ended)
        slowdown = {"next_step_slowdown": following, "slowdown": during}
        records.append({"kind": "save", **saved.record(), **slowdown})
        stop_lead.add_save(saved.blocked_seconds + saved.write_seconds + saved.verify_seconds)
    if saves and run.world.first:
        run.schedule.record_save(stop_lead.slowest_save)
        stop_lead.write()
    return records
