"""A Python process that answers one JSON line for each JSON line, with a Hub on the loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class ScriptProcess:
    """A process that runs `script` with the Hub at `endpoint`, and with its cache in `folder`.

    One process answers many times: `datasets` takes seconds to import, and reads HF_ENDPOINT then.
    """

    def __init__(self, script: str, endpoint: str, folder: Path, **env: str) -> None:
        hub = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
        home = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | hub | home | env,
        )

    def answer(self, *question: Any) -> dict[str, Any]:
        """Send one line, and return the line that the script prints."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """Let the script end."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
