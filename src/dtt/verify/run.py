"""`dtt verify`: compare the layouts of a run with one process, and name what differs."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dtt.base.errors import ConfigError, DttError, EnvironmentUnfit, ExitCode
from dtt.base.log import log
from dtt.config.key_types import tag_of
from dtt.config.own import is_own
from dtt.config.run import RunConfig
from dtt.verify import layouts, shrink
from dtt.verify.layouts import Layout

if TYPE_CHECKING:
    from dtt.verify.differences import Checked
    from dtt.verify.layout_runs import LayoutRuns

LETTERS = "DLGNURSX"
UNSEEN = "samples and answers of a run", "races between GPUs", "real sizes", "speed"
"""What no comparison of small runs shows."""
UNSEEN_ON_CPU = "kernels of a GPU, among them FlexAttention", "bf16", "NCCL"


class Wrong(DttError):
    """A layout that does not compute what one process computes."""

    exit_code = ExitCode.BUG


@dataclass
class Verification:
    """The result for one configuration."""

    name: str
    cfg: RunConfig
    small: shrink.Small
    most: int
    """Most processes of a layout."""
    found: dict[Layout, Checked] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> Layout | None:
        """The first layout that differs, which has the fewest ranks."""
        return next((x for x, one in self.found.items() if one.difference is not None), None)

    @property
    def not_covered(self) -> list[str]:
        """The limits of the comparison, in words."""
        cpu = UNSEEN_ON_CPU if self.small.run.train.device == "cpu" else ()
        return [*layouts.not_covered(self.cfg, self.most), *self.small.notes, *cpu, *UNSEEN]

    def facts(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        rows = [
            {
                "layout": layout.name,
                "ranks": layout.ranks,
                "noise": one.noise,
                "difference": one.difference and one.difference.facts(),
            }
            for layout, one in self.found.items()
        ]
        return {
            "name": self.name, "verified": self.failed is None, "layouts": rows,
            "not_covered": self.not_covered, "seconds": round(self.seconds, 1),
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield the table and what it leaves out."""
        yield f"{self.name}: {shrink.describe(self.small)}"
        width = max(len(layout.name) for layout in self.found)
        yield f"{'layout':<{width}}" + "".join(f"  {letter:<6}" for letter in LETTERS).rstrip()
        for layout, one in self.found.items():
            line = f"{layout.name:<{width}}"
            for letter in LETTERS:
                noise = one.noise.get(letter)
                cell = "-" if noise is None else f"{noise:.0e}" if noise else "equal"
                line += f"  {cell:<6}"
            yield line.rstrip()
        if self.failed is None:
            checks = {letter for one in self.found.values() for letter in one.noise}
            yield (
                f"verified: {len(self.found)} layout{'s' * (len(self.found) > 1)}, {len(checks)} "
                f"checks in {self.seconds:.0f} s"
            )
        yield "not covered: " + ", ".join(self.not_covered)


def missing_configuration() -> ConfigError:
    """Return the error for a command line without a configuration."""
    return ConfigError(
        "verify requires a configuration",
        next="dtt verify -c FILE, or dtt verify -c quickstart for a shipped one",
    )


def gpus(device: str) -> int:
    """Return the most ranks of a layout: one for each GPU; raise DttError if there are none."""
    import torch

    if device not in ("cuda", "cuda:0"):
        raise ConfigError(f"--device {device}: no such device", next="--device cpu, cuda or cuda:0")
    if not torch.cuda.is_available():
        raise EnvironmentUnfit(f"--device {device}: this machine has no GPU that torch can use")
    return torch.cuda.device_count() if device == "cuda" else layouts.MOST_RANKS


def run(cfgs: Sequence[tuple[str, RunConfig]], device: str, *, as_json: bool) -> None:
    """Verify configurations, such as the stages of a run, and print a table for each.

    `device` is cpu, for fp64, or cuda, for the precision of the run on the GPUs of this node; with
    cuda:0, all ranks share the first one.
    Raises `Wrong` for the first that differs.
    """
    from dtt.verify.layout_runs import LayoutRuns  # imports torch

    most = layouts.MOST_RANKS if device == "cpu" else gpus(device)
    results: list[Verification] = []
    exact = device == "cpu"
    with kept_if_wrong() as folder:
        for name, given in cfgs:
            # In fp64 the small configuration has its own device.
            train = given.train.model_copy(update={} if exact else {"device": device})
            cfg = given.model_copy(update={"train": train})
            small = shrink.shrink(cfg, exact=exact)
            case = LayoutRuns(folder / name.replace("/", "-"), small, LETTERS, exact)
            result = verify(name, cfg, case, most=most)
            results.append(result)
            if not as_json:
                print("\n".join(result.lines()), flush=True)
            if result.failed is not None:
                break
        if as_json:
            print(json.dumps([result.facts() for result in results], indent=1))
        if results[-1].failed is not None:
            raise explain(results[-1], folder)


@contextmanager
def kept_if_wrong() -> Iterator[Path]:
    """Yield a new folder for the runs, which is kept for a report if a layout is wrong."""
    folder = Path(tempfile.mkdtemp(prefix="dtt-verify-"))
    try:
        yield folder
    except Wrong:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)


def verify(
    name: str,
    cfg: RunConfig,
    case: LayoutRuns,
    *,
    parts: bool = True,
    most: int = layouts.MOST_RANKS,
) -> Verification:
    """Compare the layouts of a configuration by the runs of `case`; stop at the first that differs.

    They have at most `most` ranks. Without `parts`, only the largest is compared.
    """
    started = time.perf_counter()
    result = Verification(name, cfg, case.small, most)
    case.prepare()
    for layout in layouts.layouts_of(cfg, most)[0 if parts else -1 :]:
        log.info("verify: %s, %s", name, layout.name)
        result.found[layout] = case.check(layout)
        if result.failed is not None:
            break
    # A family of a user's own has no names for Hugging Face.
    if result.failed is None and "X" in case.checks and not is_own(tag_of(cfg.model)):
        layout, checked = list(result.found.items())[-1]
        case.check_export(layout, checked)
    result.seconds = time.perf_counter() - started
    return result


def explain(result: Verification, folder: Path) -> Wrong:
    """Return the error for a layout that differs; write a configuration that repeats it."""
    layout = result.failed
    assert layout is not None
    difference = result.found[layout].difference
    assert difference is not None
    values = result.cfg.model_dump(mode="json")
    values["parallel"] |= layout.section
    # The layout decides, not the number of processes that the user's job has.
    values["launch"] = {}
    path = folder / "differs.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return Wrong(
        f"{layout.name}: check {difference.check}: {difference.describe()}",
        where=f"{folder} has the runs and their records",
        next=f"please report it with this configuration; dtt verify -c {path} repeats it",
    )
