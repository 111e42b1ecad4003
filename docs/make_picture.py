"""Makes docs/images/checkpoint.png: a checkpoint and one leaf as a notebook shows them.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m docs.make_picture

Needs Chromium, whose path is in CHROMIUM if it is not `chromium`.
"""

import os
import subprocess
import tempfile
from pathlib import Path

import jaxshard
import jaxshard.display
from benchmarks import _states

PICTURE = Path(__file__).parent / "images" / "checkpoint.png"
LEAF = "params/wte/embedding"
SIZE = "1000,1165"
STYLE = "margin:8px;background:#fff;color:#1f2328;font-family:system-ui"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")


def main() -> None:
    """Save a small GPT-2 with its optimizer, and take a picture of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/step_00012000"
        jaxshard.save(path, _states.job("mini").make())
        checkpoint = jaxshard.open(path)
        shown = map(jaxshard.display.html, (checkpoint, checkpoint[LEAF]))
        body = "".join(shown).replace(folder, "runs/lm")
        page = Path(folder, "page.html")
        page.write_text(f"<!doctype html><meta charset=utf-8><body style='{STYLE}'>{body}")
        command = [
            os.environ.get("CHROMIUM", "chromium"), *FLAGS, f"--user-data-dir={folder}/profile",
            f"--window-size={SIZE}", f"--screenshot={PICTURE}", page.as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603  (nobody else's words)


if __name__ == "__main__":
    main()
