"""A small mover in Python, complete: what the suite asks of one, and where faults are put into it."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np

from stepwell import StepwellUsageError
from stepwell.testing.mover import Full, Outcome
from stepwell.testing.tier import page_checksum

PENDING, LANDED, FAILED, CANCELLED = Outcome.PENDING, Outcome.LANDED, Outcome.FAILED, Outcome.CANCELLED


class SmallTransfer:
    def __init__(self, mover, copies, into, tag, by_layer, deadline):
        self.mover, self.copies, self.into, self.tag, self.by_layer = mover, copies, into, tag, by_layer
        self.until = None if deadline is None else time.monotonic() + deadline
        self.outcomes, self.layers_done, self.is_stopped, self.is_told = [PENDING] * len(copies), 0, False, False
        self.lock, self.over = threading.Lock(), threading.Event()  # the lock: for each layer that lands

    def wait(self, timeout):
        left = None if self.until is None else self.until - time.monotonic()
        if self.over.wait(timeout if left is None else max(0.0, min(timeout, left))):
            return True
        if self.until is not None and time.monotonic() >= self.until:
            self.revoke()
        return self.over.is_set()

    def cancel(self):
        self.is_stopped = True

    def revoke(self):
        self.is_stopped = True
        with self.lock:  # nobody lands a layer now, and who comes next looks whether it is over
            self.end()

    def end(self):
        self.outcomes = [CANCELLED if outcome is PENDING else outcome for outcome in self.outcomes]
        if LANDED in self.outcomes:
            self.layers_done = len(self.mover.layer_bytes)
        self.over.set()

    def run(self):
        layers = range(len(self.mover.layer_bytes))
        pages = range(len(self.copies))
        if self.by_layer:
            for layer in layers:
                if not self.is_stopped:
                    for page in pages:
                        self.land(page, layer)
                    with self.lock:
                        self.layers_done = max(self.layers_done, layer + 1 if not self.is_stopped else 0)
        else:
            for page in pages:
                if not self.is_stopped:
                    for layer in layers:
                        self.land(page, layer)
        with self.lock:
            self.end()

    def land(self, page, layer):
        copy, sizes = self.copies[page], self.mover.layer_bytes
        data, checksums = self.mover.pages[copy.source]
        first = sum(sizes[:layer])
        piece = bytes(data[first : first + sizes[layer]])
        is_right = page_checksum(b"layer", piece) == checksums[layer]
        with self.lock:
            if self.over.is_set() or self.outcomes[page] is not PENDING:
                return
            if not is_right:
                self.outcomes[page] = FAILED
                return
            self.into[copy.row, first : first + sizes[layer]] = np.frombuffer(piece, np.uint8)
            if layer == len(sizes) - 1:
                self.outcomes[page] = LANDED


class SmallMover:
    sources, most_transfers, workers = 24, 8, 2

    def __init__(self, layer_bytes):
        self.layer_bytes, self.pages = list(layer_bytes), {}
        self.condition = threading.Condition()
        self.waiting, self.running, self.told, self.drained = deque(), [], deque(), None
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(self.workers)]
        for thread in self.threads:
            thread.start()

    def put(self, source, page):
        if self.drained is not None or not 0 <= source < self.sources or len(page) != sum(self.layer_bytes):
            raise StepwellUsageError(f"source {source}: closed, or none, or not a whole page")
        edges = [sum(self.layer_bytes[:layer]) for layer in range(len(self.layer_bytes) + 1)]
        checksums = [page_checksum(b"layer", page[edges[i] : edges[i + 1]]) for i in range(len(self.layer_bytes))]
        self.pages[source] = bytearray(page), checksums

    def spoil(self, source):
        self.pages[source][0][-1] ^= 1

    def lose(self, source):
        return False

    def submit(self, copies, *, into, tag, by_layer=False, deadline=None):
        rows = [copy.row for copy in copies]
        with self.condition:
            if self.drained is not None or len(set(rows)) < len(rows) or not all(0 <= row < len(into) for row in rows):
                raise StepwellUsageError(f"closed, or rows {rows} are not each one of {len(into)}, once")
            if not all(copy.source in self.pages for copy in copies):
                raise StepwellUsageError("a source that was not put")
            if len(self.waiting) + len(self.running) >= self.most_transfers:
                return Full(len(copies), 0)
            transfer = SmallTransfer(self, list(copies), into, tag, by_layer, deadline)
            self.waiting.append(transfer)
            self.condition.notify_all()
            return transfer

    def work(self):
        while True:
            with self.condition:
                self.condition.wait_for(lambda: self.waiting or self.drained is not None)
                if not self.waiting:
                    return
                transfer = self.waiting.popleft()
                self.running.append(transfer)
            transfer.run()
            with self.condition:
                self.running.remove(transfer)
                self.told.append(transfer.tag)
                self.condition.notify_all()

    def poll(self):
        with self.condition:
            tags = list(self.told)
            self.told.clear()
            return tags

    def close(self, timeout):
        with self.condition:
            if self.drained is None:
                self.drained = True
                all_ended = self.condition.wait_for(lambda: not (self.waiting or self.running), timeout)
                rest = [*self.waiting, *self.running]
                for transfer in [] if all_ended else rest:
                    transfer.revoke()
                self.drained = not any(CANCELLED in transfer.outcomes for transfer in rest)
                self.condition.notify_all()
        for thread in self.threads:
            thread.join()
        return self.drained
