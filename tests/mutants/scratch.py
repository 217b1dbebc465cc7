"""A copy of the tree in which one fault at a time is tried: its builds, its interpreter, its commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import counting
from mutant_list import Mutant, sources

LEAST_SECONDS = 90.0
"""A command may run for so long, or 10 times as long as without a mutant; then it hangs."""
_BUILD_SECONDS = 1800.0
_HUNG = "hang"
_ISOLATION = [
    *("setpriv", "--pdeathsig", "KILL"),  # with this script all that it has started
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", 'mount -t tmpfs none /dev/shm || exit; "$@"; exit $?', "sh"),  # process 1 stays: it takes no signals
]


class ListError(Exception):
    """Report a mutant or a command that is wrong in itself: it catches nothing, nor is it caught."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command came to. has_failed: it did what a mutant's is to do."""

    has_failed: bool
    by: str
    how: str
    after: str
    seconds: float
    output: str


def _isolation() -> list[str]:
    """Return what has a command run with processes and shared memory of its own, which end with it; [] if not to be
    had: then a command that crashes may leave files in /dev/shm."""
    try:
        subprocess.run([*_ISOLATION, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return _ISOLATION


class Tree:
    """A copy of the repository, with builds of the core that follow its files.

    Invariant: between two calls its sources are those of the repository.
    Threads: one at a time; several trees, in folders of their own, may work side by side.
    """

    def __init__(self, root: Path, folder: Path, *, is_core_installed: bool) -> None:
        """Args: is_core_installed: take the core of the interpreter that runs this, and build none."""
        self.tree = folder / "tree"
        self._folder = folder
        self._is_core_installed = is_core_installed
        self._isolation = _isolation()
        self._python = folder / "venv" / "bin" / "python"
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        self._copy(root)
        self._make_interpreter()
        if is_core_installed:
            self._link_core(Path(_installed_core()))

    # ---- making it --------------------------------------------------------------------------------------------------

    def _copy(self, root: Path) -> None:
        """Bring the copy up to date; a file that is as it was keeps its time, and is not compiled again."""
        wanted = set(sources(root))
        for name in wanted:
            source, target = root / name, self.tree / name
            if not target.is_file() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        for path in [*self.tree.rglob("*.py"), *self.tree.rglob("*.cc"), *self.tree.rglob("*.cpp")]:
            if str(path.relative_to(self.tree)) not in wanted:
                path.unlink()

    def _make_interpreter(self) -> None:
        """Make a virtual environment that has the tests' tools, and of stepwell the copy."""
        if not self._python.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", self._folder / "venv"], check=True)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(self._folder / "venv")}, scheme="venv"))
        # Lines of a .pth file are folders; the .pth files in those are not looked at, so that no editable install is.
        tools = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        paths = [str(self.tree / "src"), *tools]
        (packages / "mutants.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(paths)))

    def _link_core(self, core: Path) -> None:
        link = self.tree / "src" / "stepwell" / core.name
        if link.is_symlink() or link.exists():
            link.unlink()
        link.symlink_to(core)

    # ---- mutants ----------------------------------------------------------------------------------------------------

    def apply(self, mutant: Mutant) -> None:
        """Put a fault in. Requires: restore() before the next."""
        path = self.tree / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise ListError(f"its old text stands {text.count(mutant.old)} times in {mutant.file}, not once")
        path.write_text(text.replace(mutant.old, mutant.new))

    def restore(self, mutant: Mutant, root: Path) -> None:
        """Take it out again."""
        shutil.copyfile(root / mutant.file, self.tree / mutant.file)

    def run(self, line: str, *, limit: float) -> Outcome:
        """Run one command of the suite, compiling what it needs.

        Raises:
            ListError: the sources do not compile, or the command tests nothing.
        """
        kind, _, rest = line.partition(" ")
        if line.startswith("tests/"):
            self._build("core")
            return self._pytest(shlex.split(line), limit)
        if kind == "driver":
            self._build("core")
            script = self.tree / "tests" / "mutants" / "drive.py"
            outcome = self._command([self._python, script, *shlex.split(rest)], limit, line)
            found = re.search(r"found after (.*)", outcome.output)
            return _with(outcome, after=found[1] if found else "")
        if kind == "stress":
            return self._sanitized([self._build("thread") / "stepwell_stress", "--seconds", rest], limit, line)
        # A comma parts patterns there; a question mark is any character.
        program = [
            self._build("plain" if kind == "cpp" else "thread") / "stepwell_tests",
            f"-tc={rest.replace(',', '?')}",
        ]
        outcome = self._sanitized(program, limit, rest) if kind == "tsan" else self._command(program, limit, rest)
        if re.search(r"test cases: +0 ", outcome.output):
            raise ListError(f"{line}: there is no such test case")
        return outcome

    # ---- commands ---------------------------------------------------------------------------------------------------

    def _pytest(self, arguments: list[str], limit: float) -> Outcome:
        counts_file = self._folder / "counts"
        counting.make_file(counts_file)
        options = [
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "-p",
            "counting",
            f"--mutant-counts={counts_file}",
        ]
        program = [self._python, "-m", "pytest", *options, f"--timeout={limit:.0f}", *arguments]
        outcome = self._command(program, limit + 30, arguments[0])
        if re.search(r"^E +.*Timeout|Failed: Timeout", outcome.output, re.MULTILINE):
            outcome = _with(outcome, how=_HUNG)
        counts = counting.Counts.read(counts_file)
        if outcome.has_failed and (counts.tests == 0 or "error during collection" in outcome.output):
            raise ListError(f"nothing could be tested:\n{outcome.output[-4000:]}")
        parts = [(counts.tests, "test"), (counts.examples, "example"), (counts.steps, "step")]
        after = ", ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in parts if count)
        return _with(outcome, by=counts.name, after=after)

    def _sanitized(self, program: list[str | Path], limit: float, by: str) -> Outcome:
        # ThreadSanitizer cannot start where the kernel randomizes addresses by more bits than its layout allows.
        outcome = self._command(["setarch", os.uname().machine, "-R", *program], limit, by)
        return _with(outcome, how="data race") if "WARNING: ThreadSanitizer" in outcome.output else outcome

    def _command(self, program: list[str | Path], limit: float, by: str) -> Outcome:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("STEPWELL_", "PYTEST_"))
        }
        environment |= {
            "PYTHONPATH": str(self.tree / "tests" / "mutants"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._folder / "hypothesis"),
            "TMPDIR": str(self._folder / "tmp"),
            "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
        }
        output = self._folder / "output"
        began = time.monotonic()
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [*self._isolation, *program],
                cwd=self.tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        text = output.read_text(errors="replace")
        _empty(self._folder / "tmp")
        seconds = time.monotonic() - began
        return Outcome(code != 0, by, _how(code, text), "", seconds, text)

    # ---- builds -----------------------------------------------------------------------------------------------------

    def _build(self, kind: str) -> Path:
        """Bring a build up to date: core (the module), plain and thread (the C++ tests). Returns its folder."""
        build = self._folder / f"build-{kind}"
        if kind == "core" and self._is_core_installed:
            return build
        if not (build / "build.ninja").exists():
            options = {
                "core": ["-DSKBUILD=2", "-DSKBUILD_STATE=wheel", f"-DPython_EXECUTABLE={sys.executable}", *_nanobind()],
                "plain": ["-DSTEPWELL_CPP_TESTS=ON", "-DSTEPWELL_ABORT_ON_ASSERT=ON"],
                "thread": ["-DSTEPWELL_CPP_TESTS=ON", "-DSTEPWELL_ABORT_ON_ASSERT=ON", "-DSTEPWELL_SANITIZE=thread"],
            }[kind]
            if shutil.which("ccache"):
                options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
            self._make(
                ["cmake", "-S", self.tree, "-B", build, "-G", "Ninja", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -w", *options]
            )
        self._make(["cmake", "--build", build, *(["--target", "_core"] if kind == "core" else [])])
        if kind == "core":
            [core] = build.glob("_core.*so")
            self._link_core(core)
        return build

    def _make(self, command: list[str | Path]) -> None:
        folder = Path(sys.executable).parent
        environment = {
            **os.environ,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "CCACHE_BASEDIR": str(self._folder),  # what one tree has compiled the others have too
            "CCACHE_NOHASHDIR": "1",
        }
        made = subprocess.run(
            [*self._isolation, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_BUILD_SECONDS,
            stdin=subprocess.DEVNULL,
        )
        if made.returncode != 0:
            raise ListError(f"does not compile:\n{(made.stdout + made.stderr)[-4000:]}")


def _with(outcome: Outcome, **changes: str) -> Outcome:
    values = {name: getattr(outcome, name) for name in Outcome.__slots__}
    return Outcome(**{**values, **changes})


def _how(code: int | None, output: str) -> str:
    """Say in which way a command failed, where that is not just a failed check."""
    if code is None:
        return _HUNG
    if code > 128:  # under unshare, and a shell
        code = 128 - code
    named = re.search(r"fatal error: .*?(SIG[A-Z]+)|Fatal Python error: (\w[\w ]*)", output)
    if code >= 0 and named is None:
        return ""
    name = signal.Signals(-code).name if code < 0 else (named.group(1) or named.group(2) if named else "")
    return f"crash {name}"


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _installed_core() -> str:
    from stepwell import _core

    return str(_core.__file__)


def _nanobind() -> list[str]:
    import nanobind

    return [f"-Dnanobind_DIR={nanobind.cmake_dir()}"]
