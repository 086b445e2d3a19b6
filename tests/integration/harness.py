"""Starts real servers for the integration tests and talks to them as a client would.

Every server listens on loopback with ports that the kernel picks. Environment (set by CMake):
TANDEM_BIN_DIR the programs, TANDEM_SOURCE_ROOT the tree, TANDEM_SHARED the reference data.
"""

import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

BIN = pathlib.Path(os.environ["TANDEM_BIN_DIR"])
ROOT = pathlib.Path(os.environ["TANDEM_SOURCE_ROOT"])
SHARED = pathlib.Path(os.environ.get("TANDEM_SHARED", ROOT.parent / "shared"))
TINY = ROOT / "deploy" / "models" / "tandem-tiny"
START_SECONDS = 60


class StartError(Exception):
    """The server ended before it was ready; `code` and `output` say how."""

    def __init__(self, code, output):
        super().__init__(f"exit code {code}\n{output}")
        self.code = code
        self.output = output


class Server:
    """`tandem serve` and its children."""

    def __init__(self, model=TINY, *options, env=None, start_seconds=START_SECONDS):
        self.lines = []
        self.state_dir = tempfile.mkdtemp(prefix="tandem-state-")
        command = [str(BIN / "tandem"), "serve", f"--model={model}", f"--state-dir={self.state_dir}",
                   "--http-port=0", "--grpc-port=0", "--metrics-port=0", *options]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        stdout=subprocess.DEVNULL, text=True,
                                        env={**os.environ, **(env or {})})
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        deadline = time.monotonic() + start_seconds
        while not self._ready.wait(0.05):
            if self.process.poll() is not None:
                self._reader.join(5)
                code = self.process.returncode
                self.stop()
                raise StartError(code, "\n".join(self.lines))
            if time.monotonic() > deadline:
                self.stop()
                raise StartError(None, "not ready in time\n" + "\n".join(self.lines))

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            match = re.match(r"ready +http://[^:]+:(\d+)/v1 +grpc [^:]+:(\d+) +metrics http://[^:]+:(\d+)", line)
            if match:
                self.http_port, self.grpc_port, self.metrics_port = map(int, match.groups())
                self._ready.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self, grace=40):
        """SIGTERM, then the exit code; kills what does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        self.process.stderr.close()
        shutil.rmtree(self.state_dir, ignore_errors=True)
        return self.process.returncode

    def log(self):
        return "\n".join(self.lines)

    def children(self):
        """{program name: [pids]} of the server's processes."""
        found = {}
        for pid in child_pids(self.process.pid):
            try:
                name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
            except OSError:
                continue
            found.setdefault(name, []).append(pid)
        return found

    def pid_of(self, program):
        return self.children()[program][0]

    def bound_ports(self):
        """What the gateway wrote of its ports; None while it has not, or is not there."""
        try:
            return json.loads(self._ports_file().read_text())
        except (AttributeError, OSError, ValueError):
            return None

    def run_directory(self):
        """Where the sockets of the processes are."""
        return str(self._ports_file().parent)

    def _ports_file(self):
        for pid in self.children().get("tandem-gateway", [])[:1]:
            for argument in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                if argument.startswith(b"--ports-file="):
                    return pathlib.Path(argument.split(b"=", 1)[1].decode())
        return None

    def metrics_ports(self):
        """Ports of every process that said where its metrics are."""
        return [int(port) for port in re.findall(r"metrics_(?:listening port|port)=(\d+)", self.log())]

    def request(self, method, path, body=None, headers=None, timeout=60):
        """-> (status, headers, bytes)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout)
        try:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def get(self, path, **kw):
        return self.request("GET", path, **kw)

    def post(self, path, body, **kw):
        """-> (status, parsed JSON)."""
        status, _, data = self.request("POST", path, body, **kw)
        return status, strict_json(data)

    def stream(self, path, body, timeout=60):
        """Opens a streamed request."""
        return Stream(self.http_port, path, {**body, "stream": True}, timeout)

    def metrics(self, port=None):
        """{series: value} of a process; the gateway's by default."""
        text = scrape(port or self.metrics_port)
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
                for line in text.split("\n") if line and not line.startswith("#")}

    def wait_ready(self, seconds=30):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if self.get("/health/ready", timeout=2)[0] == 200:
                    return True
            except OSError:
                pass
            time.sleep(0.05)
        return False

    def wait_metric(self, name, value, seconds=5):
        """Waits until a gateway series has a value; returns the last one seen."""
        deadline = time.monotonic() + seconds
        while True:
            seen = self.metrics().get(name)
            if seen == value or time.monotonic() > deadline:
                return seen
            time.sleep(0.05)


class Stream:
    """A server-sent event stream: iterate over its JSON chunks."""

    def __init__(self, port, path, body, timeout):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        self.connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        self.socket = self.connection.sock
        self.response = self.connection.getresponse()
        self.status = self.response.status
        self.done = False
        self.comments = 0

    def __iter__(self):
        for raw in self.response:
            line = raw.decode("utf-8").rstrip("\r\n")
            if line.startswith(":"):
                self.comments += 1
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                self.done = True
                return
            yield strict_json(data)

    def close(self):
        """Leaves at once, as a client that is killed does."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.response.close()
        self.connection.close()


def child_pids(pid):
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return []
    found = []
    for task in tasks:
        try:
            found += [int(p) for p in pathlib.Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
        except OSError:
            pass
    return found


def scrape(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def strict_json(data):
    """Refuses NaN, Infinity and lone surrogates, as strict clients do."""
    text = data.decode("utf-8") if isinstance(data, bytes) else data

    def refuse(name):
        raise ValueError(f"JSON has {name}")

    value = json.loads(text, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def refused(model, *options):
    """Starts a server that must refuse; returns (exit code, output)."""
    started = time.monotonic()
    try:
        server = Server(model, *options, start_seconds=15)
    except StartError as error:
        assert error.code not in (0, None), f"exit code {error.code}: {error.output}"
        assert time.monotonic() - started < 15, "refused too late"
        return error.code, error.output
    server.stop()
    raise AssertionError("the server started")


def chat(content, **fields):
    return {"model": "tandem-tiny", "messages": [{"role": "user", "content": content}], **fields}


def copy_model(source, target):
    """A writable copy of a model directory."""
    shutil.copytree(source, target)
    for path in pathlib.Path(target).rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    pathlib.Path(target).chmod(0o755)
    return pathlib.Path(target)


def golden(family):
    """The directory of a golden model, or None where the reference data is absent."""
    path = SHARED / "golden" / "models" / family
    return path if path.is_dir() else None
