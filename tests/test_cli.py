"""The command line: what each verb answers, on which stream, with which exit code, how fast."""

import contextlib
import errno
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result
from support import REPOSITORY, mesh, on, run_python

import jaxshard
from jaxshard import Keep, ResumeManager, SaveOptions, cli

DEAD = "a-00000000deadbeef"
FILES = SaveOptions(pack_below=1 << 10)
JAXSHARD = [sys.executable, "-m", "jaxshard"]
COMMANDS = {name: cli.command.get_command(None, name) for name in cli.VERBS}


def state(step: int) -> dict:
    embed = jax.device_put(jnp.arange(1024.0).reshape(64, 16), on(mesh((4,)), "a", None))
    return {
        "params": {"embed": embed, "dense": {"kernel": jnp.full((8, 8), step, jnp.bfloat16)}},
        "tied": embed,
        "odd": np.array([1.0, np.nan, np.inf]),
        "w[0]": np.arange(3),
        "rng": jax.random.key(0),
        "z": np.array([1 + 2j]),
        "name": "small",
        "step": step,
    }


@pytest.fixture(scope="module")
def sound_run(tmp_path_factory) -> Path:
    """A run of three steps and a killed save; tests must not change it."""
    root = tmp_path_factory.mktemp("cli") / "run"
    with ResumeManager(root, keep=Keep(), options=FILES) as run:
        for step in (100, 200, 300):
            run.save(step, state(step), metrics={"loss": 3 / step}, wait=True)
    killed = root / f"step_00000400/{DEAD}/data/x"
    killed.parent.mkdir(parents=True)
    killed.write_bytes(b"x" * 10)
    return root


@pytest.fixture
def damaged_run(tmp_path) -> Path:
    """A run whose newest step has a changed byte in `params/embed`."""
    with ResumeManager(tmp_path / "run", keep=Keep(), options=FILES) as run:
        for step in (100, 200):
            run.save(step, state(step), wait=True)
    (file,) = (tmp_path / "run/step_00000200").glob("a-*/data/params/embed/c/1/0")
    data = bytearray(file.read_bytes())
    data[50] ^= 1
    file.unlink()  # step 100 has it too
    file.write_bytes(data)
    return tmp_path / "run"


def call(*args: object) -> Result:
    """A command line in this process."""
    return CliRunner().invoke(cli.command, [str(a) for a in args], prog_name="jaxshard")


def answer(*args: object, code: int = 0) -> str:
    result = call(*args)
    assert result.exit_code == code, result.output
    return result.stdout


