"""Keep the results that README shows: run the demo and the benchmarks, write each with its origin, print the tables.

    python benchmarks/kept.py          run everything, write benchmarks/results/*.json (quiet machine, clean tree)
    python benchmarks/kept.py --show   print the tables of what is kept
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"


@functools.cache  # asked first while the tree is as it was: what is kept makes it another
def machine() -> dict[str, str | int]:
    """Say where a figure comes from."""
    cpus = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":")[1].strip() for line in cpus.splitlines() if "model name" in line), platform.machine())
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=HERE
    )
    return {
        "cpu": model,
        "cores": os.cpu_count() or 0,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": described.stdout.strip(),
    }


def keep(name: str, result: dict[str, Any]) -> None:
    """Write one result with its origin."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result | {"machine": machine()}, indent=1) + "\n")


def run(*command: str) -> dict[str, Any]:
    """Run a command that prints JSON; raise where it fails."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run_all() -> None:
    """Run everything and keep it."""
    machine()
    demo = run("-m", "stepwell.cli", "demo", "--json", "--model", "random")
    for summary in demo["runs"].values():
        del summary["served"]
    keep("demo", demo)
    for page_kib, pages in ((2048, 128), (64, 1024)):
        keep(
            f"tiers_{page_kib}k",
            run(str(HERE / "bench_tiers.py"), "--page-kib", str(page_kib), "--pages", str(pages), "--rounds", "7"),
        )
        keep(
            f"durability_{page_kib}k",
            run(str(HERE / "bench_durability.py"), "--page-kib", str(page_kib), "--pages", str(pages), "--rounds", "7"),
        )
    if importlib.util.find_spec("sglang") is not None:
        keep("sglang", run(str(HERE / "bench_sglang.py")))
    else:
        print("sglang is not installed here: bench_sglang.py --keep writes its result where it is", file=sys.stderr)


def show() -> str:
    """Return README's tables of the kept results."""
    demo = json.loads((RESULTS / "demo.json").read_text())
    served, shared, disk = (demo["runs"][name] for name in ("served", "shared", "disk"))
    lines = [
        f"One run, {demo['requests']} requests ({demo['machine']['cpu']}, {demo['machine']['cores']} cores, "
        f"commit {demo['machine']['commit']}; `benchmarks/results/demo.json`):",
        "",
        "| tier | tokens reused: served | after SIGKILL | shared memory removed | MB read | MB written |",
        "|---|---|---|---|---|---|",
    ]
    for tier in ("device", "host", "shared", "disk"):
        reused = [str(one["reused_tokens"].get(tier, 0)) for one in (served, shared, disk)]
        moved = ["-", "-"]
        if tier != "device":
            ways = ("bytes_read", "bytes_written")
            moved = [f"{sum(one[way].get(tier, 0) for one in (served, shared, disk)) / 1e6:.1f}" for way in ways]
        lines.append("| " + " | ".join([tier, *reused, *moved]) + " |")
    lines.append("")
    for check in demo["checks"]:
        verdict = {True: "holds", False: "FAILS", None: "not judged"}[check["holds"]]
        lines.append(f"- {verdict}: {check['name']}: {check['detail']}")
    lines += ["", "| pages | " + " | ".join(TIER_COLUMNS) + " |", "|---|" + "---|" * len(TIER_COLUMNS)]
    for name in ("tiers_2048k", "tiers_64k"):
        kept = json.loads((RESULTS / f"{name}.json").read_text())
        cells = [f"{kept['gb_per_s'][c]} ({kept['of_limit'][c]})" for c in TIER_COLUMNS]
        lines.append(f"| {kept['page_kib']} KiB | " + " | ".join(cells) + " |")
    columns = ("raw", "process", "raw + sync", "power")
    lines += ["", "| pages | " + " | ".join(columns) + " | syncs a save |", "|---|" + "---|" * (len(columns) + 1)]
    for name in ("durability_2048k", "durability_64k"):
        kept = json.loads((RESULTS / f"{name}.json").read_text())
        of_raw = {"raw": 1.0} | kept["of_raw"]
        cells = [f"{kept['gb_per_s'][c]}" + (f" ({of_raw[c]})" if c in of_raw else "") for c in columns]
        lines.append(f"| {kept['page_kib']} KiB | " + " | ".join(cells) + f" | {kept['syncs']['one save']} |")
    if (path := RESULTS / "sglang.json").exists():
        lines += ["", sglang_table(json.loads(path.read_text()))]
    return "\n".join(lines)


def sglang_table(result: dict[str, Any]) -> str:
    """Return a result of bench_sglang.py as a table: medians, and how many times as fast stepwell was than each of the
    others (least to most of all rounds)."""
    lines = [
        "| where, pages | call | stepwell | HiCacheFile | plain | times HiCacheFile | times plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in result["cells"]:
        figures = {**cell["gb_per_s"], **cell["us_per_1000_keys"]}
        for call, by_mine in cell["times_as_fast"].items():
            for mine, by_peer in by_mine.items():
                where = "/dev/shm" if cell["place"] == "shm" else "shared + disk" if "shared" in mine else "disk"
                unit = "us" if call in cell["us_per_1000_keys"] else "GB/s"
                values = [figures[call][name][0] for name in (mine, "HiCacheFile", "plain")]
                cells = [f"{value:.0f}" if unit == "us" else f"{value:.2f}" for value in values]
                times = [f"{m} ({low} to {high})" for m, low, high in (by_peer["HiCacheFile"], by_peer["plain"])]
                pages = f"{where}, {cell['page_kib']} KiB, {cell['layout']}"
                lines.append("| " + " | ".join([pages, f"{call}, {unit}", *cells, *times]) + " |")
    return "\n".join(lines)


SGLANG_CALLS = {"shm": ("set", "get", "hit", "exists"), "disk": ("set + sync", "get", "hit", "exists")}


def sglang_summary(result: dict[str, Any]) -> str:
    """Return README's table of a result of bench_sglang.py: medians of how many times as fast stepwell was. On disk
    without a shared tier above it."""
    layouts = list(dict.fromkeys(cell["layout"] for cell in result["cells"]))
    rows: dict[str, list[str]] = {}
    for cell in result["cells"]:
        for call in SGLANG_CALLS[cell["place"]]:
            by_mine = cell["times_as_fast"].get(call)
            if by_mine is None:
                continue
            by_peer = next(times for mine, times in by_mine.items() if cell["place"] == "shm" or "shared" not in mine)
            pages = "1,000 keys" if call == "exists" else f"{cell['page_kib']} KiB"
            row = f"{'/dev/shm' if cell['place'] == 'shm' else 'disk'}, {pages}: {call}"
            rows.setdefault(row, []).append(" / ".join(f"{by_peer[peer][0]:.2g}" for peer in ("HiCacheFile", "plain")))
    lines = ["| | " + " | ".join(layouts) + " |", "|---|" + "---|" * len(layouts)]
    return "\n".join(lines + [f"| {row} | " + " | ".join(values) + " |" for row, values in rows.items()])


TIER_COLUMNS = (
    "copy",
    "memcpy",
    "pool -> shared",
    "shared -> pool",
    "raw write",
    "shared -> disk",
    "raw read",
    "disk -> shared + pool",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true")
    if not parser.parse_args().show:
        run_all()
    print(show())
    return 0


if __name__ == "__main__":
    sys.exit(main())
