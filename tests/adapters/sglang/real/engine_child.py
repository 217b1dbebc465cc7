"""Be one SGLang engine, in a process of its own, and do what is said over a connection; engine_kit.py is its other end.

The forkserver of engine_kit.py imports this module once, and with it SGLang, which takes ten seconds; each engine is a
fork of that. SGLang's own processes, which it starts by spawning (entrypoints/engine.py:1995), are forked too then, so
that they need not import it again each. `spawn` leaves that as SGLang has it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.plugins import load_plugins

Answer = dict[str, Any]
_PAUSE = threading.Event()  # never set


def serve_http(log: str, arguments: dict[str, Any]) -> None:
    """Be an HTTP server until killed."""
    _become(log, {}, spawn=False)
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    launch_server(ServerArgs(**arguments))


def _become(log: str, environment: dict[str, str], *, spawn: bool) -> None:
    os.setsid()  # whatever it starts can be killed with it
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    if not spawn:
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *_, **__: None


def serve(
    connection: Connection, log: str, environment: dict[str, str], arguments: dict[str, Any], spawn: bool
) -> None:
    """Start an engine, say so, and carry out commands until one says stop or the other end is gone."""
    _become(log, environment, spawn=spawn)
    try:
        engine = Engine(**arguments)
    except BaseException:
        connection.send({"error": traceback.format_exc()})
        raise
    connection.send({"ready": True})
    commands = Commands(engine)
    while True:
        try:
            name, options = connection.recv()
        except EOFError:
            break
        if name == "stop":
            break
        try:
            connection.send({"answer": commands.named(name)(**options)})
        except Exception:
            connection.send({"error": traceback.format_exc()})
    engine.shutdown()
    connection.send({"stopped": True})


class Commands:
    """What can be asked of an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def named(self, name: str) -> Callable[..., Any]:
        """Find a command. Raises: KeyError when there is none of that name."""
        return {
            "generate": self.generate,
            "flush": self.flush,
            "attach": self.attach,
            "detach": self.detach,
            "clear": self.clear,
            "update": self.update,
        }[name]

    def generate(self, prompt: list[int], tokens: int, replica: int | None) -> Answer:
        """Continue a prompt greedily. Returns: tokens, their logprobs, and where the prompt's cached part came from."""
        out = self._engine.generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": tokens},
            return_logprob=True,
            routed_dp_rank=replica,
        )
        meta = out["meta_info"]
        return {
            "tokens": out["output_ids"],
            "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
            "cached": meta["cached_tokens"],
            "details": meta.get("cached_tokens_details"),
            "weight_version": meta.get("weight_version"),
        }

    def flush(self, seconds: float) -> None:
        """Drop what the engine has on device and host, once nothing of it is on its way anywhere.

        SGLang refuses while a page is being written through or fetched (managers/scheduler.py:5337-5404), so that the
        first flush which succeeds also says that what was backed up before has reached the backend.
        """
        deadline = time.monotonic() + seconds
        while not self._engine.flush_cache().success:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine was not idle within {seconds:g} s: a page never arrived anywhere")
            _PAUSE.wait(0.05)

    def attach(self, backend: str, extra: dict[str, Any]) -> Answer:
        """Attach a storage backend, as HTTP's PUT /hicache/storage-backend does."""
        return self._told(
            "attach_hicache_storage",
            hicache_storage_backend=backend,
            hicache_storage_backend_extra_config_json=json.dumps(extra),
        )

    def detach(self) -> Answer:
        """Detach the storage backend."""
        return self._told("detach_hicache_storage")

    def clear(self) -> Answer:
        """Clear the storage backend."""
        return self._told("clear_hicache_storage")

    def update(self, path: str, version: str | None, flush: bool) -> Answer:
        """Load other weights from a folder, as HTTP's POST /update_weights_from_disk does."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        request = UpdateWeightFromDiskReqInput(model_path=path, weight_version=version, flush_cache=flush)
        success, message, *_ = self._run(self._engine.tokenizer_manager.update_weights_from_disk(request, None))
        return {"success": success, "message": message}

    def _told(self, name: str, **options: Any) -> Answer:
        out = self._run(getattr(self._engine.tokenizer_manager, name)(**options))
        return {"success": out.success, "message": getattr(out, "message", "")}

    def _run(self, coroutine: Any) -> Any:
        return self._engine.loop.run_until_complete(coroutine)


load_plugins()  # once, before any fork: a fork finds what they changed
