"""This version serves one process; as one of several, every door says so."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from support import REPOSITORY

WORKER = """
import sys, jax, jax.numpy as jnp, jaxshard
port, number = int(sys.argv[1]), int(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
assert jax.process_count() == 2
doors = {
    "save": lambda: jaxshard.save("ckpt", {"w": jnp.ones(2)}),
    "save_async": lambda: jaxshard.save_async("ckpt", {"w": jnp.ones(2)}),
    "load": lambda: jaxshard.load("one"),
    "ResumeManager": lambda: jaxshard.ResumeManager("run"),
}
for name, door in doors.items():
    try:
        door()
    except jaxshard.DisagreementError as error:
        assert "expected one process, found 2" in str(error), error
        print(name, "refused")
"""


def test_every_door_refuses_to_work_as_one_of_two_processes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": ""}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(port), str(number)],
            cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    for worker in workers:
        out, err = worker.communicate(timeout=120)
        assert worker.returncode == 0, err
        refused = ["save refused", "save_async refused", "load refused", "ResumeManager refused"]
        assert out.splitlines() == refused
    assert list(tmp_path.iterdir()) == []
