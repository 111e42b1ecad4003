"""One process of `assert_exact_resume`: trains, writes down what every step gave, dies on time.

Run as `python -m jaxshard.testing._trainer ORDERS`, a JSON file.
"""

import importlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

SCRIPT = "__jaxshard_script__"  # not "__main__": what is below `if __name__ == …` does not run


def main(orders: dict[str, Any]) -> None:
    """Train from where the run is to the end, or to the step at which to die."""
    sys.argv = orders["argv"]
    sys.path[:0] = [path for path in orders["sys_path"] if path not in sys.path]
    import jax  # noqa: PLC0415  (after the environment was set)

    import jaxshard  # noqa: PLC0415
    from jaxshard.testing._trees import leaf_digests  # noqa: PLC0415

    make = _function(orders["module"], orders["file"], orders["name"])
    mesh = None
    if orders["mesh"] is not None:
        count = 1
        for size in orders["mesh"].values():
            count *= size
        names, sizes = tuple(orders["mesh"]), tuple(orders["mesh"].values())
        mesh = jax.make_mesh(sizes, names, devices=jax.devices()[:count])
    state, update = make() if mesh is None else make(mesh)
    with (
        jaxshard.ResumeManager(
            orders["root"],
            when=jaxshard.Every(steps=orders["save_every"]),
            keep=jaxshard.Keep(),
            when_busy="wait",
        ) as run,
        Path(orders["log"]).open("a", encoding="utf-8") as log,
    ):

        def tell(kind: str, step: int, state: Any) -> None:
            line = {"kind": kind, "step": step, "leaves": leaf_digests(state)}
            log.write(json.dumps(line) + "\n")
            log.flush()

        state, begin = run.resume(state)
        tell("begin", begin, state)
        for step in run.steps(orders["steps"]):
            state = update(state, step)
            tell("step", step, state)
            run.maybe_save(step, state)
            if step == orders["kill_at"]:
                run.wait_until_finished()
                os.kill(os.getpid(), signal.SIGKILL)


def _function(module: str | None, file: str, name: str) -> Any:
    """The user's own function, of a module or (None) of a script."""
    if module is None:
        spec = importlib.util.spec_from_file_location(SCRIPT, file)
        assert spec is not None
        assert spec.loader is not None
        found: Any = importlib.util.module_from_spec(spec)
        sys.modules[SCRIPT] = found
        spec.loader.exec_module(found)
    else:
        found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
