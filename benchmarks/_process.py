"""Objects in processes of their own, asked over pipes: one line of JSON each way.

`Worker("benchmarks.resume:Training", state="mini")` makes such an object; `ask("go_on")` calls its
method there and returns what that returns. The clock always runs on the other side, around the
call alone. Nothing heavy is imported here: it would count as start-up of whoever is measured.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

_XLA_FLAGS = "--xla_force_host_platform_device_count=8"
_NEEDS = {"orbax": "orbax", "torch-dcp": "torch", "safetensors": "safetensors"}
_PATIENCE_S = 60


class AbsentError(Exception):
    """A contender that is not installed."""


class Worker:
    """The side that asks.

    Attributes:
      ready: what the object says of itself once it is made (its attribute `ready`).

    Args:
      what: `module:class`.
      env: more environment for the process.
      arguments: what the class is called with.

    Raises:
      RuntimeError: the process ended instead of answering; its error is on stderr.
    """

    def __init__(self, what: str, *, env: Mapping[str, str] = {}, **arguments: Any) -> None:
        self.what = what
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._process", what, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": _XLA_FLAGS, "JAX_PLATFORMS": "cpu", **env},
        )
        self.ready = self._answer()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Call a method over there; what it returned."""
        self.begin(do, **arguments)
        return self._answer()

    def begin(self, do: str, **arguments: Any) -> None:
        """Call a method over there, and do not wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([do, arguments]) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(
                f"{self.what}: expected an answer, found the end of the process, with exit code "
                f"{self.process.returncode}\nhint: its error is on stderr, above"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process: kindly, then not."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.process.communicate(timeout=_PATIENCE_S)
        self.kill()

    def kill(self) -> None:
        """End the process with SIGKILL, wherever it is."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what could not be written is not missed
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Contender(Worker):
    """One that saves and loads: a class of `_contenders`, measured by `_measured.Measured`.

    Raises:
      AbsentError: its package is not installed.
    """

    def __init__(self, name: str, state: str, *, env: Mapping[str, str] = {}) -> None:
        require_installed(name)
        self.name = name
        super().__init__("benchmarks._measured:Measured", env=env, name=name, state=state)


def require_installed(name: str) -> None:
    """Raise AbsentError if the package of a contender is not installed."""
    package = next((p for k, p in _NEEDS.items() if name.startswith(k)), None)
    if package is not None and importlib.util.find_spec(package) is None:
        raise AbsentError(name)


def _serve(what: str, arguments: str) -> None:
    """The side that answers, until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a package prints must not look like an answer
    module, _, name = what.partition(":")
    made = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    print(json.dumps(getattr(made, "ready", {})), file=answers)
    for line in sys.stdin:
        do, given = json.loads(line)
        answer = json.dumps(getattr(made, do)(**given))
        gc.collect()  # outside of every clock: some peers leave a loaded state in cycles each time
        print(answer, file=answers)


def timed(call: Any, *arguments: Any, **more: Any) -> tuple[Any, float]:
    """What a call returns, and the seconds that it took."""
    began = time.perf_counter()
    result = call(*arguments, **more)
    return result, time.perf_counter() - began


if __name__ == "__main__":
    _serve(*sys.argv[1:])
