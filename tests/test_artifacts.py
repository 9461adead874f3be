"""A manifest may come from somebody else: its names must not lead out of its folder."""

from pathlib import Path

import pytest

from dtt.artifacts import checked_file, checked_name
from dtt.errors import DamagedError, ExitCode

BAD = {
    "": "not a plain path",
    "/etc/passwd": "absolute",
    "//etc/passwd": "absolute",
    "..": "not a plain path",
    "../victim": "not a plain path",
    "a/../../victim": "not a plain path",
    "a/..": "not a plain path",
    "./a": "not a plain path",
    "a//b": "not a plain path",
    "a/": "not a plain path",
    "a\0b": "does not print",
    "a\nerror: all is well": "does not print",
    "a\udcff": "does not print",
}


@pytest.mark.parametrize("name", BAD, ids=repr)
def test_a_name_that_leaves_the_folder_is_refused_with_manifest_and_reason(name: str) -> None:
    manifest = Path("/somewhere/manifest.json")
    with pytest.raises(DamagedError) as caught:
        checked_name(name, manifest)
    assert caught.value.exit_code == ExitCode.DAMAGED
    assert str(manifest) in str(caught.value)
    assert BAD[name] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 4, "a name cannot forge a line"


@pytest.mark.parametrize("name", ["a.bin", "data/train-0.parquet", "..a/b..", "ü ñ.txt", "a\\b"])
def test_a_plain_name_comes_back_as_it_is(name: str, tmp_path: Path) -> None:
    assert checked_name(name, tmp_path / "manifest.json") == name
    assert checked_file(name, tmp_path / "manifest.json") == tmp_path / name


def test_a_link_may_lead_within_the_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"")
    (tmp_path / "linked").symlink_to(folder)  # a linked folder is the user's own choice
    manifest = tmp_path / "linked" / "manifest.json"
    (folder / "alias.bin").symlink_to("a.bin")
    (folder / "loop.bin").symlink_to("loop.bin")
    (folder / "out.bin").symlink_to("/etc/passwd")
    (folder / "away").symlink_to(tmp_path)
    (folder / "inner" / "b.bin").symlink_to("../../victim")
    for name in ("a.bin", "alias.bin", "loop.bin", "inner/absent.bin"):
        assert checked_file(name, manifest) == tmp_path / "linked" / name
    for name, target in (
        ("out.bin", "/etc/passwd"),
        ("away/victim", tmp_path / "victim"),
        ("inner/b.bin", tmp_path / "victim"),
    ):
        with pytest.raises(DamagedError, match="outside the folder") as caught:
            checked_file(name, manifest)
        assert str(target) in str(caught.value)
