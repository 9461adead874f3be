"""A W&B server on the loopback interface: keeps runs and their history, and lets them resume."""

from __future__ import annotations

import json
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

NAME = re.compile(r"(?:query|mutation)\s+(\w+)")
"""Name of a GraphQL operation."""
KEY = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Run:
    """What the server knows of one run."""

    name: str
    group: str | None
    job_type: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    finished: int = 0
    opened: int = 0
    """How often a client began or resumed it."""


class LoopbackWandb:
    """A context manager; `url` and KEY are what a client needs, `runs` is what arrived, by
    `entity/project/id`. The default entity is `me`.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.silent = threading.Event()
        """From when this is set on, requests are taken and never answered."""
        self.refuses_after: int | None = None
        """Number of rows of a run after which the rest is refused, with status 403."""
        self.hangs_up_after: int | None = None
        """Number of rows of a run after which the server closes every connection."""
        self.gone = threading.Event()
        """Set from when the server closes every connection."""
        self.bodies: list[str] = []
        """Everything that arrived, as it arrived."""
        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        wandb = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                wandb.bodies.append(body.decode(errors="replace"))
                if wandb.silent.is_set():
                    wandb._closing.wait()
                    return
                answer: dict[str, Any] = {}
                status = 200
                if self.path == "/graphql":
                    query = json.loads(body)
                    name = query.get("operationName") or NAME.search(query["query"])[1]
                    answer["data"] = wandb.answer(name, query.get("variables") or {})
                elif self.path.endswith("/file_stream"):
                    path = "/".join(self.path.split("/")[-4:-1])
                    status = wandb.receive(path, json.loads(body))
                if wandb.gone.is_set():
                    self.close_connection = True
                    return
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with suppress(BrokenPipeError):  # a client that ends does not wait
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST  # files that are uploaded are dropped

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL operation's response."""
        match operation:
            case "Viewer" | "GetDefaultEntity":
                viewer = {"id": "u", "username": "me", "entity": "me", "flags": None}
                return {"viewer": viewer | {"teams": {"edges": []}}}
            case "RunResumeStatus":
                return {"model": {"id": "p", "bucket": self._bucket(variables)}}
            case "Run":
                return {"project": {"run": self._public(variables)}}
            case "RunHistoryKeys":
                rows = self.runs[self._path(variables)].history
                last = rows[-1]["_step"] if rows else -1
                return {"project": {"run": {"historyKeys": {"lastStep": last}}}}
            case "RunParquetHistory":
                live = {"parquetUrls": [], "liveData": [{"_step": 0}]}
                return {"project": {"run": {"parquetHistory": live}}}
            case "HistoryPage":
                return {"project": {"run": {"history": self._page(variables)}}}
            case "UpsertBucket":
                return {"upsertBucket": self._upsert(variables)}
            case "CreateRunFiles":
                files = [{"name": f, "uploadUrl": f"{self.url}/{f}"} for f in variables["files"]]
                created = {"runID": "r", "uploadHeaders": [], "files": files}
                return {"createRunFiles": created}
            case _:
                return {}

    @staticmethod
    def _path(variables: dict[str, Any]) -> str:
        return f"{variables['entity'] or 'me'}/{variables['project']}/{variables['name']}"

    def _bucket(self, variables: dict[str, Any]) -> dict[str, Any] | None:
        """What a client needs to resume a run; None for one that is new."""
        run, run_id = self.runs.get(self._path(variables)), variables["name"]
        if run is None:
            return None
        last = json.dumps(run.history[-1]) if run.history else "{}"
        return {
            "id": run_id, "name": run_id, "displayName": run.name, "tags": [], "notes": "",
            "config": json.dumps(run.config), "summaryMetrics": json.dumps(run.summary),
            "historyLineCount": len(run.history), "historyTail": json.dumps([last]),
            "eventsLineCount": 0, "eventsTail": "[]", "logLineCount": 0, "wandbConfig": '{"t": 1}',
        }  # fmt: skip

    def _public(self, variables: dict[str, Any]) -> dict[str, Any] | None:
        """What the client's public API shows of a run; None for one that does not exist."""
        run, run_id = self.runs.get(self._path(variables)), variables["name"]
        if run is None:
            return None
        return {
            "id": self._path(variables), "projectId": "1", "name": run_id, "tags": run.tags,
            "displayName": run.name, "jobType": run.job_type, "group": run.group,
            "notes": run.notes,
            "sweepName": None, "state": "finished", "config": json.dumps(run.config),
            "summaryMetrics": self._as_stored(run.summary), "historyLineCount": len(run.history),
            "user": {"name": "me", "username": "me"}, "historyKeys": None,
        }  # fmt: skip

    def _page(self, variables: dict[str, Any]) -> list[str]:
        """The rows from a step to another, exclusive; a sample of them if that is too small."""
        rows = self.runs[self._path(variables | {"name": variables["run"]})].history
        wanted = range(variables["minStep"], variables["maxStep"])
        page = [self._as_stored(row) for row in rows if row["_step"] in wanted]
        return page[:: -(-len(page) // variables["pageSize"]) or 1]

    @staticmethod
    def _as_stored(row: dict[str, Any]) -> str:
        """JSON as databases keep it, with strings for numbers that are not finite."""
        values = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
        return json.dumps({name: values.get(str(value), value) for name, value in row.items()})

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        if variables.get("summaryMetrics"):  # from the public API
            self.runs[variables["id"]].summary = json.loads(variables["summaryMetrics"])
            return {"bucket": {"id": variables["id"]}}
        path = self._path(variables)
        inserted = path not in self.runs
        run = self.runs.setdefault(path, Run(variables["displayName"], variables["groupName"]))
        run.job_type = variables["jobType"] or run.job_type
        run.tags = variables["tags"] or run.tags
        run.notes = variables["notes"] or run.notes
        if variables.get("config"):
            run.config = json.loads(variables["config"])
        run.opened += variables["displayName"] is not None
        entity, project_name, run_id = path.split("/")
        project = {"name": project_name, "entity": {"name": entity}}
        bucket = {"id": run_id, "name": run_id, "displayName": run.name, "project": project}
        return {"bucket": bucket | {"historyLineCount": len(run.history)}, "inserted": inserted}

    def receive(self, path: str, stream: dict[str, Any]) -> int:
        """Take a piece of a run's history: lines from an offset on. Return the HTTP status."""
        run, files = self.runs[path], stream.get("files", {})
        piece = files.get("wandb-history.jsonl")
        if piece is not None:
            lines = [json.loads(line) for line in piece["content"]]
            end = piece["offset"] + len(lines)
            for limit in (self.refuses_after, self.hangs_up_after):
                if limit is not None:
                    lines = lines[: max(0, limit - piece["offset"])]
            run.history[piece["offset"] : piece["offset"] + len(lines)] = lines
            if self.refuses_after is not None and end > self.refuses_after:
                return 403
            if self.hangs_up_after is not None and end > self.hangs_up_after:
                self.gone.set()
                return 200
        for line in files.get("wandb-summary.json", {}).get("content", []):
            run.summary = json.loads(line)
        run.finished += bool(stream.get("complete"))
        return 200
