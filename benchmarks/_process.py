"""A contender in a process of its own, asked over pipes: one JSON line each way.

The clock runs inside that process, around the call alone. After a load everything is compared with
what was saved, bit for bit, outside of the clock.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

import numpy as np

_XLA_FLAGS = "--xla_force_host_platform_device_count=8"
_NEEDS = {"orbax": "orbax", "torch-dcp": "torch", "safetensors": "safetensors"}


class AbsentError(Exception):
    """A contender that is not installed."""


class Contender:
    """The side that asks."""

    def __init__(self, name: str, state: str) -> None:
        package = next((p for k, p in _NEEDS.items() if name.startswith(k)), None)
        if package is not None and importlib.util.find_spec(package) is None:
            raise AbsentError(name)
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._process", name, state],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": _XLA_FLAGS, "JAX_PLATFORMS": "cpu"},
        )
        self.version = self._answer()["version"]

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Let it do something; its answer has `seconds`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.communicate(timeout=60)


def _serve(name: str, state: str) -> None:
    """The side that answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a package prints must not look like an answer
    from benchmarks import _contenders

    contender = _contenders.CONTENDERS[name](state)
    print(json.dumps({"version": contender.version()}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        do = _DO[request.pop("do")]
        print(json.dumps(do(contender, state, **request)), file=answers)


def _save(contender: Any, state: str, path: str) -> dict[str, Any]:  # noqa: ARG001
    seconds = _timed(contender.save, path)[1]
    from benchmarks._contenders import bytes_below

    return {"seconds": seconds, "bytes": bytes_below(path)}


def _save_async(contender: Any, state: str, path: str) -> dict[str, Any]:  # noqa: ARG001
    wait, blocked = _timed(contender.save_async, path)
    return {"seconds": blocked, "rest": _timed(wait)[1]}


def _load(contender: Any, state: str, path: str, mesh: list[int]) -> dict[str, Any]:
    loaded, seconds = _timed(contender.load, path, tuple(mesh))
    _compare(contender, state, loaded)
    return {"seconds": seconds}


def _subset(contender: Any, state: str, path: str, prefix: str) -> dict[str, Any]:
    loaded, seconds = _timed(contender.subset, path, prefix)
    _compare(contender, state, loaded, prefix)
    return {"seconds": seconds}


def _verify(contender: Any, state: str, path: str) -> dict[str, Any]:  # noqa: ARG001
    return {"seconds": _timed(contender.verify, path)[1]}


def _remove(contender: Any, state: str, path: str) -> dict[str, Any]:  # noqa: ARG001
    shutil.rmtree(path, ignore_errors=True)
    os.sync()
    return {}


_DO = {
    "save": _save,
    "save_async": _save_async,
    "load": _load,
    "subset": _subset,
    "verify": _verify,
    "remove": _remove,
}


def _timed(call: Any, *arguments: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    result = call(*arguments)
    return result, time.perf_counter() - began


def _compare(contender: Any, state: str, loaded: Any, prefix: str = "") -> None:
    from benchmarks import _contenders, _states

    wanted = _contenders.expected(contender, state)
    wanted = {k: v for k, v in wanted.items() if k.startswith(prefix)}
    found = _states.named_leaves(loaded)
    assert found.keys() == wanted.keys(), f"{contender} has other names"
    for name, value in wanted.items():
        same = np.array_equal(_states.host(found[name]).view(np.uint8), value.view(np.uint8))
        assert same, f"{contender} has other values in {name}"


if __name__ == "__main__":
    _serve(*sys.argv[1:])
