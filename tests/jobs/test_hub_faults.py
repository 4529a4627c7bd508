"""Commands say what is wrong with the Hub, the token or the proxy, and read public models without a wrong token."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from tests import processes
from tests.hub_server import Hub, connect, serving
from tests.processes import messages, options, use_cache
from tests.tasks.folders import model_folder

NAME = "someone/tiny"
NOBODY = "127.0.0.1:9"  # the port of the discard service, where nobody listens


def generate(tmp_path: Path, endpoint: str, model: str = NAME, **variables: str) -> tuple[int, list[str], list[str]]:
    """Runs the command in a new process, because the Hub's library reads its variables when it is imported.

    Returns the exit code, the warnings and the other messages.
    """
    usual = {key: value for key, value in os.environ.items() if not re.search("(?i)proxy|^HF_", key)}
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "SANSGPU_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "sansgpu", "generate", model, "--prompt", "red", "--max-new-tokens", "2"]
    done = subprocess.run(command, env=usual | own | variables, capture_output=True, text=True, timeout=240)
    return done.returncode, re.findall("warning: .*", done.stderr), messages(done.stderr)


def test_a_public_model_is_read_without_a_rejected_token(tmp_path: Path) -> None:
    hub = Hub(NAME, model_folder("qwen2"), kind="models", rejects_tokens=True)
    with serving(hub) as address:
        code, warnings, errors = generate(tmp_path, address, HF_TOKEN="hf_wrong")
    assert (code, errors) == (0, [])
    assert warnings == [
        "warning: the Hub rejects the token in HF_TOKEN, so only public repositories can be read; correct it, or run "
        "`hf auth login`."
    ]


def test_a_proxy_that_does_not_answer_is_named_soon(tmp_path: Path) -> None:
    start = time.monotonic()
    code, _, (error,) = generate(tmp_path, "http://hub.invalid", http_proxy=f"http://{NOBODY}")
    assert code == 2
    assert "the Hub is unreachable ([Errno 111] Connection refused), and it is not in the cache" in error
    assert time.monotonic() - start < 60  # with the repetitions of the library, it was a minute more than the imports


@pytest.mark.skipif(find_spec("socksio") is not None, reason="the package for SOCKS proxies is installed")
@pytest.mark.parametrize("model", [NAME, pytest.param("", marks=pytest.mark.long)])
def test_a_socks_proxy_needs_a_package_only_if_the_network_is_used(tmp_path: Path, model: str) -> None:
    target = model or str(model_folder("qwen2"))
    code, warnings, errors = generate(tmp_path, "http://hub.invalid", target, ALL_PROXY=f"socks5://{NOBODY}")
    if model:
        assert code == 2
        assert "needs the package socksio; run `pip install socksio`" in errors[0]
    else:
        assert (code, warnings, errors) == (0, [], [])


@pytest.mark.parametrize(("status", "phrase"), [(500, "Internal Server Error"), (429, "Too Many Requests")])
def test_a_hub_that_answers_with_errors_is_asked_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, phrase: str
) -> None:
    monkeypatch.setattr("sansgpu.machine.hub.client.PATIENCE_SECONDS", 2.0)
    use_cache(monkeypatch, tmp_path / "cache")
    with serving(Hub("someone/data", tmp_path, status=status)) as address:
        connect(monkeypatch, address, tmp_path)
        given = {**processes.TINY, "data.dataset_name": "someone/data", "training.max_steps": 3}
        assert cli(["train", *options(given), "--output-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"warning: the Hub answers {status} ({phrase}); trying again for up to 2 seconds." in error
    assert f'dataset "someone/data" was not found: no such file or folder, and the Hub answers {status}' in error