def document(*args: object, code: int = 0) -> dict:
    """What `--json` prints, read as strictly as JSON is defined."""
    text = answer(*args, "--json", code=code)
    assert text.count("\n") == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def shell(*args: object, **env: str) -> subprocess.CompletedProcess:
    """A command line in a process of its own."""
    return subprocess.run(
        [*JAXSHARD, *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def on_a_terminal(command: list[str], **env: str) -> str:
    """What a command writes when its output is a terminal."""
    ours, terminal = pty.openpty()
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color", **env},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    out = b""
    with contextlib.suppress(OSError):  # EIO: the process has ended
        while chunk := os.read(ours, 65536):
            out += chunk
    os.close(ours)
    process.wait(timeout=60)
    return out.decode()


# ls -----------------------------------------------------------------------------------------


def test_ls_lists_the_committed_steps_of_a_run(sound_run):
    result = call("ls", sound_run)
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows] == ["STEP", "100", "200", "300"]
    assert {row[5] for row in rows[1:]} == {"committed"}
    assert rows[1][-1] == "loss=0.03"
    assert result.stderr == "jaxshard: 1 more is not in use; --all shows them\n"


def test_ls_all_shows_attempts_and_older_versions(sound_run, tmp_path):
    assert f"uncommitted  step_00000400/{DEAD}" in answer("ls", sound_run, "--all")
    with ResumeManager(tmp_path / "run", keep=Keep()) as run:
        run.save(1, {"w": np.ones(2)}, wait=True)
    jaxshard.save(tmp_path / "run/step_00000001.2", {"w": np.ones(3)})
    states = {s["path"].rpartition("/")[2]: s["state"] for s in _steps(tmp_path / "run", "--all")}
    assert states == {"step_00000001": "replaced", "step_00000001.2": "committed"}
    assert len(_steps(tmp_path / "run")) == 1


def _steps(path: Path, *options: str) -> list[dict]:
    return document("ls", path, *options)["steps"]


def test_ls_says_which_manifest_is_damaged(sound_run, tmp_path):
    with ResumeManager(tmp_path / "run", keep=Keep()) as run:
        run.save(1, {"w": np.ones(2)}, wait=True)
    manifest = tmp_path / "run/step_00000001/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert _steps(tmp_path / "run")[0]["state"] == "damaged"
    assert "damaged" in answer("ls", tmp_path / "run/step_00000001")
    manifest.write_bytes(b'{"a_format":"jaxshard","a_version":99,"x":1}')
    assert _steps(tmp_path / "run")[0]["state"] == "unreadable"


def test_ls_of_one_checkpoint_and_of_one_step(sound_run):
    for path in (sound_run / "step_00000200", f"{sound_run}@200"):
        (step,) = _steps(path)
        assert (step["step"], step["state"], step["leaves"]) == (200, "committed", 9)
        assert step["metadata"] == {"metrics": {"loss": 0.015}}


def test_ls_of_a_run_without_a_step_and_of_attempts_only(tmp_path):
    with ResumeManager(tmp_path / "run"):
        pass
    result = call("ls", tmp_path / "run")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no step was committed" in result.stderr
    (tmp_path / "ckpt" / DEAD).mkdir(parents=True)
    assert call("ls", tmp_path / "ckpt").exit_code == 2
    assert "uncommitted" in answer("ls", tmp_path / "ckpt", "--all")


# show ---------------------------------------------------------------------------------------


def test_show_has_every_leaf_with_type_placement_storage_and_bytes(sound_run):
    text = answer("show", f"{sound_run}@200")
    flat = {line.split("  ")[0]: " ".join(line.split()[1:]) for line in text.splitlines()}
    assert flat["params/embed"] == "float32[64,16] P('a', None) array, unchanged 4.0 KiB 95.3%"
    assert flat["params/dense/kernel"] == "bfloat16[8,8] pack 128 B 3.0%"
    assert flat["tied"] == "float32[64,16] P('a', None) same as params/embed 0 B 0.0%"
    assert flat["step"] == "Python int 200 manifest 0 B 0.0%"
    assert flat["name"] == "Python str 'small' manifest 0 B 0.0%"
    assert flat["rng"] == "key<threefry2x32>[] pack 8 B 0.2%"
    assert flat["params/"] == "2 leaves 4.1 KiB 98.3%"
    assert "step 200, 9 leaves, 4.2 KiB" in text
    assert 'metadata: {"metrics": {"loss": 0.015}}' in text


def test_show_depth_sort_and_flat(sound_run):
    def names(*options: str) -> list[str]:
        lines = answer("show", sound_run, *options).split("\n\n")[1].splitlines()
        return [line.split("  ")[0] for line in lines[1:]]

    assert names("--depth", "1") == [
        "name",
        "odd",
        "params/",
        "rng",
        "step",
        "tied",
        "w%5B0%5D",
        "z",
    ]
    assert "params/dense/" in names("--depth", "2")
    assert "params/dense/kernel" not in names("--depth", "2")
    assert names("--sort", "size")[:3] == ["params/", "params/embed", "params/dense/"]
    assert names("--flat")[2:4] == ["params/dense/kernel", "params/embed"]
    assert names("--flat", "--sort", "size")[0] == "params/embed"
    assert names("params/**", "step") == [
        "params/", "params/dense/", "params/dense/kernel", "params/embed", "step",
    ]  # fmt: skip


def test_show_of_a_part_says_how_much_it_is(sound_run):
    text = answer("show", sound_run, "params/**/kernel")
    assert "selected: 1 leaf, 128 B" in text
    found = document("show", sound_run, "params/**/kernel")
    assert (found["selected_nbytes"], len(found["leaves"])) == (128, 1)
    assert found["nbytes"] == jaxshard.open(sound_run / "step_00000300").nbytes


def test_show_json_says_what_the_manifest_says(sound_run):
    found = document("show", f"{sound_run}@100")
    ckpt = jaxshard.open(sound_run / "step_00000100")
    assert [leaf["name"] for leaf in found["leaves"]] == list(ckpt)
    leaves = {leaf["name"]: leaf for leaf in found["leaves"]}
    assert leaves["params/embed"]["spec"] == ["a", None]
    assert leaves["params/embed"]["mesh"]["sizes"] == [4]
    assert leaves["params/embed"]["zarr_path"] == "params/embed"
    assert leaves["tied"]["same_as"] == "params/embed"
    assert leaves["step"]["value"] == 100
    assert {"name": "params", "leaves": 2, "nbytes": 4096 + 128} in found["groups"]


def test_show_of_a_bare_leaf_and_of_an_empty_tree(tmp_path):
    jaxshard.save(tmp_path / "bare", np.ones(3))
    assert "(the whole tree)  float64[3]" in answer("show", tmp_path / "bare")
    jaxshard.save(tmp_path / "empty", {})
    assert "0 leaves, 0 B" in answer("show", tmp_path / "empty")


# verify and diff ----------------------------------------------------------------------------


def test_verify_of_a_run_looks_at_every_step_and_names_the_damaged_leaf(damaged_run):
    result = call("verify", damaged_run)
    assert result.exit_code == 1
    first, second, _, problem = result.stdout.splitlines()
    assert first.startswith(f"{damaged_run}/step_00000100: sound (")
    assert second.startswith(f"{damaged_run}/step_00000200: 1 problem (")
    assert problem.split()[:2] == ["params/embed", "damaged"]
    assert problem.split()[2].endswith("/data/params/embed/c/1/0")
    assert "1 of 2 checkpoints damaged" in result.stderr
    found = document("verify", damaged_run, code=1)
    assert [c["ok"] for c in found["checkpoints"]] == [True, False]
    assert found["checkpoints"][1]["problems"][0]["leaf"] == "params/embed"


def test_verify_of_one_step_and_without_data(damaged_run):
    assert "sound" in answer("verify", f"{damaged_run}@100")
    answer("verify", f"{damaged_run}@200", code=1)
    assert document("verify", damaged_run, "--no-data")["ok"] is True


@pytest.mark.parametrize("text", [b"cut", b""])
def test_a_damaged_manifest_is_a_finding_of_verify(tmp_path, text):
    jaxshard.save(tmp_path / "ckpt", {"w": np.ones(2)})
    (tmp_path / "ckpt/manifest.json").write_bytes(text)
    (problem,) = document("verify", tmp_path / "ckpt", code=1)["checkpoints"][0]["problems"]
    assert (problem["file"], problem["leaf"]) == ("manifest.json", None)


def test_verify_counts_leftovers_and_calls_them_harmless(sound_run, tmp_path):
    jaxshard.save(tmp_path / "ckpt", {"w": np.ones(2)})
    (tmp_path / "ckpt" / DEAD).mkdir()
    (tmp_path / "ckpt" / DEAD / "x").write_bytes(b"")
    assert "sound" in answer("verify", tmp_path / "ckpt")
    assert "1 leftover for jaxshard prune" in answer("verify", tmp_path / "ckpt")


def test_a_step_that_a_writer_deletes_meanwhile_is_no_damage(sound_run, tmp_path, monkeypatch):
    with ResumeManager(tmp_path / "run", keep=Keep()) as run:
        run.save(1, {"w": np.ones(2)}, wait=True)
        run.save(2, {"w": np.ones(2)}, wait=True)
    verify = jaxshard.verify

    def after_a_deletion(path, **options):
        jaxshard.prune(tmp_path / "run", keep=Keep(last=1))
        return verify(path, **options)

    monkeypatch.setattr(jaxshard, "verify", after_a_deletion)
    result = call("verify", tmp_path / "run")
    assert result.exit_code == 0
    assert "step_00000001 was deleted meanwhile" in result.stderr
    assert "step_00000002: sound" in result.stdout


def test_diff_names_the_leaves_that_differ(sound_run):
    result = call("diff", f"{sound_run}@100", f"{sound_run}@200")
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "2 of 9 leaves differ"
    assert lines[-2:] == ["params/dense/kernel other bits", "step 100 and 200"]
    found = document("diff", f"{sound_run}@100", f"{sound_run}@200", code=1)
    assert [d["name"] for d in found["differences"]] == ["params/dense/kernel", "step"]
    assert found["identical"] is False


def test_diff_of_what_is_equal(sound_run):
    assert answer("diff", sound_run, sound_run / "step_00000300") == "identical: 9 leaves\n"
    assert document("diff", sound_run, sound_run)["differences"] == []


# stats and cat ------------------------------------------------------------------------------


def test_stats_shows_numbers_and_names_what_is_not_finite(sound_run):
    result = call("stats", sound_run, "odd", "step", "z")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows == [
        ["NAME", "TYPE", "MIN", "MAX", "MEAN", "NORM", "NAN", "INF"],
        ["odd", "float64[3]", "1", "1", "1", "1", "1", "1"],
        ["step", "int", "300", "300", "300", "300", "0", "0"],
        ["z", "complex128[1]", "2.23607", "2.23607", "1+2j", "2.23607", "0", "0"],
    ]
    assert "not finite: odd" in result.stderr


def test_stats_json_is_what_python_gives(sound_run):
    found = document("stats", sound_run)
    report = jaxshard.stats(sound_run / "step_00000300")
    assert [leaf["name"] for leaf in found["leaves"]] == [leaf.name for leaf in report.leaves]
    for shown, leaf in zip(found["leaves"], report.leaves, strict=True):
        mean = [leaf.mean.real, leaf.mean.imag] if isinstance(leaf.mean, complex) else leaf.mean
        assert (shown["min"], shown["max"], shown["mean"]) == (leaf.min, leaf.max, mean)
        assert (shown["nans"], shown["infs"], shown["size"]) == (*leaf[-2:], leaf.size)


@pytest.mark.parametrize(
    ("leaf", "index"),
    [
        ("params/embed", ...),
        ("params/embed[3]", 3),
        ("params/embed[0:4, ::2]", np.s_[0:4, ::2]),
        ("params/embed[..., -1]", np.s_[..., -1]),
        ("params/embed[ 2 : , 1 ]", np.s_[2:, 1]),
        ("params/embed[]", ...),
        ("w%5B0%5D", ...),
        ("w[0]", ...),
        ("w[0][1:]", np.s_[1:]),
        ("odd[0:1]", np.s_[0:1]),
    ],
)
def test_cat_reads_a_leaf_or_a_part_of_it(sound_run, leaf, index):
    found = document("cat", sound_run, leaf)
    wanted = np.asarray(jaxshard.open(sound_run / "step_00000300")[found["leaf"]].read())[index]
    assert found["shape"] == list(wanted.shape)
    plain = json.loads(json.dumps(wanted.tolist()).replace("NaN", '"NaN"').replace("Inf", '"Inf'))
    if "NaN" not in str(plain):
        assert found["values"] == plain
    text = answer("cat", sound_run, leaf)
    shown = [float(x) for x in re.findall(r"nan|inf|[-+\d.e]+", text) if x not in {".", "e"}]
    assert np.array_equal(shown, wanted.reshape(-1), equal_nan=True)


def test_cat_prints_every_kind_of_value(sound_run):
    assert answer("cat", sound_run, "step") == "300\n"
    assert answer("cat", sound_run, "name") == "small\n"
    assert document("cat", sound_run, "z")["values"] == [[1.0, 2.0]]
    assert document("cat", sound_run, "odd")["values"] == [1.0, "NaN", "Infinity"]
    assert document("cat", sound_run, "rng")["dtype"] == "uint32"
    assert document("cat", sound_run, "params/dense/kernel[0, :2]")["values"] == [300.0, 300.0]


def test_cat_of_odd_values(tmp_path):
    tree = {"big": 10**30, "b": b"\x00\xff", "none": None, "f": float("-inf"), "lone": "\udc80"}
    tree["i4"] = jnp.array([-8, 7], jnp.int4)
    jaxshard.save(tmp_path / "ckpt", tree)
    assert document("cat", tmp_path / "ckpt", "big")["values"] == 10**30
    assert document("cat", tmp_path / "ckpt", "b")["values"] == "00ff"
    assert document("cat", tmp_path / "ckpt", "none")["values"] is None
    assert document("cat", tmp_path / "ckpt", "f")["values"] == "-Infinity"
    assert document("cat", tmp_path / "ckpt", "i4")["values"] == [-8, 7]
    assert shell("cat", tmp_path / "ckpt", "lone").stdout == "\\udc80\n"


def test_cat_of_a_bare_leaf(tmp_path):
    jaxshard.save(tmp_path / "ckpt", np.arange(4))
    assert answer("cat", tmp_path / "ckpt", "") == "[0, 1, 2, 3]\n"
    assert answer("cat", tmp_path / "ckpt", "[1:3]") == "[1, 2]\n"


def test_cat_leaves_nothing_out_when_it_is_piped(tmp_path):
    values = np.random.default_rng(0).random(5000)
    jaxshard.save(tmp_path / "ckpt", {"w": values})
    text = answer("cat", tmp_path / "ckpt", "w")
    assert np.array_equal([float(x) for x in text.strip("[]\n").split(",")], values)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("params/embde", "is no leaf of .*did you mean one of .*params/embed"),
        ("params/embed[x]", r"expected integers and slices, found 'x'\nhint: "),
        ("params/embed[0,,1]", "expected integers and slices, found ''"),
        ("params/embed[64]", r"leaf 'params/embed': index .*64.* is outside of the shape"),
        ("params/embed[::-1]", "a negative step is not supported"),
        ("params/embed[0", "is no leaf of"),
    ],
)
def test_cat_says_what_is_wrong_with_a_name_or_an_index(sound_run, leaf, message):
    result = call("cat", sound_run, leaf)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(message, result.stderr)
    assert "\nhint: " in result.stderr


