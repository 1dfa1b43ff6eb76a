"""Runs one program under limits: python -I sandbox_guard.py PROGRAM FD SECONDS MEMORY_MIB FILE_MIB < secret word.

Imports nothing of this package, as it is started alone.
"""

import _posixsubprocess
import ctypes  # noqa: F401  before the guard, as numpy wants it
import os
import resource
import sys

FORBIDDEN = {
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.exec",
    "os.system",
    "os.kill",
    "os.killpg",
    "pty.spawn",
    "subprocess.Popen",
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.getaddrinfo",
}
"""Events of Python's auditing that end in an error: new processes, signals to others, connections."""


def limit(seconds: float, memory_mib: int, file_mib: int) -> None:
    """Set the limits of this process and of all that comes of it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_mib << 20, file_mib << 20))


def refuse(event: str, arguments: tuple) -> None:
    """The audit hook; it cannot be taken away again."""
    if event in FORBIDDEN:
        raise PermissionError(f"{event} is not allowed in a generated program")


def no_process(*arguments: object) -> int:
    """In place of what starts processes without an event of auditing."""
    raise PermissionError("new processes are not allowed in a generated program")


def main() -> None:
    path, descriptor, seconds, memory_mib, file_mib = sys.argv[1:]
    word = sys.stdin.buffer.read()
    sys.stdin = open(os.devnull, encoding="utf-8")
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        text = file.read()
    sys.argv = [path]
    limit(float(seconds), int(memory_mib), int(file_mib))
    _posixsubprocess.fork_exec = no_process
    sys.addaudithook(refuse)
    exec(compile(text, "program.py", "exec"), {"__name__": "__main__", "__file__": path})
    os.write(int(descriptor), word)


if __name__ == "__main__":
    main()
