"""A server process of the soak's own: started on free ports, asked for its numbers, ended by SIGTERM."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

SERVE = Path(__file__).resolve().parents[1] / "serve.py"
ADDRESSES = re.compile(r"answers gRPC on (\S+), HTTP on ([^\s,]+)")


@dataclass
class ServerProcess:
    """Listens when `start` returns.  What it writes is kept, and its last lines are told when it fails."""

    process: subprocess.Popen[str]
    grpc: str = ""
    http: str = ""  # base URL
    lines: list[str] = field(default_factory=list)

    @staticmethod
    def start(flags: Sequence[str], *, seconds: float = 900) -> ServerProcess:
        """RuntimeError when it ends before it answers, or does not answer in time."""
        command = [sys.executable, str(SERVE), "--port=0", "--http-port=0", *flags]
        server = ServerProcess(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        patience = threading.Timer(seconds, server._give_up)
        patience.daemon = True
        patience.start()
        assert server.process.stderr is not None
        for line in server.process.stderr:
            server.lines.append(line)
            if found := ADDRESSES.search(line):
                server.grpc, server.http = found.groups()
                threading.Thread(target=server._read, daemon=True).start()
                return server
        server.process.stderr.close()
        raise RuntimeError(f"the server ended with {server.process.wait()}: {''.join(server.lines[-20:])}")

    def terminate(self, seconds: float = 60) -> int:
        """SIGTERM.  -> the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def numbers(self) -> dict[str, float]:
        """Every sample of /metrics, labels in the name as Prometheus writes them."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return {
            sample.name + ("{" + ",".join(f'{k}="{v}"' for k, v in sample.labels.items()) + "}" if sample.labels else ""):
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }  # fmt: skip

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            self.lines.extend(stream)

    def _give_up(self) -> None:
        if not self.grpc:
            self.process.kill()
