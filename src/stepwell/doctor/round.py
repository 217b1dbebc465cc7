"""Carry out one round through the tiers: one process writes and is killed, another reads it back, tier by tier.

    writer: save, drop half from shared memory ... SIGKILL        reader: open, read from shared, drop, read from disk

In directories of its own beside the configured ones (scratch.py); the user's pages and budget are not touched.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final

import msgspec

from stepwell.config import DiskTier, SharedTier
from stepwell.doctor.findings import Finding, fail, ok
from stepwell.doctor.machine import version_of
from stepwell.doctor.scratch import scratch_beside
from stepwell.doctor.worker import SPARE_PAGES, Spec
from stepwell.effective import show_size
from stepwell.errors import StepwellError
from stepwell.settings import Settings
from stepwell.tiers.limits import DiskLimits, Limits, MemoryLimits

PAGES: Final = 8
MOST_PAGE_BYTES: Final = 2 << 20
LEAST_PAGE_BYTES: Final = 4096
DEVICE_PAGE_BYTES: Final = 16 << 10  # of the geometry that worker.device uses
METADATA_BYTES: Final = 1 << 20  # of a volume of so few pages, generously
ACT_SECONDS: Final = 120.0  # a start of Python, of jax even, and one second of work
WHY: Final = "this is the way of every page: what fails here fails in the engine"


def check_round(settings: Settings, *, unfit: Mapping[str, str]) -> Iterator[Finding]:
    """Try every tier of a configuration, one finding each.

    Args:
        unfit: tiers whose directory was found wanting, and what is to be mended first.
    """
    config = settings.config
    tiers: dict[str, SharedTier | DiskTier] = {}
    for tier, given in (("shared", config.shared), ("disk", config.disk)):
        if given is None:
            continue
        if tier in unfit:
            yield fail(
                f"{tier} round",
                "not tried",
                why=WHY,
                remedy=f"{unfit[tier].partition('#')[0].strip()}  # then run this again",
            )
        else:
            tiers[tier] = given
    if config.host is not None:
        yield _host_round(settings)
    if tiers:
        yield from _volume_round(settings, tiers)
    if config.device is not None:
        yield _device_round(settings, tiers)


def _host_round(settings: Settings) -> Finding:
    page_bytes = min(settings.config.geometry.page_bytes, MOST_PAGE_BYTES)
    told = _Child("host", _spec(settings, page_bytes, {})).result()
    if "error" in told:
        return fail("host round", told["error"], why=WHY, remedy=_remedy(told["error"], "host"))
    return ok("host round", f"written, evicted, written again, read back: {_rate(told['host'])}; ends with its process")


def _device_round(settings: Settings, tiers: Mapping[str, SharedTier | DiskTier]) -> Finding:
    if version_of("jax") is None:
        return fail(
            "device round",
            "jax is not installed",
            why="the device tier is made of its arrays",
            remedy="pip install jax",
        )
    tier = next(iter(tiers), "host")
    try:
        with ExitStack() as stack:
            scratch = {}
            if tier in tiers:
                beside = os.path.abspath(os.path.expanduser(tiers[tier].path))
                scratch[tier] = f"{stack.enter_context(scratch_beside(beside))}/{tier}"
            told = _Child("device", _spec(settings, DEVICE_PAGE_BYTES, scratch)).result()
    except OSError as error:
        told = {"error": str(error)}
    if "error" in told:
        return fail("device round", told["error"], why=WHY, remedy=_remedy(told["error"], "device"))
    return ok(
        "device round",
        f"jax on {told['backend']}: computed, written through to {tier}, dropped, brought back: "
        f"{_rate(told['device'])}; ends with its process",
    )


def _volume_round(settings: Settings, tiers: Mapping[str, SharedTier | DiskTier]) -> Iterator[Finding]:
    """Write with one process, kill it, read with another."""
    with ExitStack() as stack:
        scratch: dict[str, str] = {}
        rooms: dict[str, int] = {}
        for tier, given in tiers.items():
            path = os.path.abspath(os.path.expanduser(given.path))
            try:
                directory = stack.enter_context(scratch_beside(path))
                scratch[tier] = f"{directory}/{tier}"
                limits: Limits = MemoryLimits() if tier == "shared" else DiskLimits()
                rooms[tier] = limits.available(directory).nbytes
            except (OSError, StepwellError) as error:
                yield fail(
                    f"{tier} round",
                    f"nothing can be made beside {path}: {error}",
                    why=WHY,
                    remedy=f"df -hi {os.path.dirname(path)}  # room and free inodes; and {path} or what is above it "
                    "must be writable for this user",
                )
                return
        page_bytes = min(settings.config.geometry.page_bytes, MOST_PAGE_BYTES)
        while page_bytes > LEAST_PAGE_BYTES and _volume_bytes(page_bytes) > min(rooms.values()) // 2:
            page_bytes //= 2
        tight = min(rooms, key=lambda tier: rooms[tier])
        if rooms[tight] < _volume_bytes(page_bytes):
            yield fail(
                f"{tight} round",
                f"{show_size(rooms[tight])} can be had, the smallest round takes "
                f"{show_size(_volume_bytes(page_bytes))}",
                why="not even one small volume fits",
                remedy=f"df -h {os.path.dirname(os.path.dirname(scratch[tight]))}  # then make room there",
            )
            return
        yield from _write_and_read(settings, _spec(settings, page_bytes, scratch), tiers)


def _write_and_read(settings: Settings, spec: Spec, tiers: Mapping[str, SharedTier | DiskTier]) -> Iterator[Finding]:
    names = " + ".join(tiers)
    writer = _Child("write", spec)
    wrote = writer.line()
    status = writer.kill()
    if "error" in wrote:
        yield fail(f"{names} round", f"writing: {wrote['error']}", why=WHY, remedy=_remedy(wrote["error"], *tiers))
        return
    if status != -signal.SIGKILL:
        yield fail(f"{names} round", f"the writer ended by itself, with {status}", why=WHY, remedy="dmesg | tail")
        return
    read = _Child("read", spec).result()
    if "error" in read:
        yield fail(f"{names} round", f"after SIGKILL: {read['error']}", why=WHY, remedy=_remedy(read["error"], *tiers))
        return
    for tier in tiers:
        evicted = f", {wrote['evicted']} pages evicted" if tier == "shared" and wrote["evicted"] else ""
        yield ok(
            f"{tier} round",
            f"{show_size(int(wrote['bytes']))} written in {wrote['seconds'] * 1000:.1f} ms{evicted}, SIGKILL, opened "
            f"again in {read['opened'] * 1000:.0f} ms, {_rate(read[tier])}",
        )
    full = settings.config.geometry.page_bytes
    if spec.page_bytes != full:
        yield ok("round", f"with pages of {show_size(spec.page_bytes)} in place of {show_size(full)}, to stay small")


def _spec(settings: Settings, page_bytes: int, scratch: Mapping[str, str]) -> Spec:
    config = settings.config
    return Spec(
        pages=PAGES,
        page_bytes=page_bytes,
        shared=scratch.get("shared"),
        disk=scratch.get("disk"),
        volume_bytes=_volume_bytes(page_bytes),
        direct_io=config.disk is None or config.disk.direct_io,
        durability="process" if config.disk is None else config.disk.durability,
        copy_threads=config.copy_threads,
        io_threads=config.io_threads,
    )


def _volume_bytes(page_bytes: int) -> int:
    """Return what a volume of the round takes: its pages, padded, and its metadata."""
    return (PAGES + SPARE_PAGES) * (-(-page_bytes // 4096) * 4096) + METADATA_BYTES


def _rate(told: Mapping[str, float]) -> str:
    return (
        f"{show_size(int(told['bytes']))} read and compared in {told['seconds'] * 1000:.1f} ms "
        f"({told['bytes'] / max(told['seconds'], 1e-9) / 1e9:.2f} GB/s)"
    )


def _remedy(error: str, *tiers: str) -> str:
    """Return the line that helps to see more; what a store says names its own remedy."""
    if ";" in error:
        return error.rpartition(";")[2].strip()
    return f"stepwell doctor --no-round  # what it says of {' and '.join(tiers)}; else report this line as a bug"


class _Child:
    """One process of the round. It ends when this object is dropped, or when its standard input does."""

    def __init__(self, act: str, spec: Spec) -> None:
        self._refused = ""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._start(act, spec)
        except OSError as error:
            self._refused = f"{sys.executable or 'this interpreter'} cannot be started: {error.strerror}"

    @staticmethod
    def _start(act: str, spec: Spec) -> subprocess.Popen[bytes]:
        # An engine may be running on the device: take what is needed of its memory, not most of it.
        modest = ["env", "XLA_PYTHON_CLIENT_PREALLOCATE=false"] if act == "device" else []
        # -P: nothing is imported from the working directory.
        python = [sys.executable, "-P", "-m", "stepwell.doctor.worker"]
        return subprocess.Popen(
            [*modest, *python, act, msgspec.json.encode(spec).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the doctor
        )

    def line(self) -> dict[str, Any]:
        """Return what it says, or an error: it ends without a word, or says nothing for too long."""
        if self._process is None:
            return {"error": self._refused}
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        text, noise = b"", b""
        end = time.monotonic() + ACT_SECONDS
        try:
            pipes = {self._process.stdout.fileno(), self._process.stderr.fileno()}
            while not text.endswith(b"\n"):
                ready, _, _ = select.select(list(pipes), [], [], max(end - time.monotonic(), 0.0))
                if not ready:
                    return {"error": f"no word within {ACT_SECONDS:.0f} s"}
                for fd in ready:
                    part = os.read(fd, 65536)
                    if fd == self._process.stdout.fileno():
                        text += part
                    else:
                        noise = (noise + part)[-2000:]
                    if not part:
                        pipes.discard(fd)
                if not pipes:
                    return {"error": f"ended with {self._process.wait()}: {noise.decode(errors='replace').strip()}"}
            told: dict[str, Any] = json.loads(text)
            return told
        except BaseException:
            self.kill()
            raise

    def result(self) -> dict[str, Any]:
        """Return what it says, once it has ended."""
        try:
            return self.line()
        finally:
            self.kill()

    def kill(self) -> int:
        """Kill it, if it has not ended; return how it ended."""
        if self._process is None:
            return 0
        self._process.kill()
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        return status
