"""Find the files that hold a model's weights, and hash their index: what the epoch at start is made of.

The index is the names, sizes and times of change of the weight files: a few hundred `stat` calls, where hashing the
bytes would read the checkpoint a second time. Paths are left out, so that a directory that is moved (times kept) keeps
its cache. A file of a Hugging Face snapshot is a link to a blob that is named for its content: there the blob's name
stands in place of the time, and two hosts that fetched the same revision have the same index.

An index says what lies on the disk now, and the engine read its weights a while ago: `changed_at` is there to be held
against the time when the process began.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stepwell import StepwellUsageError

# SGLang's formats that read weights from files of the model's directory (configs/load_config.py:28, class LoadFormat).
# Not here: those that make weights up (dummy), fetch them (remote, remote_instance, rdma, jax, private), take them from
# a process that read them earlier (ipc_cache), or keep them in places that only the loader knows (presharded,
# expert_pack). A format that a later SGLang brings is not here either.
FILE_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "flash_rl",
        "gguf",
        "instanttensor",
        "layered",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "safetensors",
        "sharded_state",
    }
)
_WEIGHTS = (".bin", ".ckpt", ".gguf", ".pt", ".pth", ".safetensors")
# Beside the weights: which shard has which tensor, schemes of quantisation, code that comes with a model.
_BESIDE = (".index.json", ".py", "adapter_config.json")
_QUANTISATION = re.compile(r"quant.*\.json$")
_GGUF_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Where an engine has its weights from, as it was told.

    Args:
        path: a directory, a file (GGUF), or the name of a repository on the Hugging Face Hub.
        revision: branch, tag or commit there, or None.
        load_format: SGLang's name of the loader.
        download_dir: the Hub's cache directory, or None for its default.
        adapters: (name, path) of LoRA adapters that are loaded at start. SGLang gives these an id made of name and path
            alone (lora/lora_registry.py:48), which a retrained adapter shares; those loaded later get a random one.
        is_cached: the weights may come from another process (SGLang's weight cache), which read them at another time.
    """

    path: str
    revision: str | None = None
    load_format: str = "auto"
    download_dir: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    is_cached: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """What lies on the disk: a digest of the index, the number of files, and when one of them last changed (Unix time).

    `changed_at` is the time that no tool can set (ctime), and counts what decides which files are meant, too: the
    directory, links on the way to it, and the reference that names a Hub snapshot. Blobs never change: not counted.
    """

    digest: str
    files: int
    changed_at: float


def index_checkpoint(source: WeightsSource) -> CheckpointIndex:
    """Hash the index of the files that an engine loads its weights from, adapters included.

    Raises:
        StepwellUsageError: there are no such files, or they cannot be read; the message says what to set instead.
    """
    if source.is_cached:
        raise _unknown(f"the weights of {source.path!r} come from SGLang's weight cache, read at another time")
    if source.load_format not in FILE_FORMATS:
        raise _unknown(f"load_format {source.load_format!r} of {source.path!r} has no weight files that stepwell knows")
    entries = [("model", *entry) for entry in _entries(source.path, source.revision, source.download_dir)]
    for name, path in source.adapters:
        entries += [(f"adapter {name}", *entry) for entry in _entries(path, None, source.download_dir)]
    digest = hashlib.sha256()
    for role, file, size, content, _ in sorted(entries):
        digest.update(repr((role, file, size, content)).encode())
    return CheckpointIndex(digest.hexdigest()[:32], len(entries), max(entry[-1] for entry in entries))


def model_label(path: str) -> str:
    """Return a model's name for people: the repository of a Hub snapshot or name, else the last part of its path."""
    parts = [part for part in path.rstrip("/").split("/") if part]
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    if not parts or (len(parts) == 2 and not path.startswith(("/", "."))):
        return path or "unnamed"
    return parts[-1]


def _unknown(why: str) -> StepwellUsageError:
    return StepwellUsageError(
        f"{why}, so nothing tells these weights from others after a restart: name them with "
        '{"stepwell": {"weights_id": "..."}} (always another name for other weights), or leave out shared and disk'
    )


def _entries(path: str, revision: str | None, download_dir: str | None) -> list[tuple[str, int, str, float]]:
    """List (name, size, content or time, ctime) of each file of a checkpoint."""
    try:
        found = list(_read(*_locate(path, revision, download_dir)))
    except OSError as error:
        raise _unknown(f"the weight files of {path!r} cannot be looked at ({error})") from error
    if not any(name.endswith(_WEIGHTS) for name, *_ in found):
        raise _unknown(f"{path!r} has no weight files ({', '.join(_WEIGHTS)})")
    return found


def _locate(path: str, revision: str | None, download_dir: str | None) -> tuple[list[Path], list[Path]]:
    """Return the files of a checkpoint, and what else decides which files these are."""
    place = Path(path)
    links = [part for part in (place.absolute(), *place.absolute().parents) if part.is_symlink()]
    if place.is_file():
        if not _GGUF_PART.search(place.name):
            return [place], links
        stem = _GGUF_PART.sub("", place.name)
        return [part for part in place.parent.iterdir() if _GGUF_PART.sub("", part.name) == stem], links
    if place.is_dir():
        return list(_files_of(place)), [place.resolve(), *links]
    snapshot = _hub_snapshot(path, revision, download_dir)
    reference = snapshot.parent.parent / "refs" / (revision or "main")
    return list(_files_of(snapshot)), [snapshot, reference] if reference.is_file() else [snapshot]


def _files_of(directory: Path) -> Iterator[Path]:
    # The loaders read the directory itself (model_loader/loader.py, `_prepare_weights`): what lies deeper (an
    # optimizer's states, another format's copy) is not loaded, and would only make the cache cold when it changes.
    for file in directory.iterdir():
        name = file.name
        if name.endswith(_WEIGHTS + _BESIDE) or _QUANTISATION.search(name):
            yield file


def _hub_snapshot(repository: str, revision: str | None, download_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download  # SGLang's own requirement; it knows where its cache is

    try:
        return Path(snapshot_download(repository, revision=revision, cache_dir=download_dir, local_files_only=True))
    except (OSError, ValueError) as error:  # not in the cache; not the name of a repository
        raise OSError(f"neither a path nor a repository in the Hub's cache: {error}") from error


def _read(files: Iterable[Path], deciders: Iterable[Path]) -> Iterator[tuple[str, int, str, float]]:
    changed_at = max((os.lstat(place).st_ctime for place in deciders), default=0.0)
    for file in files:
        status = os.stat(file)
        blob = file.resolve()
        if file.is_symlink() and blob.parent.name == "blobs":
            yield file.name, status.st_size, f"blob {blob.name}", changed_at
        else:
            yield file.name, status.st_size, f"time {status.st_mtime_ns}", max(changed_at, status.st_ctime)
