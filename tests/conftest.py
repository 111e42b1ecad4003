"""Eight simulated devices for every test; tools that may be absent."""

import os
import shutil
import signal

# A shell ignores it for what it runs in the background, and processes of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest  # noqa: E402  (XLA reads its flags when jax is imported)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long forms run only when they are asked for: `pytest -m soak`."""
    if "soak" not in (config.getoption("-m") or ""):
        skip = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=skip)
        items[:] = [item for item in items if item not in skip]


@pytest.fixture
def need_tool():
    """`need_tool("strace")` skips where the tool is absent, or fails if it must be there."""

    def need(name: str) -> str:
        found = shutil.which(name)
        if found is None:
            reason = f"{name} is not installed"
            if os.environ.get("JAXSHARD_REQUIRE_TOOLS") == "1":
                pytest.fail(reason)
            pytest.skip(reason)
        return found

    return need
