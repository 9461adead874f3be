"""Data of tasks: fetched once at a pinned commit, verified ever after, and selected by hash."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.loopback_hub import LoopbackHub
from support.script_process import ScriptProcess

from dtt.base.errors import ConfigError, DamagedError, DttError, InputError
from dtt.evaluate.tasks import task_data
from dtt.evaluate.tasks.definition import Task, TaskSource, load_tasks
from dtt.evaluate.tasks.task_data import TaskData, open_task

SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
from dtt.base.errors import DttError
from dtt.evaluate.tasks.definition import load_tasks
from dtt.evaluate.tasks.task_data import open_task
for line in sys.stdin:
    file, folder, shots = json.loads(line)
    try:
        [task] = load_tasks([file])
        data = open_task(task, Path(folder), limit=None, shots=shots)
        answer = {"questions": [dataclasses.asdict(q) for q in data.questions],
                  "revision": data.revision, "sha256": data.sha256, "shots": data.shots}
    except DttError as error:
        answer = {"error": str(error), "code": int(error.exit_code)}
    print(json.dumps(answer), flush=True)
"""


class Tasks(ScriptProcess):
    """A process that opens tasks from a Hub on the loopback interface."""

    def __init__(self, hub: LoopbackHub, folder: Path, **env: str) -> None:
        super().__init__(SCRIPT, hub.endpoint, folder, **env)
        self.hub, self.folder = hub, folder

    def __call__(self, text: str, shots: int | None = None, data: str = "data") -> dict[str, Any]:
        file = self.folder / "task.yaml"
        file.write_text(text)
        return self.answer(str(file), str(self.folder / data), shots)


def parquet(rows: list[dict[str, Any]]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream)
    return stream.getvalue()


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"q": f"{n} + 1 =", "options": {"text": [str(n), str(n + 1)]}, "label": 1}
        for n in range(start, start + count)
    ]


def lines(found: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in found)


