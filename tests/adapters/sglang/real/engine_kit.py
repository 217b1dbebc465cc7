"""Whole SGLang engines on the CPU, each in a process of its own: start, ask, stop, kill.

Every wait is bounded; an engine that does not answer, or that died, fails the test with the end of its log.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import backends
import psutil

START_SECONDS = 180  # two cores, seven processes: an engine alone is up in ten
ANSWER_SECONDS = 120
_LOG_TAIL = 6000
_ADMIN = "admin"  # SGLang refuses to change its storage backend over HTTP without a key (http_server.py:1103-1160)
_PAUSE = threading.Event()  # never set

_MODULE = "engine_child"
_context: Any = None

# A small engine on the CPU. page_first is SGLang's default host layout; kernel is the I/O backend for it.
ARGUMENTS: Mapping[str, Any] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "page_size": 16,
    "max_total_tokens": 4096,
    "context_length": 2048,
    "mem_fraction_static": 0.1,
    "chunked_prefill_size": 512,
    "max_running_requests": 4,
    "random_seed": 7,
    "enable_hierarchical_cache": True,
    "hicache_size": 0,
    "hicache_ratio": 2.0,
    "hicache_mem_layout": "page_first",
    "hicache_io_backend": "kernel",
    "hicache_storage_prefetch_policy": "wait_complete",
    "enable_cache_report": True,
    "log_level": "info",
}


@dataclass(frozen=True)
class Answered:
    """What an engine generated. details: cached prompt tokens by where they came from, as SGLang reports them."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    details: dict[str, Any]
    weight_version: str | None

    @property
    def storage(self) -> int:
        """Count the prompt tokens that came from the storage backend."""
        return int(self.details.get("storage", 0) or 0)

    @property
    def device(self) -> int:
        """Count the prompt tokens that were on the device."""
        return int(self.details.get("device", 0) or 0)


class EngineFailedError(AssertionError):
    """An engine that said what went wrong, said nothing in time, or died; with the end of its log."""


class _Family:
    """A process that leads a session, and all that it starts."""

    _process: Any

    def kill(self) -> None:
        """End all of it at once, by SIGKILL."""
        family = self._family()
        left = {path for process in family for path in _shared_files(process)}
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._process.join(30)
        for path in left:
            Path(path).unlink(missing_ok=True)

    def _family(self) -> list[psutil.Process]:
        """Find its processes: children whose parent has ended are still of its session."""
        session, found = self._process.pid, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if process.pid == session or os.getsid(process.pid) == session:
                    found.append(process)
        return found


class EngineProcess(_Family):
    """A running engine. Use `engines`, which ends what a test leaves running."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        backend: backends.Flags | None,
        spawn: bool = False,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self.log = log
        self._connection, theirs = multiprocessing.Pipe()
        options = {"model_path": str(model)} | ARGUMENTS
        if backend is not None:
            options |= backend.arguments()
        self._process = _forkserver().Process(
            target=_serve, args=(theirs, str(log), dict(environment or {}), options | arguments, spawn)
        )
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Wait until it is up. Raises: EngineFailedError when it did not start."""
        self._receive("ready", START_SECONDS)

    def generate(self, prompt: list[int], tokens: int = 8, *, replica: int | None = None) -> Answered:
        """Continue a prompt greedily. replica: of data-parallel ones, which."""
        return self._answered(self.ask("generate", prompt=prompt, tokens=tokens, replica=replica))

    def start_to_generate(self, prompt: list[int], tokens: int = 8) -> None:
        """Ask for it, and do not wait: `generated` does."""
        self._connection.send(("generate", {"prompt": prompt, "tokens": tokens, "replica": None}))

    def generated(self) -> Answered:
        """Wait for what was asked for."""
        return self._answered(self._receive("answer", ANSWER_SECONDS))

    @staticmethod
    def _answered(out: dict[str, Any]) -> Answered:
        return Answered(
            tokens=out["tokens"],
            logprobs=out["logprobs"],
            cached=out["cached"],
            details=out["details"] or {},
            weight_version=out["weight_version"],
        )

    def flush(self, seconds: float = 60) -> None:
        """Wait until everything is stored that is to be, then drop device and host: what is found later, is stored."""
        self.ask("flush", seconds=seconds)

    def attach(self, backend: backends.Flags) -> dict[str, Any]:
        """Attach a storage backend. Returns: success, message."""
        return self.ask("attach", backend=backend.name, extra=backend.extra)

    def detach(self) -> dict[str, Any]:
        """Detach the storage backend. Returns: success, message."""
        return self.ask("detach")

    def clear(self) -> dict[str, Any]:
        """Clear the storage backend. Returns: success, message."""
        return self.ask("clear")

    def update(self, model: Path, *, version: str | None = None, flush: bool = True) -> dict[str, Any]:
        """Load other weights. Returns: success, message."""
        return self.ask("update", path=str(model), version=version, flush=flush)

    def ask(self, name: str, **options: Any) -> Any:
        """Carry out a command. Raises: EngineFailedError when it failed, or nothing came in time."""
        self._connection.send((name, options))
        return self._receive("answer", ANSWER_SECONDS)

    def stop(self) -> None:
        """End it in order, as a server that is asked to."""
        if self._process.is_alive():
            with contextlib.suppress(EngineFailedError, OSError):
                self._connection.send(("stop", {}))
                self._receive("stopped", 60)
        self.kill()

    def kill(self) -> None:
        """End it and its processes at once, by SIGKILL."""
        super().kill()
        self._connection.close()

    def _receive(self, key: str, seconds: float) -> Any:
        try:
            if not self._connection.poll(seconds):
                raise EngineFailedError(f"no answer within {seconds:g} s\n{self._tail()}")
            out = self._connection.recv()
        except (EOFError, ConnectionResetError) as end:
            raise EngineFailedError(f"the engine died\n{self._tail()}") from end
        if key not in out:
            raise EngineFailedError(f"{out.get('error', out)}\n{self._tail()}")
        return out[key]

    def _tail(self) -> str:
        return f"end of {self.log}:\n{self.log.read_text(errors='replace')[-_LOG_TAIL:]}"


