"""Starting the instances, and seeing them to their end: signals, failures, exit statuses, and nothing left behind.

Each instance leads a process group, and no shell is anywhere. One thread waits for everything at once: ends of
children and signals arrive through a socket (signal.set_wakeup_fd), output through pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from xopt.launch import binding
from xopt.launch.errors import LaunchError
from xopt.launch.guard import Guard
from xopt.launch.measure import Measured
from xopt.launch.output import ClosedOutput, Stream
from xopt.launch.plan import Instance

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# A second signal kills at once, if it is a second one: timeout(1) sends each twice.
_PATIENCE_SECONDS = 1.0


@dataclass(frozen=True)
class Manner:
    """How instances are run."""

    stop_on_failure: bool = True
    grace_seconds: float = 10.0
    carried: bool = True
    """Output goes through the launcher; otherwise instances write to the launcher's own."""
    numbered: bool = True
    """Each line of it begins with its instance."""
    output: int = 1
    """The descriptor that standard output is carried to."""
    say: Callable[[str], None] = print


@dataclass
class _Running:
    instance: Instance
    process: subprocess.Popen[bytes]
    started: float
    measured: Measured
    streams: list[Stream] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    status: int
    """What the launcher ends with: the first failing instance's, or 0."""
    measured: tuple[Measured, ...]
    signal: int = 0
    """The one from outside that has ended the run."""


def run(instances: tuple[Instance, ...], manner: Manner) -> Result:
    with Guard() as guard, _signals() as arrivals:
        return _Run(manner, guard, arrivals).run(instances)


def status_of(code: int) -> int:
    """An exit status as shells have it: 128 and the signal's number for one that was killed."""
    return 128 - code if code < 0 else code