CARD = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: test, path: main/test*}\n"
CARD += b"  - {split: train, path: main/train*}\n---\n"
TASK = """\
type: multiple_choice
data: {hub: org/sums, name: main, split: test}
prompt: "{q}"
choices: "{options.text}"
gold: "{label}"
shots: {split: train}
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tasks]:
    with LoopbackHub() as hub:
        hub.add("dataset", "org/sums", {
            "README.md": CARD,
            "main/test-00000-of-00002.parquet": parquet(rows(3)),
            "main/test-00001-of-00002.parquet": parquet(rows(2, 3)),
            "main/train-00000-of-00001.parquet": parquet(rows(6, 100)),
        })  # fmt: skip
        hub.add("dataset", "org/script", {"script.py": b"raise SystemExit"})
        opened = Tasks(hub, tmp_path_factory.mktemp("tasks"))
        yield opened
        opened.close()


@pytest.mark.slow
def test_rows_come_from_the_hub_once_and_then_from_the_folder(tasks: Tasks) -> None:
    first = tasks(TASK)
    assert [q["contexts"] for q in first["questions"]] == [[f"{n} + 1 ="] for n in range(5)]
    assert first["questions"][4]["continuations"] == [" 4", " 5"]
    assert first["revision"] == tasks.hub.repos["dataset", "org/sums"].commit
    asked = len(tasks.hub.requests)
    assert tasks(TASK) == first
    shots = tasks(TASK, shots=2)  # the examples are another split
    assert shots["sha256"] != first["sha256"]
    assert shots["questions"][0]["contexts"][0].count(" + 1 =") == 3
    assert len(tasks.hub.requests) > asked
    # A new commit on the Hub changes nothing here.
    files = tasks.hub.repos["dataset", "org/sums"].files
    files["main/test-00001-of-00002.parquet"] = parquet(rows(2, 30))
    asked = len(tasks.hub.requests)
    assert tasks(TASK, shots=2) == shots
    assert len(tasks.hub.requests) == asked
    # Another folder has the new commit, and other questions.
    assert tasks(TASK, data="later")["questions"][4]["contexts"] == ["31 + 1 ="]
    offline = Tasks(tasks.hub, tasks.folder, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert offline(TASK) == first
    missing = offline(TASK, data="empty")
    offline.close()
    assert missing["code"] == 78
    assert "HF_HUB_OFFLINE is set" in missing["error"]


def test_what_the_hub_does_not_have_is_reported_in_the_words_of_the_task(tasks: Tasks) -> None:
    split = tasks(TASK.replace("split: test", "split: tset"))
    assert split["code"] == 2
    assert (
        "org/sums has no split 'tset' where: download.split why: it has: test, train"
        in (split["error"])
    )
    assert "fix `data` in its definition" in split["error"]
    script = tasks(TASK.replace("org/sums, name: main", "org/script"))
    assert script["code"] == 66
    assert "has no plain data files" in script["error"]
    assert "there is no dataset org/none" in tasks(TASK.replace("org/sums", "org/none"))["error"]


def test_a_file_that_changed_after_the_download_is_found(tasks: Tasks) -> None:
    assert "error" not in tasks(TASK, data="damaged")
    [file] = (tasks.folder / "damaged").rglob("test-00000*.parquet")
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    found = tasks(TASK, data="damaged")
    assert found["code"] == 65
    assert f"delete {file.parents[1]}" in found["error"]
    file.unlink()
    assert "the file is missing" in tasks(TASK, data="damaged")["error"]


LOCAL = TASK.replace("{hub: org/sums, name: main, split: test}", "{file: rows.jsonl}")
LOCAL = LOCAL.replace("shots: {split: train}\n", "")
PER_QUESTION = LOCAL + "shots: {file: rows.jsonl}\n"


def local(folder: Path, text: str = LOCAL, found: list[dict[str, Any]] | None = None) -> Task:
    (folder / "mine.yaml").write_text(text)
    (folder / "rows.jsonl").write_text(lines(rows(300) if found is None else found))
    [task] = load_tasks([str(folder / "mine.yaml")])
    return task


def opened(task: Task, limit: int | None = None, shots: int | None = None) -> TaskData:
    return open_task(task, Path("never"), limit=limit, shots=shots)


def test_a_limit_selects_a_subset_of_every_larger_one_in_any_order(tmp_path: Path) -> None:
    task = local(tmp_path, PER_QUESTION)
    ids = {n: [q.id for q in opened(task, n).questions] for n in (1, 100, 200, 300, 400)}
    assert [len(found) for found in ids.values()] == [1, 100, 200, 300, 300]
    assert {*ids[1]} < {*ids[100]} < {*ids[200]} < {*ids[300]} == {*ids[400]}
    everything = [q.id for q in opened(task).questions]
    assert [id for id in everything if id in {*ids[100]}] == ids[100]
    task = local(tmp_path, PER_QUESTION, rows(300)[::-1])
    assert {q.id for q in opened(task, 100).questions} == {*ids[100]}


def test_examples_differ_by_question_and_never_contain_it(tmp_path: Path) -> None:
    task = local(tmp_path, PER_QUESTION, rows(8))
    prefixes = set()
    for question in opened(task, shots=7).questions:
        *examples, own = question.contexts[0].split("\n\n")
        assert own not in {example.rpartition(" ")[0] for example in examples}
        assert len({*examples}) == 7
        prefixes.add(tuple(examples))
    assert len(prefixes) == 8
    fewer = [q.contexts[0] for q in opened(task, shots=3).questions]
    more = [q.contexts[0] for q in opened(task, shots=5).questions]
    for three, five in zip(fewer, more, strict=True):
        assert five.startswith(three.rpartition("\n\n")[0])
    with pytest.raises(ConfigError, match="7 examples, fewer than 8"):
        opened(task, shots=8)


def test_an_equal_row_is_no_example_of_a_question(tmp_path: Path) -> None:
    """Neither under another number nor in a copy of the file."""
    found = rows(4) * 2
    task = local(tmp_path, PER_QUESTION, found)
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "rows.jsonl").read_bytes())
    copy = task.model_copy(
        update={"shots": task.shots.model_copy(update={"file": tmp_path / "copy.jsonl"})}
    )
    for question in opened(task, shots=6).questions:
        *examples, own = question.contexts[0].split("\n\n")
        assert len(examples) == 6
        assert own not in {example.rpartition(" ")[0] for example in examples}
    assert opened(copy, shots=6).questions == opened(task, shots=6).questions
    assert len({question.id for question in opened(task).questions}) == 8
    for one in (task, copy):
        with pytest.raises(ConfigError, match="6 examples, fewer than 7"):
            opened(one, shots=7)


def test_fixed_examples_are_the_same_for_all_other_questions(tmp_path: Path) -> None:
    task = local(tmp_path, LOCAL + "shots: {file: rows.jsonl, fixed: true}\n")
    prefixes = [q.contexts[0].rpartition("\n\n")[0] for q in opened(task, shots=4).questions]
    own = [prefix for prefix in prefixes if prefix != prefixes[0]]
    assert len(own) <= 4  # those of the examples themselves, without them


def test_a_task_without_a_place_for_examples_or_without_its_file_is_refused(tmp_path: Path) -> None:
    task = local(tmp_path)
    assert opened(task).shots == 0
    with pytest.raises(ConfigError, match="names no examples for 3 shots"):
        opened(task, shots=3)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(InputError, match="relative to the definition"):
        opened(task)


def test_the_hash_is_that_of_the_rows(tmp_path: Path) -> None:
    first = opened(local(tmp_path, PER_QUESTION))
    assert first.revision is None
    assert opened(local(tmp_path, PER_QUESTION), limit=3).sha256 == first.sha256
    assert opened(local(tmp_path, PER_QUESTION, rows(299))).sha256 != first.sha256


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl.gz", "rows.csv"])
def test_formats_give_the_same_questions(name: str, tmp_path: Path) -> None:
    flat = [{"q": f"{n} + 1 =", "a": str(n), "b": str(n + 1), "label": "1"} for n in range(9)]
    text = LOCAL.replace('"{options.text}"', '["{a}", "{b}"]')
    expected = opened(local(tmp_path, text, flat)).questions
    content = {
        "rows.parquet": parquet(flat),
        "rows.jsonl.gz": gzip.compress(lines(flat).encode()),
        "rows.csv": "\n".join(["q,a,b,label", *(",".join(row.values()) for row in flat)]).encode(),
    }[name]
    (tmp_path / name).write_bytes(content)
    assert opened(local(tmp_path, text.replace("rows.jsonl", name), flat)).questions == expected


GOOD_ROW = rows(1)[0]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (GOOD_ROW | {"label": 2}, "gold is choice 2, counted from 0, of 2"),
        (GOOD_ROW | {"label": ""}, "does this split have answers"),
        (GOOD_ROW | {"label": -1}, "does this split have answers"),
        (GOOD_ROW | {"q": None}, "field 'q' is null"),
        (GOOD_ROW | {"options": {}}, "there is no field 'options.text'"),
        (GOOD_ROW | {"options": {"text": []}}, "not 0"),
        (GOOD_ROW | {"q": ["a"]}, "field 'q' is a list"),
    ],
)
def test_a_row_that_does_not_fit_is_reported_with_its_place(
    row: dict[str, Any], why: str, tmp_path: Path
) -> None:
    task = local(tmp_path, found=[*rows(3), row])
    with pytest.raises(ConfigError) as error:
        opened(task)
    assert why in str(error.value)
    assert f"{tmp_path}/rows.jsonl, row 3" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("rows.jsonl", b'{"q": 1}\n{"q": \n', DamagedError),
        ("rows.jsonl", b"[1]\n", DamagedError),
        ("rows.jsonl", b'{"q": "\xff"}\n', DamagedError),
        ("rows.jsonl", b"", DamagedError),
        ("rows.jsonl", b'{"q": "\\ud800"}', DamagedError),
        ("rows.jsonl.gz", gzip.compress(b'{"q": 1}\n' * 100, mtime=0)[:-12], DamagedError),
        ("rows.parquet", parquet(rows(3))[:-50], DamagedError),
        ("rows.txt", b"text", InputError),
        ("rows.csv", b'a,b\n"x', DamagedError),
    ],
)
def test_a_damaged_file_is_refused_whole(
    name: str, content: bytes, error: type[DttError], tmp_path: Path
) -> None:
    task = local(tmp_path, LOCAL.replace("rows.jsonl", name))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=str(tmp_path)):
        opened(task)


def test_splits_have_different_folders() -> None:
    origins = [
        TaskSource(hub=hub, name=name, split=split, revision=revision)
        for hub in ("a/b", "a/b--c", "a--b/c")
        for name in (None, "default", "a/b", "a_b", "a--b")
        for split in ("x", "b--x", "x@y")
        for revision in (None, "y")
    ]
    assert len({task_data._hub_folder(origin, Path()) for origin in origins}) == len(origins)


def test_rows_that_are_too_large_are_refused_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_data, "MAX_BYTES", 10**6)
    task = local(tmp_path, LOCAL.replace("rows.jsonl", "rows.jsonl.gz"))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"q": 1}\n' * 200_000))
    with pytest.raises(InputError, match="too large"):
        opened(task)
    (tmp_path / "rows.parquet").write_bytes(parquet([{"q": f"{n:050}"} for n in range(30_000)]))
    with pytest.raises(InputError, match="too large"):
        opened(local(tmp_path, LOCAL.replace("rows.jsonl", "rows.parquet")))
    paths = [tmp_path / f"{n}.jsonl" for n in range(10)]  # and over all files of a split
    for path in paths:
        path.write_bytes(b'{"q": "%s"}\n' % (b"x" * 200_000))
    assert len(task_data._split(paths[:1], ["a"], None).rows) == 1
    with pytest.raises(InputError, match="too large"):
        task_data._split(paths, ["a"] * len(paths), None)
