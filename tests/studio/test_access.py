"""Only a browser that has opened the printed address, or knows the password, may use the studio."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.studio.visiting import Studio, studio

pytest.importorskip("starlette")
pytest.importorskip("plotly")
PASSWORD = "a secret of mine"


@pytest.fixture(scope="module")
def opened(home: Path) -> Iterator[Studio]:
    with studio(home / "project") as found:
        yield found


@pytest.fixture(scope="module")
def locked(home: Path) -> Iterator[Studio]:
    with studio(home / "locked", SANSGPU_STUDIO_PASSWORD=PASSWORD) as found:
        yield found


def test_the_printed_address_opens_the_pages(opened: Studio) -> None:
    assert opened.request("GET", "/", Cookie="").status == 403
    page = opened.request("GET", "/?token=wrong", Cookie="")
    assert page.status == 403
    assert "open the address that `sansgpu studio` printed" in page.text
    assert "What should the model do?" in opened.enter().text
    entered = opened.request("GET", f"/{opened.address.partition(opened.host)[2].removeprefix('/')}", Cookie="")
    assert entered.headers["location"] == "/", "the token does not stay in the address"
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", {"Host": "evil.example"}),
        ("GET", {"Host": "127.0.0.1.evil.example:80"}),
        ("GET", {"Origin": "http://evil.example"}),
        ("POST", {"Origin": "http://evil.example"}),
        ("POST", {"Origin": "null"}),
        ("POST", {"Origin": ""}),
        ("POST", {"Origin": "http://127.0.0.1:1"}),
    ],
)
def test_pages_of_other_sites_may_do_nothing(opened: Studio, method: str, headers: dict[str, str]) -> None:
    opened.enter()
    body = b"task=sft" if method == "POST" else None
    assert opened.request(method, "/ways" if body else "/", body, **headers).status == 403
    assert not list(opened.folder.glob(".studio/*.json"))


def test_no_answer_can_be_framed_or_run_what_is_not_ours(opened: Studio) -> None:
    opened.enter()
    for path in ("/", "/runs", "/static/studio.js", "/static/../access.py", "/nowhere", "/way/none/data"):
        page = opened.request("GET", path)
        policy = page.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert page.headers["x-content-type-options"] == "nosniff"
    assert opened.request("GET", "/static/../access.py").status == 404


def test_a_password_opens_the_pages_and_a_wrong_one_takes_time(locked: Studio) -> None:
    assert "token" not in locked.address
    assert locked.request("GET", "/").status == 401
    assert locked.request("GET", "/?token=").status == 401
    started = time.monotonic()
    assert "The password is wrong" in locked.request("POST", "/login", b"password=guess").text
    assert time.monotonic() - started > 0.9
    assert locked.request("POST", "/login", b"password=" + b"x" * 100_000).status == 401
    page = locked.request("POST", "/login", b"password=" + PASSWORD.replace(" ", "+").encode())
    assert page.status == 303
    locked.cookie = page.headers["set-cookie"].partition(";")[0]
    assert "What should the model do?" in locked.open("/").text
    assert locked.request("POST", "/ways", b"task=sft", Origin="http://evil.example").status == 403


@pytest.mark.parametrize(
    ("arguments", "variables", "problem"),
    [
        (["--host", "0.0.0.0"], {}, "set --password or SANSGPU_STUDIO_PASSWORD"),
        (["--password", " "], {}, "--password is empty"),
        (["--host", "no.such.host.invalid"], {"SANSGPU_STUDIO_PASSWORD": "x"}, "cannot be used"),
    ],
)
def test_an_address_for_others_needs_a_password(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], problem: str
) -> None:
    command = [sys.executable, "-m", "sansgpu", "studio", str(tmp_path / "project"), "--port", "0", *arguments]
    done = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", **variables}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert problem in done.stderr


def test_the_studio_is_light(opened: Studio) -> None:
    """It never loads PyTorch, so that it takes no memory from the run."""
    opened.enter()
    opened.open("/runs/table")
    status = Path(f"/proc/{opened.process.pid}/status")
    if not status.exists():
        pytest.skip("the system does not say how much memory a process uses")
    resident = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmRSS"))
    assert int(resident.split()[1]) < 200_000
    assert "libtorch" not in Path(f"/proc/{opened.process.pid}/maps").read_text(encoding="utf-8")