# prune --------------------------------------------------------------------------------------


def _some_run(root: Path) -> Path:
    with ResumeManager(root, keep=Keep()) as run:
        for step in (1, 2, 3, 4):
            run.save(step, {"w": np.ones(2)}, wait=True)
    leftover = root / f"step_00000004/{DEAD}"
    leftover.mkdir()
    os.utime(leftover, (time.time() - 5000, time.time() - 5000))
    return root


def test_prune_deletes_leftovers_and_what_is_not_to_be_kept(tmp_path):
    root = _some_run(tmp_path / "run")
    said = document("prune", root, "--keep-last", 1, "--keep-every", 2, "--dry-run")
    assert jaxshard.open(root).all_steps() == [1, 2, 3, 4]
    text = answer("prune", root, "--keep-last", 1, "--keep-every", 2)
    assert jaxshard.open(root).all_steps() == [2, 4]
    assert said["steps"] == ["step_00000001", "step_00000003"]
    assert said["leftovers"] == [f"step_00000004/{DEAD}"]
    assert [line.split()[1:] for line in text.splitlines()[1:4]] == [
        ["step", "step_00000001"],
        ["step", "step_00000003"],
        ["leftover", f"step_00000004/{DEAD}"],
    ]


@pytest.mark.parametrize(
    ("age", "goes"), [("1h", True), ("80m", True), ("5100", False), ("0.5d", False)]
)
def test_prune_keeps_what_changed_recently(tmp_path, age, goes):
    result = call("prune", _some_run(tmp_path / "run"), "--older-than", age)
    assert (f"leftover  step_00000004/{DEAD}" in result.stdout) is goes
    assert ("may be a save that is going on" in result.stderr) is not goes


