"""Write docs/cli.md by running the command line: every help text, and a session on real files.

    python docs/make_cli.py            # writes docs/cli.md
    python docs/make_cli.py --print    # prints it

Times, random ids, versions and the directory are replaced, so that the same code gives the same
page.
"""

import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import click
import jax
import jax.numpy as jnp
import numpy as np
from click.testing import CliRunner
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxshard
from jaxshard import cli

PAGE = Path(__file__).parent / "cli.md"
WIDTH = 100
HEAD = """\
# The command line

Written by `python docs/make_cli.py`, which runs every line of it.

`jaxshard VERB …`, or `python -m jaxshard VERB …`. Data goes to stdout; notes, warnings, errors and
progress go to stderr (below, both are shown together). Piped output is plain and complete; colours
and progress bars appear only on a terminal, colours never with `NO_COLOR`. There is no pager.
"""
SESSION = [
    (
        "Which steps are there, and what was left behind",
        ["ls runs/lm", "ls runs/lm --all", "ls runs/lm@200 --json"],
    ),
    (
        "Where the memory goes",
        [
            "show runs/lm",
            "show runs/lm@200 --depth 1 --sort size",
            "show runs/lm 'params/**/kernel' --flat",
            "show runs/lm params/embed --json",
        ],
    ),
    (
        "What the numbers look like",
        ["stats runs/lm", "stats runs/lm step --json", "cat runs/lm 'params/embed[0, ::4]'",
         "cat runs/lm 'opt/mu[0:3]' --json"],
    ),
    ("What a step changed", ["diff runs/lm@200 runs/lm@300", "diff runs/lm runs/lm@300 --json"]),
    (
        "Do two meshes, or two settings, get the same data (`train.py` has a function `loader`)",
        [
            "data rows train:loader --step 100 --count 2",
            "data compare 'train:loader(devices=4)' 'train:loader(devices=2)' --count 50",
            "data compare train:loader 'train:loader(batch=[(0, 8), (2, 16)])'",
        ],
    ),
    (
        "When training went wrong",
        [
            'mark-bad runs/lm@200 --why "half of the data was missing"',
            "protect runs/lm@100",
            'rollback runs/lm@100 --why "a spike in the loss" --skip-batches 50',
            "ls runs/lm",
            "undo runs/lm",
            "ls runs/lm",
            "undo runs/lm",
            "undo runs/lm",
        ],
    ),
    (
        "Freeing space",
        [
            "prune runs/lm --keep-last 2 --dry-run",
            "prune runs/lm --older-than 0s --json",
            "prune runs/lm --keep-last 2",
        ],
    ),
    (
        "Which leaf is damaged (one bit of a file of step 300 was flipped)",
        ["verify runs/lm", "verify runs/lm@200 --json", "cat runs/lm 'params/embed[100]'"],
    ),
    ("When it cannot be done", ["show runs/ml", "show runs/lm params", "ls runs/lm@7"]),
]  # fmt: skip


def state(step: int) -> dict:
    """A small training state on a mesh of four devices."""
    mesh = Mesh(np.array(jax.devices()), ("model",))
    by_row = NamedSharding(mesh, PartitionSpec("model", None))
    return {
        "params": {
            "embed": jax.device_put(jnp.arange(4096.0).reshape(256, 16) / 8, by_row),
            "dense": {
                "kernel": jnp.full((16, 32), step / 16, jnp.bfloat16),
                "bias": jnp.zeros(32),
            },
        },
        "opt": {"mu": jnp.array([step / 2, jnp.nan, jnp.inf] + [0.0] * 61)},
        "rng": jax.random.key(0),
        "step": step,
    }


TRAIN = """\
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.data import ElasticLoader


def loader(devices=4, batch=8):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return ElasticLoader(np.arange(1000), global_batch=batch, sharding=sharding)
"""


def make_files() -> None:
    """A run of three steps, an attempt that was killed, and a training script."""
    Path("train.py").write_text(TRAIN)
    options = jaxshard.SaveOptions(pack_below=2048)
    with jaxshard.ResumeManager("runs/lm", keep=jaxshard.Keep(), options=options) as run:
        for step in (100, 200, 300):
            run.save(step, state(step), metrics={"loss": 300 / step}, wait=True)
    killed = Path("runs/lm/step_00000400/a-00000000deadbeef/data/params/embed/c/0/0")
    killed.parent.mkdir(parents=True)
    killed.write_bytes(bytes(4096))


def flip_a_bit() -> None:
    """Damage one file of step 300."""
    (file,) = Path("runs/lm/step_00000300").glob("a-*/data/params/embed/c/1/0")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)


def scrubbed(text: str, here: str) -> str:
    """The text without what differs from run to run."""
    text = text.replace(here, "/scratch")
    text = re.sub(r"\ba-(?!00000000deadbeef)[0-9a-f]{16}\b", "a-0123456789abcdef", text)
    text = re.sub(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00", "2027-01-01T12:00:00+00:00", text
    )
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "2027-01-01 12:00:00", text)
    text = re.sub(r"(deleted? \d+), [\d.]+ KiB", r"\1, 22.2 KiB", text)  # with a manifest in it
    return re.sub(r'"environment": \{[^}]*\}', '"environment": {"jax": "0.10.2"}', text)


def ran(line: str, here: str) -> list[str]:
    """One command and what it says, as it looks in a shell."""
    result = CliRunner().invoke(cli.command, shlex.split(line), prog_name="jaxshard")
    out = [f"$ jaxshard {line}", *scrubbed(result.output, here).splitlines()]
    return out if result.exit_code == 0 else [*out, f"[exit code {result.exit_code}]"]


def help_texts() -> list[str]:
    """The help of the group and of every verb."""
    lines = []
    for title, command in [("jaxshard", ""), *((f"jaxshard {v}", v) for v in cli.VERBS)]:
        args = [*command.split(), "--help"]
        context = {"terminal_width": WIDTH, "max_content_width": WIDTH}
        result = CliRunner().invoke(cli.command, args, prog_name="jaxshard", **context)
        assert result.exit_code == 0, result.output
        lines += [f"### {title}", "", "```", *result.output.splitlines(), "```", ""]
    return lines


def page() -> str:
    """The whole page."""
    lines = [HEAD, "", "## A session", ""]
    back = Path.cwd()
    with tempfile.TemporaryDirectory() as here:
        os.chdir(here)
        try:
            make_files()
            for title, commands in SESSION:
                if "damaged" in title:
                    flip_a_bit()
                shown = [line for command in commands for line in [*ran(command, here), ""]]
                lines += [f"### {title}", "", "```", *shown[:-1], "```", ""]
        finally:
            os.chdir(back)
    lines += ["## Every verb and every option", "", *help_texts()]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


if __name__ == "__main__":
    text = page()
    if "--print" in sys.argv[1:]:
        click.echo(text, nl=False)
    else:
        PAGE.write_text(text)
