"""Kill a command at its n-th call that changes files or talks to the Hub, or count these calls.

A command runs in a fork, which has imported everything. Every call that changes a file under a watched directory is a
kill point: before it, and where a file is opened for writing or saved by safetensors also after it, when the file is
empty or half written. Requests to the Hub are kill points before they are sent and after the answer has arrived.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).parents[2]
CHANGES = {
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)),
    "os.symlink": ((1, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.truncate": ((0, None),),
    "shutil.rmtree": ((0, None),),
    "open": ((0, None),),
}
"""Audit events of calls that change files: where their arguments have paths, and open directories of these."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Outcome(NamedTuple):
    """How a command ended: its exit code (negative: the signal), its kill points in order, and what it printed."""

    code: int
    points: list[str]
    output: str


class Commands:
    """Runs `hf-posenc` command lines in forks of a process of its own, which has another environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kill_points"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def run(self, words: Sequence[object], watched: Path, kill_at: int | str | None = None) -> Outcome:
        """The same as `run_command`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"words": [str(word) for word in words], "watched": str(watched), "kill_at": kill_at}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Outcome(**json.loads(self.process.stdout.readline()))


class KillPoints:
    """Counts the calls of this process that change something, and kills it at one of them."""

    def __init__(self, watched: str, kill_at: int | str | None, record: Callable[[str], None]) -> None:
        self.watched, self.kill_at, self.record = watched, kill_at, record
        self.count, self.is_active = 0, True

    def reach(self, name: str, change: Callable[[], None] = lambda: None) -> None:
        """A kill point. `change` brings about what the call would have done by then."""
        if not self.is_active:
            return
        self.count += 1
        self.record(name)
        if self.kill_at in (self.count, name):
            self.is_active = False
            try:
                change()
            finally:
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Watch the calls of Python, safetensors and the Hub's client."""
        import safetensors.torch
        from huggingface_hub.utils import get_session

        client_class: Any = type(get_session())

        sys.addaudithook(self.audit)
        fsync, serialize, send = os.fsync, safetensors.torch.serialize_file, client_class.send

        def watched_fsync(handle: Any) -> None:
            self.reach("fsync")
            fsync(handle)

        def watched_serialize(tensors: Any, filename: Any, *args: Any, **options: Any) -> None:
            self.reach(f"save {Path(filename).name}")
            serialize(tensors, filename, *args, **options)
            half = os.path.getsize(filename) // 2
            self.reach(f"save half of {Path(filename).name}", lambda: os.truncate(filename, half))

        def watched_send(client: Any, request: Any, **options: Any) -> Any:
            self.reach(f"send {request.method}")
            response = send(client, request, **options)
            self.reach(f"answered {request.method}")
            return response

        os.fsync, safetensors.torch.serialize_file = watched_fsync, watched_serialize
        client_class.send = watched_send

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_active or event not in CHANGES:
            return
        paths = [self._path(arguments, *indices) for indices in CHANGES[event]]
        path = next((path for path in paths if path is not None), None)
        if path is None or (event == "open" and not arguments[2] & WRITING):
            return
        self.reach(f"{event} {os.path.basename(path)}")
        if event == "open" and not os.path.isdir(path):  # a directory is opened for a file without a name
            flags = os.O_WRONLY | os.O_CREAT | (arguments[2] & os.O_TRUNC)
            self.reach(f"opened {os.path.basename(path)}", lambda: os.close(os.open(path, flags, 0o644)))

    def _path(self, arguments: tuple[Any, ...], index: int, directory_index: int | None) -> str | None:
        """The full path of an argument, if it is under the watched directory."""
        if not isinstance(arguments[index], (str, os.PathLike)):
            return None
        path, directory = os.fspath(arguments[index]), arguments[directory_index] if directory_index else -1
        if directory is not None and directory >= 0:  # an open one, as in shutil.rmtree
            path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)
        return path if os.path.abspath(path).startswith(self.watched) else None


def run_command(words: Sequence[object], watched: Path | str, kill_at: int | str | None = None) -> Outcome:
    """Run a command line in a fork of this process.

    Args:
        words: The command line, without `hf-posenc`.
        watched: The directory whose changes are kill points.
        kill_at: The kill point to die at: its number, counted from 1, or its name. None: let it end.

    Returns:
        How it ended.
    """
    with tempfile.TemporaryFile("w+") as points, tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            code = 1
            try:
                sys.stdout = sys.stderr = output  # pytest has replaced them
                code = _run([str(word) for word in words], str(watched), kill_at, points)
            except BaseException:
                traceback.print_exc()
            finally:
                output.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (points, output):
            file.seek(0)
        return Outcome(code, points.read().splitlines(), output.read())


def _run(words: list[str], watched: str, kill_at: int | str | None, points: IO[str]) -> int:
    """Run a command line in this process, which is a fork; returns its exit code."""
    from hf_posenc.cli import app

    def record(name: str) -> None:
        points.write(f"{name}\n")
        points.flush()

    try:
        KillPoints(watched, kill_at, record).install()
        app(words)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(bool(done.code))
    return 0


def main() -> None:
    """Answer requests on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may print answers
    import torch

    import hf_posenc.checkpoints
    import hf_posenc.evaluation
    import hf_posenc.hub
    import hf_posenc.plots.evaluation
    import hf_posenc.training  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        answers.write(json.dumps(run_command(**json.loads(line))._asdict()) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