def test_prune_refuses_what_is_no_age(tmp_path):
    result = call("prune", tmp_path, "--older-than", "soon")
    assert result.exit_code == 2
    assert "expected a duration such as 500ms, 90s, 30m, 2h or 7d, found 'soon'" in result.stderr


def test_prune_says_which_steps_are_damaged(damaged_run):
    (manifest,) = damaged_run.glob("step_00000200/manifest.json")
    manifest.write_bytes(b"cut")
    result = call("prune", damaged_run, "--keep-last", "1")
    assert "keeps" in result.stdout
    assert "jaxshard verify says what is damaged" in result.stderr
    assert (damaged_run / "step_00000100/manifest.json").exists()


# Paths, failures, exit codes ----------------------------------------------------------------


@pytest.mark.parametrize(("verb", "rest"), [("show", []), ("stats", []), ("cat", ["step"])])
def test_a_run_stands_for_its_newest_step_and_that_is_said(sound_run, verb, rest):
    result = call(verb, sound_run, *rest)
    assert result.exit_code == 0
    assert result.stderr.startswith(
        f"jaxshard: {sound_run} is a run: this is its newest step, 300\n"
    )


def test_a_directory_whose_name_has_an_at_sign_is_found(tmp_path):
    jaxshard.save(tmp_path / "ckpt@3", {"w": np.ones(2)})
    assert "w  " in answer("show", tmp_path / "ckpt@3")
    jaxshard.save(tmp_path / "ckpt", {"w": np.ones(2)})
    result = call("show", tmp_path / "ckpt@7")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "to be a run, found one checkpoint" in result.stderr


