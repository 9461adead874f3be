"""A W&B server on the loopback interface: keeps runs and their history, and lets them resume."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

KEY = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Run:
    """What the server knows of one run."""

    name: str
    group: str | None
    history: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    finished: int = 0


class LoopbackWandb:
    """A context manager; `url` and KEY are what a client needs, `runs` is what arrived, by id."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.silent = threading.Event()
        """From when this is set on, requests are taken and never answered."""
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
                if wandb.silent.is_set():
                    wandb._closing.wait()
                    return
                answer: dict[str, Any] = {}
                if self.path == "/graphql":
                    query = json.loads(body)
                    variables = query.get("variables", {})
                    answer["data"] = wandb.answer(query["operationName"], variables)
                elif self.path.endswith("/file_stream"):
                    wandb.receive(self.path.split("/")[-2], json.loads(body))
                content = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST  # files that are uploaded are dropped

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL operation's response."""
        match operation:
            case "Viewer":
                viewer = {"id": "u", "username": "me", "entity": "me", "flags": None}
                return {"viewer": viewer | {"teams": {"edges": []}}}
            case "RunResumeStatus":
                return {"model": {"id": "p", "bucket": self._bucket(variables["name"])}}
            case "UpsertBucket":
                return {"upsertBucket": self._upsert(variables)}
            case "CreateRunFiles":
                files = [{"name": f, "uploadUrl": f"{self.url}/{f}"} for f in variables["files"]]
                created = {"runID": "r", "uploadHeaders": [], "files": files}
                return {"createRunFiles": created}
            case _:
                return {}

    def _bucket(self, run_id: str) -> dict[str, Any] | None:
        """What a client needs to resume a run; None for one that is new."""
        run = self.runs.get(run_id)
        if run is None:
            return None
        last = json.dumps(run.history[-1]) if run.history else "{}"
        return {
            "id": run_id, "name": run_id, "displayName": run.name, "tags": [], "notes": "",
            "config": json.dumps(run.config), "summaryMetrics": last,
            "historyLineCount": len(run.history), "historyTail": json.dumps([last]),
            "eventsLineCount": 0, "eventsTail": "[]", "logLineCount": 0, "wandbConfig": '{"t": 1}',
        }  # fmt: skip

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        run_id = variables["name"]
        inserted = run_id not in self.runs
        run = self.runs.setdefault(run_id, Run(variables["displayName"], variables["groupName"]))
        if variables.get("config"):
            run.config = json.loads(variables["config"])
        project = {"name": variables["project"], "entity": {"name": "me"}}
        bucket = {"id": run_id, "name": run_id, "displayName": run.name, "project": project}
        return {"bucket": bucket | {"historyLineCount": len(run.history)}, "inserted": inserted}

    def receive(self, run_id: str, stream: dict[str, Any]) -> None:
        """Take a piece of a run's history: lines from an offset on."""
        run = self.runs[run_id]
        piece = stream.get("files", {}).get("wandb-history.jsonl")
        if piece is not None:
            lines = [json.loads(line) for line in piece["content"]]
            run.history[piece["offset"] :] = lines
        run.finished += bool(stream.get("complete"))
