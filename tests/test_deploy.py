"""The page on deployment and the Dockerfile say what the commands take, and what systemd accepts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from hotcold.commands.command_line import parser_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    """Fenced blocks, also those in lists."""
    return re.findall(rf"^ *```{kind}\n(.*?)^ *```", PAGE, re.MULTILINE | re.DOTALL)


def instruction(name: str) -> list[str]:
    """The words of the Dockerfile's last such line, which is in JSON."""
    return list(json.loads(re.findall(rf"^{name} (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1]))


def commands() -> list[str]:
    found = [" ".join([*instruction("ENTRYPOINT"), *instruction("CMD")])]
    found += re.findall(r"^ExecStart=\S*/(hotcold .*)$", PAGE, re.MULTILINE)
    for block in blocks("sh"):
        for line in block.replace("\\\n", " ").splitlines():
            found += re.findall(r"(?:^|/| )(hotcold (?:serve|pull) .*)$", line)
    return found


def test_the_page_has_commands() -> None:
    assert len(commands()) == 4 and sum("serve" in command for command in commands()) == 3


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command: str) -> None:
    _, verb, *arguments = shlex.split(command)
    args = parser_of(verb).parse_strictly(arguments)
    if verb == "serve":
        given = re.search(r"TimeoutStopSec=(\d+)", PAGE)
        assert given and args.drain < int(given[1])  # a stop is never cut short by who supervises it


def test_the_unit_is_one(tmp_path: Path) -> None:
    """By systemd itself: unknown settings and values are warnings of its check."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("there is no systemd-analyze here")
    (unit,) = blocks("ini")
    program = tmp_path / "bin" / "hotcold"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = tmp_path / "hotcold.service"
    path.write_text(unit.replace("/usr/local/lib/hotcold/bin/hotcold", str(program)))
    done = subprocess.run([tool, "verify", "--man=no", path], capture_output=True, text=True, check=False)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "hotcold" in line]
    assert ours == [], done.stderr
    path.write_text(path.read_text().replace("ProtectClock=yes", "ProtectClok=yes"))
    done = subprocess.run([tool, "verify", "--man=no", path], capture_output=True, text=True, check=False)
    assert "ProtectClok" in done.stderr  # the check does see mistakes


def test_the_proxy_keeps_every_path_of_the_figures_and_the_name_it_was_called_by() -> None:
    pytest.importorskip("starlette")
    from hotcold.server.routes import api_routes

    (proxy,) = blocks("nginx")
    denied = re.findall(r"location ~ (\S+) \{\s*deny all;", proxy)
    figures = [path for route in api_routes(None) if (path := route.path).endswith("metrics")]  # type: ignore
    assert len(figures) == 2 and all(any(re.search(each, path) for each in denied) for path in figures)
    assert not any(re.search(each, "/v1/models") for each in denied)
    # With a port, which an Origin of the server's own page has as well.
    assert re.findall(r"proxy_set_header Host (\S+);", proxy) == ["$http_host"]


def test_the_proxy_is_configured_as_nginx_takes_it(tmp_path: Path) -> None:
    """By nginx itself, with a certificate in the place of the page's."""
    tools = [shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("nginx", "openssl")]
    if not all(tools):
        pytest.skip("there is no nginx here, or no openssl: install Debian's nginx-light and openssl")
    nginx, openssl = map(str, tools)
    request = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    files = ["-keyout", str(tmp_path / "privkey.pem"), "-out", str(tmp_path / "fullchain.pem")]
    subprocess.run([openssl, *request, *files], check=True, capture_output=True)
    (proxy,) = blocks("nginx")
    page = proxy.replace("/etc/letsencrypt/live/llm.example.org", str(tmp_path))

    def check(proxy: str) -> str:
        """Returns what it says of a configuration: "" if nothing is wrong."""
        path = tmp_path / "nginx.conf"
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        folders = "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in kinds)  # no rights are needed
        head = f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n{folders}"
        path.write_text(f"{head}{proxy}}}\n", encoding="utf-8")
        command = [nginx, "-t", "-q", "-p", str(tmp_path), "-c", str(path), "-e", "stderr"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == ("[emerg]" not in done.stderr), done.stderr
        return "".join(line for line in done.stderr.splitlines(True) if "[emerg]" in line)

    assert page.count(str(tmp_path)) == 2 and check(page) == ""
    assert "unknown directive" in check(page.replace("proxy_buffering", "proxy_bufering"))


def test_the_dockerfile_copies_what_there_is() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    lines = re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE)
    assert lines
    for line in lines:
        for source in line.split()[:-1]:
            assert (ROOT / source).exists() and f"!{source}" in ignored


def test_the_container_has_no_rights_and_says_how_it_is() -> None:
    stages = DOCKERFILE.split("\nFROM ")
    assert len(stages) == 3 and re.search(r"^USER 10001$", stages[-1], re.MULTILINE)
    assert "g++" not in stages[-1]
    check = re.search(r"HEALTHCHECK.*?CMD (\[.*?\])$", stages[-1], re.MULTILINE | re.DOTALL)
    assert check
    compile(json.loads(check[1])[2], "healthcheck", "exec")
    assert "/health" in check[1] and ":8080/" in check[1]