@pytest.mark.parametrize("verb", [v for v in cli.VERBS if v not in {"drill", "data"}])
def test_a_missing_path_is_one_message_with_a_hint(sound_run, verb):
    why = ["--why", "a spike"]
    rest = {"cat": ["w"], "diff": [sound_run], "mark-bad": why, "rollback": why}.get(verb, [])
    step = "@3" if verb in {"protect", "unprotect", "mark-bad", "rollback"} else ""
    done = shell(verb, f"{sound_run.parent}/rnu{step}", *rest)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"jaxshard: {sound_run.parent}/rnu: expected a checkpoint, found")
    assert "\nhint: beside it there is: run\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_step_that_is_not_there_is_named_with_those_that_are(sound_run):
    result = call("show", f"{sound_run}@7")
    assert result.exit_code == 2
    assert "expected step 7, found: 100, 200, 300" in result.stderr
    assert f"hint: jaxshard ls {sound_run} lists the committed ones" in result.stderr


def test_hints_name_commands_and_not_python(damaged_run):
    result = call("stats", f"{damaged_run}@200")
    assert result.exit_code == 2
    hint = f"hint: jaxshard verify {damaged_run}/step_00000200 lists every damaged file"
    assert result.stderr.splitlines()[-1] == hint
    assert "jaxshard.verify(" not in result.stderr


@pytest.mark.parametrize("args", [["lss"], ["show"], ["show", "--nope", "x"], ["cat", "x"]])
def test_wrong_usage_is_exit_code_2(args):
    result = call(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: jaxshard")


def test_a_dead_pattern_is_exit_code_2(sound_run):
    for verb in ("show", "stats"):
        result = call(verb, sound_run, "params")
        assert result.exit_code == 2
        assert "'params' matches no leaf; did you mean 'params/**'?" in result.stderr


def test_a_bug_of_ours_is_neither_an_answer_nor_hidden(monkeypatch, sound_run):
    monkeypatch.setattr(jaxshard, "stats", lambda *_, **__: 1 / 0)
    result = call("stats", sound_run)
    assert result.exit_code == 2
    assert "ZeroDivisionError" in result.stderr
    assert "please report it" in result.stderr


def test_what_the_system_refuses_is_one_message(monkeypatch, sound_run):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "x")

    monkeypatch.setattr(jaxshard, "stats", refuse)
    result = call("stats", sound_run)
    assert result.exit_code == 2
    assert "Permission denied: 'x'" in result.stderr
    assert "Traceback" not in result.stderr


# Streams ------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    jaxshard.save(tmp_path / "ckpt", {f"leaf{i:05d}": i for i in range(5000)})
    line = f"{shlex.join(JAXSHARD)} show {tmp_path}/ckpt | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[0].startswith(f"{tmp_path}/ckpt: 5000 leaves")
    assert done.stdout.splitlines()[1] == "141"


