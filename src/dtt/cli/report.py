"""The command `dtt report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Port, argument, option


@cli.command(
    "dtt report jobs/run",
    "dtt report jobs/run jobs/stories --out compare.html",
    "dtt report jobs/lr           # a sweep: its table, and a plot for each key",
    "dtt report --serve           # live, all jobs in jobs/",
)
def report(
    jobs: Annotated[
        list[Path] | None, argument("[JOB]…", "Job directories, sweeps, or folders of stages.")
    ] = None,
    out: Annotated[
        Path | None,
        option("File to write; default: report.html in the job directory.", metavar="FILE"),
    ] = None,
    serve: Annotated[bool, option("--serve", "Serve live pages on 127.0.0.1 instead.")] = False,
    port: Port = 0,
) -> None:
    """Write a report: curves, tasks, time, interruptions, samples, configuration.

    The report is one HTML file that opens without a network or a server. With --serve, the pages
    follow running jobs. The address that it prints contains a random token, without which the
    server refuses every request.
    """
    from dtt.base.errors import ConfigError
    from dtt.report import run as body

    if not serve:
        body.write(jobs or [], out)
        return
    if out is not None:
        raise ConfigError("--serve and --out are mutually exclusive")
    body.serve(jobs or [], port)