class Server(_Family):
    """A running HTTP server."""

    def __init__(self, model: Path, log: Path, *, backend: backends.Flags | None, **arguments: Any) -> None:
        self._log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        given = {"model_path": str(model), "host": "127.0.0.1", "port": self._port, "admin_api_key": _ADMIN}
        options = ARGUMENTS | given | (backend.arguments() if backend is not None else {}) | arguments
        self._process = _forkserver().Process(target=_serve_http, args=(str(log), options))
        self._process.start()

    def wait(self) -> None:
        """Wait until it answers. Raises: EngineFailedError when it did not start."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                if self.ask("GET", "/health")[0] == 200:
                    return
            if not self._process.is_alive() or time.monotonic() > deadline:
                end = self._log.read_text(errors="replace")[-_LOG_TAIL:]
                raise EngineFailedError(f"the server did not start\n{end}")
            _PAUSE.wait(0.1)

    def ask(self, method: str, path: str, content: dict[str, Any] | None = None, *, admin: bool = False) -> Any:
        """Make a request. Returns: status, and what came: JSON where it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {_ADMIN}"} if admin else {})
        try:
            connection.request(method, path, json.dumps(content) if content is not None else None, headers)
            answer = connection.getresponse()
            raw = answer.read().decode()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(raw)
        except json.JSONDecodeError:
            return answer.status, raw

    def generate(self, prompt: list[int], tokens: int = 8) -> Answered:
        """Continue a prompt greedily."""
        sampling = {"temperature": 0, "max_new_tokens": tokens}
        status, out = self.ask(
            "POST", "/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        )
        assert status == 200, out
        meta = out["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        details = meta.get("cached_tokens_details") or {}
        return Answered(out["output_ids"], logprobs, meta["cached_tokens"], details, meta.get("weight_version"))

    def flush(self, seconds: float = 60) -> None:
        """As `EngineProcess.flush`."""
        deadline = time.monotonic() + seconds
        while self.ask("POST", "/flush_cache", admin=True)[0] != 200:
            assert time.monotonic() < deadline, "the server was never idle: a page never arrived anywhere"
            _PAUSE.wait(0.05)


def _shared_files(process: psutil.Process) -> list[str]:
    """Find SGLang's own files in shared memory, which outlive a kill: managers/load_snapshot.py:303, and queues."""
    with contextlib.suppress(psutil.Error, OSError):
        return [each.path for each in process.memory_maps() if each.path.startswith("/dev/shm/sgl")]
    return []


def _forkserver() -> Any:
    """Have the process of which all engines are forks; it imports SGLang once."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload([_MODULE])
    return _context


def _serve(*arguments: Any) -> None:
    import engine_child

    engine_child.serve(*arguments)


def _serve_http(*arguments: Any) -> None:
    import engine_child

    engine_child.serve_http(*arguments)


@contextlib.contextmanager
def engines(folder: Path) -> Iterator[Any]:
    """Start engines: `start(model, backend=flags, ...)`, and with `kind=Server` HTTP servers.

    Whichever still run afterwards are killed.
    """
    running: list[Any] = []

    def start(model: Path, *, backend: backends.Flags | None, kind: type = EngineProcess, **options: Any) -> Any:
        engine = kind(model, folder / f"engine-{len(running)}.log", backend=backend, **options)
        running.append(engine)
        engine.wait()
        return engine

    try:
        yield start
    finally:
        for engine in running:
            engine.kill()