def test_ctrl_c_during_a_long_verify_is_one_line_and_130(tmp_path):
    jaxshard.save(tmp_path / "ckpt", {"w": np.ones((64, 1 << 20), np.int8)}, options=FILES)
    code = f"""
import sys, time
import jaxshard
from jaxshard.cli import main
verify = jaxshard.verify
def slow(path, **options):
    def wait(done, total):
        print("reading", file=sys.stderr, flush=True)
        time.sleep(30)
    return verify(path, **{{**options, "on_progress": wait}})
jaxshard.verify = slow
sys.argv = ["jaxshard", "verify", {str(tmp_path / "ckpt")!r}]
main()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr.readline() == "reading\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, "", "jaxshard: interrupted\n")


def test_piped_output_has_no_colours_and_whole_names(tmp_path):
    name = "/".join(["a_rather_long_component_of_a_name"] * 8)
    tree = {}
    here = tree
    for part in name.split("/")[:-1]:
        here = here.setdefault(part, {})
    here[name.split("/")[-1]] = np.ones(2)
    jaxshard.save(tmp_path / "ckpt", tree)
    for verb in ("show", "stats"):
        done = shell(verb, tmp_path / "ckpt", COLUMNS="40")
        assert f"{name}  float64[2]" in done.stdout
        assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_any_locale_will_do(tmp_path, locale):
    jaxshard.save(tmp_path / "ckpt", {"s": "größer …" * 20})
    done = shell("show", tmp_path / "ckpt", LC_ALL=locale, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "Python str" in done.stdout


def test_a_terminal_has_colours_and_an_indented_tree(sound_run):
    colored = on_a_terminal([*JAXSHARD, "ls", str(sound_run)])
    assert "\x1b[32mcommitted\x1b[0m" in colored
    tree = on_a_terminal([*JAXSHARD, "show", str(sound_run)])
    assert re.search(r"^params/ .*\r\n  dense/ .*\r\n    kernel  ", tree, re.MULTILINE)
    assert "\x1b[31m" in on_a_terminal([*JAXSHARD, "show", str(sound_run) + "x"])


def test_no_color_is_respected_on_a_terminal(sound_run):
    for path in (sound_run, f"{sound_run}x"):
        assert "\x1b" not in on_a_terminal([*JAXSHARD, "ls", str(path)], NO_COLOR="1")


def _in_no_time(*args: object) -> list[str]:
    """A command line whose progress bar does not wait for a second to pass."""
    code = (
        "import jaxshard.cli._output as o; o.PROGRESS_AFTER_S = 0; "
        "from jaxshard.cli import main; main()"
    )
    return [sys.executable, "-c", code, *map(str, args)]


@pytest.mark.parametrize("verb", ["verify", "stats"])
def test_progress_is_shown_on_a_terminal_only(sound_run, verb):
    path = sound_run / "step_00000300"
    shown = on_a_terminal(_in_no_time(verb, path))
    assert re.search(r"\d+(\.\d+)?/\d+(\.\d+)? (bytes|KiB)", shown)
    assert "━" in shown
    done = subprocess.run(
        _in_no_time(verb, path),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "━" not in done.stdout + done.stderr


def test_a_short_verify_shows_no_progress(sound_run):
    assert "━" not in on_a_terminal([*JAXSHARD, "verify", str(sound_run)])


def test_cat_leaves_out_the_middle_of_much_on_a_terminal(tmp_path):
    jaxshard.save(tmp_path / "ckpt", {"w": np.arange(5000), "v": np.arange(1000)})
    shown = on_a_terminal([*JAXSHARD, "cat", f"{tmp_path}/ckpt", "w"])
    assert "..., " in shown
    assert "5000 values, not all are shown" in shown
    assert "..." not in on_a_terminal([*JAXSHARD, "cat", f"{tmp_path}/ckpt", "v"])


@pytest.mark.parametrize("options", [SaveOptions(pack_below=1 << 30), FILES], ids=["pack", "files"])
def test_verify_reports_progress_up_to_the_end(tmp_path, options):
    jaxshard.save(tmp_path / "ckpt", {"w": np.ones((5, 1 << 19)), "b": np.ones(3)}, options=options)
    seen: list[tuple[int, int]] = []
    assert jaxshard.verify(tmp_path / "ckpt", on_progress=lambda *at: seen.append(at)).ok
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] >= 5 << 22


# What is imported ---------------------------------------------------------------------------

HEAVY = ("jax", "jaxlib", "tensorstore", "numpy", "ml_dtypes", "rich")


def _loaded(*args: object) -> set[str]:
    """Modules that a command line has imported: those that take long, and those of verbs."""
    code = f"""
