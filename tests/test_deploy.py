"""The page on deployment and the Dockerfile have commands that Hotcold understands, and settings that systemd
and nginx accept. The container's packages are locked."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    scripts = [ROOT / "CMakeLists.txt", *(ROOT / "csrc").rglob("CMakeLists.txt")]
    named = {
        each for script in scripts for each in re.findall(r"PROJECT_SOURCE_DIR}/(\w+)", script.read_text())
    }
    assert named - {"tests"} <= {source for line in lines for source in line.split()[:-1]}


def test_the_container_has_no_rights_and_says_how_it_is() -> None:
    stages = DOCKERFILE.split("\nFROM ")
    assert len(stages) == 3 and re.search(r"^USER 10001$", stages[-1], re.MULTILINE)
    assert "g++" not in stages[-1]
    check = re.search(r"HEALTHCHECK.*?CMD (\[.*?\])$", stages[-1], re.MULTILINE | re.DOTALL)
    assert check
    compile(json.loads(check[1])[2], "healthcheck", "exec")
    assert "/health" in check[1] and ":8080/" in check[1]


def test_examples_pass_keys_by_a_file() -> None:
    """The list of a machine's processes and ``docker inspect`` show what is passed otherwise."""
    arguments = instruction("CMD")
    file = arguments[arguments.index("--api-key-file") + 1]
    runs = [*re.findall(r"^#     (docker run .*)$", DOCKERFILE, re.MULTILINE)]
    runs += [
        line
        for block in blocks("sh")
        for line in block.replace("\\\n", " ").splitlines()
        if "docker run" in line
    ]
    assert len(runs) == 2 and all(f":{file}:ro" in run for run in runs)
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8")
    assert "API_KEY=" not in PAGE + DOCKERFILE + workflow and f":{file}:ro" in workflow


def locked() -> dict[str, str]:
    """The version of each package in the container. Each must have hashes."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    found = {}
    for entry in re.findall(r"^[^\s#](?:.*\\\n)*.*$", text, re.MULTILINE):
        line, *hashes = entry.replace("\\\n", " ").split()
        name, pinned = line.split("==")
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), line
        found[name] = pinned
    return found


IMAGE = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "extra": ""}
IMAGE |= {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
IMAGE |= {"platform_python_implementation": "CPython", "implementation_name": "cpython"}


def needed(requirement: Requirement, versions: dict[str, str]) -> set[str]:
    """The packages that a requirement brings into the image. Packages that are installed here in another
    version do not say what they bring."""
    name = canonicalize_name(requirement.name)
    if requirement.marker is not None and not requirement.marker.evaluate(IMAGE):
        return set()
    try:
        below = (requires(name) or []) if version(name) == versions.get(name) else []
    except PackageNotFoundError:
        below = []
    return {name}.union(*(needed(Requirement(each), versions) for each in below))


def test_the_lock_has_all_that_the_container_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    roots = [*project["project"]["dependencies"], *project["build-system"]["requires"], "cmake", "ninja"]
    versions = locked()
    for each in map(Requirement, roots):
        assert needed(each, versions) <= versions.keys(), f"{each}: run `python tools/lock.py`"
        locked_version = versions[canonicalize_name(each.name)]
        assert each.specifier.contains(locked_version), f"{each}: run `python tools/lock.py`"


def test_the_container_installs_only_what_the_lock_has() -> None:
    runs = re.findall(r"^RUN (.*)$", DOCKERFILE.replace("\\\n", " "), re.MULTILINE)
    commands = [each for run in runs for each in run.split("&&") if re.search("pip (wheel|install) ", each)]
    assert len(commands) == 4
    for words in map(str.split, commands):
        local = "--no-index" in words or {"--no-deps", "--no-build-isolation"} <= {*words}
        assert local or ("--require-hashes" in words and words[-2:] == ["-r", "requirements.lock"])