class _Run:
    def __init__(self, manner: Manner, guard: Guard, arrivals: socket.socket) -> None:
        self._manner = manner
        self._guard = guard
        self._arrivals = arrivals
        self._selector = selectors.DefaultSelector()
        self._selector.register(arrivals, selectors.EVENT_READ)
        self._running: list[_Running] = []
        self._ended: list[Measured] = []
        self._status = 0
        self._stopping = 0
        """The signal that ends the run."""
        self._stopped_at = 0.0
        self._signal = 0
        self._deadline: float | None = None
        self._said: set[str] = set()

    def run(self, instances: tuple[Instance, ...]) -> Result:
        try:
            for instance in instances:
                self._start(instance)
                self._attend(0)
                if self._stopping:
                    break
            while self._running:
                self._attend(None)
        finally:  # an error of the launcher's own
            for running in list(self._running):
                os.killpg(running.process.pid, signal.SIGKILL)
                self._finish(running)
            self._selector.close()
        if not self._ended and self._stopping:
            self._status = 128 + self._stopping
        return Result(self._status, tuple(sorted(self._ended, key=lambda measured: measured.index)), self._signal)

    # ---- Starting ---------------------------------------------------------------------------------------------------

    def _start(self, instance: Instance) -> None:
        piped = self._manner.carried and instance.log is None
        with contextlib.ExitStack() as files:
            target: int | None = subprocess.PIPE if piped else None
            if instance.log is not None:
                target = files.enter_context(instance.log.open("wb")).fileno()
            reading, writing = os.pipe()
            files.callback(os.close, reading)
            try:
                process = self._spawn(instance, target, piped, writing)
            finally:
                os.close(writing)
            self._guard.add(process.pid)
            denied = b"".join(iter(lambda: os.read(reading, 1 << 16), b""))
        running = _Running(instance, process, time.monotonic(), Measured(instance.index))
        self._running.append(running)
        for complaint in json.loads(denied or b"[]"):
            if complaint not in self._said:
                self._said.add(complaint)
                self._manner.say(f"denied: {complaint}")
        if process.stdout is not None and process.stderr is not None:
            tag = f"[{instance.index}] " if self._manner.numbered else ""
            for pipe, output in ((process.stdout, self._manner.output), (process.stderr, 2)):
                stream = Stream(os.dup(pipe.fileno()), output, tag, running.measured.watch)
                pipe.close()
                running.streams.append(stream)
                self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)

    def _spawn(self, instance: Instance, target: int | None, piped: bool, told: int) -> subprocess.Popen[bytes]:
        launcher = os.getpid()

        def prepare() -> None:
            os.setpgid(0, 0)
            binding.die_with(launcher)
            os.write(
                told, json.dumps(binding.bind(instance.cpus, instance.memory.mode, instance.memory.nodes)).encode()
            )

        try:
            return subprocess.Popen(
                instance.command,
                # A process group that is not the terminal's own is stopped when it reads from there.
                stdin=subprocess.DEVNULL if self._manner.carried or os.isatty(0) else None,
                stdout=target,
                stderr=subprocess.PIPE if piped else subprocess.STDOUT if target is not None else None,
                env={**os.environ, **instance.environment},
                preexec_fn=prepare,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {instance.command[0]}: {error.strerror}") from error

    # ---- Waiting ----------------------------------------------------------------------------------------------------

    def _attend(self, timeout: float | None) -> None:
        """Deals with what has happened, or happens within the time."""
        if timeout is None and self._deadline is not None:
            timeout = max(self._deadline - time.monotonic(), 0)
        ready = [key for key, _ in self._selector.select(timeout)]
        for key in ready:
            if isinstance(key.data, Stream):
                self._carry(key.data)
        if any(key.data is None for key in ready):
            for number in self._arrivals.recv(1 << 12):
                if number in _FORWARDED:
                    self._on_signal(number)
            for running in list(self._running):
                if os.waitid(os.P_PID, running.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    self._finish(running)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            self._send(signal.SIGKILL)

    def _on_signal(self, number: int) -> None:
        if not self._stopping:
            self._signal = number
            self._stop(number)
        elif time.monotonic() - self._stopped_at > _PATIENCE_SECONDS:
            self._send(signal.SIGKILL)

    def _stop(self, number: int) -> None:
        if not self._stopping:
            self._stopping = number
            self._stopped_at = time.monotonic()
            self._deadline = self._stopped_at + self._manner.grace_seconds
            self._send(number)
            self._send(signal.SIGCONT)  # one that was stopped could not end

    def _send(self, number: int) -> None:
        for running in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, number)

    def _carry(self, stream: Stream) -> None:
        try:
            if not stream.read():
                self._selector.unregister(stream.descriptor)
        except ClosedOutput as closed:
            self._on_closed_output(closed.descriptor)

    def _on_closed_output(self, descriptor: int) -> None:
        """What a program does whose reader has gone: it ends, with the status of SIGPIPE. What instances still print
        on their way is taken from them and dropped, so that they do not wait."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, descriptor)
        os.close(nothing)
        if not self._status:
            self._status = 128 + signal.SIGPIPE
            self._manner.say("the output was closed by its reader: stopping")
        self._stop(signal.SIGTERM)

    # ---- Ending -----------------------------------------------------------------------------------------------------

    def _finish(self, running: _Running) -> None:
        """The instance has ended and is not yet reaped, so that its group's number is still its own."""
        group = running.process.pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)  # what it has left behind
        _, wait_status, usage = os.wait4(group, 0)
        self._guard.remove(group)
        running.process.returncode = os.waitstatus_to_exitcode(wait_status)
        self._running.remove(running)
        for stream in running.streams:
            self._carry_rest(stream)
        measured = running.measured
        measured.status = status_of(running.process.returncode)
        measured.wall_seconds = time.monotonic() - running.started
        measured.cpu_seconds = usage.ru_utime + usage.ru_stime
        measured.peak_bytes = usage.ru_maxrss * 1024
        measured.stopped = bool(self._stopping)
        self._ended.append(measured)
        if measured.status:
            self._on_failure(running.instance, running.process.returncode)

    def _carry_rest(self, stream: Stream) -> None:
        with contextlib.suppress(KeyError):  # its end has been seen already
            self._selector.unregister(stream.descriptor)
        try:
            stream.read()
            stream.finish()
        except ClosedOutput as closed:
            self._on_closed_output(closed.descriptor)
        finally:
            os.close(stream.descriptor)

    def _on_failure(self, instance: Instance, code: int) -> None:
        first = not self._status
        self._status = self._status or status_of(code)
        if self._stopping:
            return
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        stopping = first and self._manner.stop_on_failure and bool(self._running)
        self._manner.say(f"instance {instance.index} {cause}" + ("; stopping the others" if stopping else ""))
        if self._manner.stop_on_failure:
            self._stop(signal.SIGTERM)


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Signals as bytes to be read. One that was ignored when the launcher was started (nohup) stays so."""
    reading, writing = socket.socketpair()
    for end in (reading, writing):
        end.setblocking(False)
    handled = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in (*handled, signal.SIGCHLD)}
    previous = signal.set_wakeup_fd(writing.fileno())
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        reading.close()
        writing.close()