import sys
from jaxshard.cli import command
command({[str(a) for a in args]!r}, standalone_mode=False)
print("loaded", *[m for m in sys.modules if m in {HEAVY!r} or m.startswith("jaxshard.cli.")])
"""
    line = run_python(code).splitlines()[-1]
    assert line.startswith("loaded")
    return set(line.split()[1:])


SHARED = {"jaxshard.cli._output", "jaxshard.cli._verb"}


@pytest.mark.parametrize(
    "args", [["ls"], ["ls", "--all"], ["ls", "--json"], ["show"], ["show", "--json"]]
)
def test_ls_and_show_import_nothing_that_takes_long(sound_run, args):
    assert _loaded(*args, sound_run) == {*SHARED, f"jaxshard.cli._{args[0]}"}


def test_help_imports_nothing_that_takes_long():
    assert _loaded() & set(HEAVY) == set()


@pytest.mark.parametrize(("verb", "rest"), [("verify", []), ("stats", []), ("cat", ["odd"])])
def test_a_verb_that_reads_imports_neither_jax_nor_another_verb(sound_run, verb, rest):
    loaded = _loaded(verb, f"{sound_run}@100", *rest)
    assert loaded & {"jax", "jaxlib", "rich"} == set()
    assert {m for m in loaded if m.startswith("jaxshard.cli.")} == {
        *SHARED,
        f"jaxshard.cli._{verb}",
    }


# Data ---------------------------------------------------------------------------------------

TRAIN = """
import numpy as np
from jaxshard.data import ElasticLoader, Mixture, Pack

def loader(batch=4, epochs=2, **kwargs):
    return ElasticLoader(np.arange(10), global_batch=batch, epochs=epochs, **kwargs)

def fails():
    raise KeyError("no such file")

