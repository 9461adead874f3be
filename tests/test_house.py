"""What holds for the source as a whole."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/dtt"
SLOW = {"torch", "numpy", "pyarrow", "datasets", "transformers", "wandb"}


@pytest.mark.parametrize(
    "argv", [[], ["--help"], ["train", "--help"], ["data", "mix", "--help"]], ids=" ".join
)
def test_the_command_line_imports_nothing_slow(argv: list[str]) -> None:
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('slow:', *({SLOW!r} & sys.modules.keys())))\n"
        f"sys.argv = ['dtt', *{argv}]\n"
        f"from dtt.main import main\n{'main()' if argv else ''}"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "slow:"


def test_layers_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run(
        [lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    "package", [p for p in sorted(SOURCE.rglob("__init__.py")) if p.parent != SOURCE],
    ids=lambda path: path.parent.name,
)  # fmt: skip
def test_each_package_says_what_lives_there_and_what_it_may_touch(package: Path) -> None:
    text = ast.get_docstring(ast.parse(package.read_text()))
    assert text is not None
    what, touch = text.splitlines()
    assert what.endswith(".")
    assert touch.startswith("May touch: ")
    assert touch.endswith(".")


def test_no_file_is_too_long_to_hold_in_the_head() -> None:
    lines = {p: len(p.read_text().splitlines()) for p in SOURCE.rglob("*.py")}
    lines.pop(SOURCE / "main.py")  # a list of commands, as long as there are commands
    assert {path.name: n for path, n in lines.items() if n > 450} == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from this clone."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_a_wheel_carries_the_shipped_configs_and_the_type_marker(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    shipped = {f"dtt/{p.relative_to(ROOT)}" for p in (ROOT / "configs").rglob("*") if p.is_file()}
    assert shipped
    assert inside >= shipped | {"dtt/py.typed", "dtt/main.py", "dtt/launch/slurm.sh.j2"}


def test_an_installed_wheel_finds_the_shipped_configs_by_name(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    run = subprocess.run(
        [sys.executable, "-m", "dtt.main", "config", "show", "-c", "quickstart"],
        cwd=tmp_path.parent,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert f"{tmp_path}/dtt/configs/quickstart.yaml:" in run.stdout