mixture = ElasticLoader(Mixture([(range(10), 1), (range(5), 1)]), global_batch=2, shuffle=False)
stream = ElasticLoader([[1, 2, 3]] * 4, global_batch=1, pack=Pack(2, "stream"))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A directory with a module that has loaders; its name, which no other test uses."""
    name = f"train_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield name
    sys.modules.pop(name, None)


def test_rows_of_a_loader(script):
    plain = f"{script}:loader(shuffle=False)"
    assert answer("data", "rows", plain).splitlines() == [
        "STEP  ROWS", "0     0 1 2 3", "1     4 5 6 7", "2     8 9 0 1",
    ]  # fmt: skip
    assert answer("data", "rows", plain, "--step", 4, "--count", 9).splitlines()[1:] == [
        "4     6 7 8 9"
    ]
    assert document("data", "rows", f"./{script}.py:mixture", "--count", 1) == {
        "batches": [{"step": 0, "rows": [[0, 0], [1, 0]]}]
    }
    assert "0:0 1:0" in answer("data", "rows", f"{script}:mixture")
    assert "… 8 more" in answer("data", "rows", f"{script}:loader(batch=20)")


def test_the_keys_of_what_is_said_of_data_are_in_the_help(script):
    rows = document("data", "rows", f"{script}:loader")
    differ = document("data", "compare", f"{script}:loader", f"{script}:loader(seed=1)", code=1)
    assert keys_of(rows) | keys_of(differ) == documented_keys("data")


def test_loaders_are_compared(script):
    same = answer("data", "compare", f"{script}:loader", f"{script}:loader(prefetch=0)")
    assert same == f"{script}:loader and {script}:loader(prefetch=0): batches 0 to 2 are the same\n"
    other = answer("data", "compare", f"{script}:loader", f"{script}:loader(seed=3)", code=1)
    assert other.splitlines()[1].startswith("batch 0: other rows from place ")
    assert len(other.splitlines()) == 4
    sizes = answer(
        "data", "compare", f"{script}:loader", f"{script}:loader(batch=[(0, 4), (1, 2)])", code=1
    )
    assert "batches 0 to 0 are the same\nbatch 1: 4 rows in the first, 2 in the second" in sizes
    assert answer("data", "compare", f"{script}:stream", f"{script}:stream", "--step", 1)
    shorter = [f"{script}:loader(epochs=1)", f"{script}:loader"]
    ends = answer("data", "compare", *shorter, "--count", 9, code=1)
    assert "batch 2: the first loader ends here" in ends
    only_rows = ["data", "compare", *shorter, "--rows-only", "--count", 2]
    assert "batches 0 to 1 are the same" in answer(*only_rows)
    beyond = answer("data", "compare", shorter[0], shorter[0], "--step", 99)
    assert "both end before batch 99" in beyond


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        (["rows", "{}:loader", "{}:loader"], "data rows: expected one LOADER, found 2"),
        (["compare", "{}:loader"], "data compare: expected two LOADERs, found 1"),
        (["rows", "{}"], "expected MODULE:NAME, or MODULE:NAME(argument=value)"),
        (["rows", "{}:loader(open('x'))"], "with plain values"),
        (["rows", "{}:loader(batch=open)"], "with plain values"),
        (["rows", "{}:nothing"], "expected 'nothing' in train_"),
        (["rows", "no_such_module:loader"], "there is no module 'no_such_module'"),
        (["rows", "{}:np"], "expected an ElasticLoader, found module"),
        (["rows", "{}:fails"], "KeyError: 'no such file'"),
        (["rows", "{}:loader(batch=0)"], "expected sizes of 1 or more"),
        (["rows", "{}:loader", "--step", "7"], "expected a batch between 0 and 5, not included"),
        (["rows", "{}:stream"], "are not known before they are read"),
    ],
)
def test_what_is_no_loader_is_one_message(script, loaders, message):
    result = call("data", *(text.replace("{}", script) for text in loaders))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


# Documentation ------------------------------------------------------------------------------

PAGE = (REPOSITORY / "docs/cli.md").read_text()


def test_without_arguments_there_is_help_with_an_example_for_each_verb():
    text = answer()
    assert text == answer("--help")
    for verb in cli.VERBS:
        assert re.search(rf"^  {verb} +\w", text, re.MULTILINE)
        assert re.search(rf"^  jaxshard {verb} \S", text, re.MULTILINE)
    assert re.search(r"^  1 +done, and the answer is bad", text, re.MULTILINE)


def test_the_script_and_the_module_are_the_same_command_line():
    script = Path(sys.executable).with_name("jaxshard")
    code = "from importlib.metadata import entry_points as e; print(*e(name='jaxshard'))"
    if script.exists():  # an installed package; a checkout has only what pyproject.toml says
        assert "jaxshard.cli:main" in run_python(code)
    assert 'jaxshard = "jaxshard.cli:main"' in (REPOSITORY / "pyproject.toml").read_text()
    assert shell("--version").stdout == f"jaxshard, version {jaxshard.__version__}\n"


@pytest.mark.parametrize("verb", cli.VERBS)
def test_a_verb_documents_examples_and_exit_codes(verb):
    text = answer(verb, "--help")
    assert "Exit codes:\n" in text
    assert ("  1  " in text) is (verb in {"verify", "diff", "drill", "data"})
    for example in COMMANDS[verb].examples:
        assert example.startswith(f"jaxshard {verb} ")
        arguments = shlex.split(re.split(r" [|>] ", example)[0])[2:]
        COMMANDS[verb].make_context(verb, arguments)  # parses


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_and_option_is_in_the_page(verb):
    section = PAGE.partition(f"\n### jaxshard {verb}\n")[2].partition("\n### ")[0]
    for parameter in COMMANDS[verb].params:
        assert parameter.opts[-1] in section or parameter.human_readable_name.upper() in section
        if isinstance(parameter, click.Option):
            assert parameter.help


def documented_keys(verb: str) -> set[str]:
    """`leaves[].min, .max` as `leaves[].min` and `leaves[].max`."""
    found: set[str] = set()
    for line in COMMANDS[verb].keys:
        prefix = ""
        for key in line.split(", "):
            prefix = key.rpartition(".")[0] if not key.startswith(".") else prefix
            found.add(f"{prefix}{key}" if key.startswith(".") else key)
    return found


def keys_of(value: object, prefix: str = "") -> set[str]:
    """The keys of a document, down to what is not ours to name."""
    free = {"metadata", "environment", "mesh", "values"}
    if isinstance(value, list):
        return set().union(*(keys_of(v, f"{prefix}[]") for v in value if isinstance(v, dict)))
    found: set[str] = set()
    for key, inner in value.items():
        name = f"{prefix}.{key}".removeprefix(".")
        nested = {} if key in free else inner
        below = keys_of(nested, name) if isinstance(nested, (dict, list)) else set()
        found |= below or {name}
    return {key for key in found if not any(k.startswith(f"{key}[]") for k in found)}


_DECISIONS = {
    "protect": [],
    "unprotect": [],
    "mark-bad": ["--why", "a spike"],
    "undo": [],
    "rollback": ["--why", "a spike"],
}


def test_the_keys_of_every_document_are_those_in_the_help(sound_run, damaged_run, tmp_path):
    documents = {
        "ls": document("ls", sound_run),
        "show": document("show", sound_run),
        "verify": document("verify", damaged_run, code=1),
        "diff": document("diff", f"{sound_run}@100", sound_run, code=1),
        "stats": document("stats", sound_run),
        "cat": document("cat", sound_run, "odd"),
        "prune": document("prune", sound_run, "--dry-run"),
        "report": document("report", sound_run),
    }
    root = _some_run(tmp_path / "another")
    for verb, rest in _DECISIONS.items():
        documents[verb] = document(verb, root if verb == "undo" else f"{root}@2", *rest)
    assert {*documents, "drill", "data"} == set(cli.VERBS)
    for verb, found in documents.items():
        assert keys_of(found) == documented_keys(verb), verb


def test_the_page_is_what_running_its_commands_gives():
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "docs/make_cli.py"), "--print"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE, "docs/cli.md is out of date: python docs/make_cli.py"


def test_report_as_a_page(sound_run):
    page = answer("report", sound_run, "--html")
    assert page.startswith("<!doctype html>")
    assert "Run report" in page
    assert 'class="j-kept"' in page
