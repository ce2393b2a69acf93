"""``hotcold doctor``: what it says, what it caches, and when it measures; from tiny buffers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotcold.commands import cli
from hotcold.extras import EXTRAS
from hotcold.kernels.cores import available_cores
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.processor import STREAMS
from hotcold.placement import measuring
from hotcold.placement.hardware import find_hardware
from hotcold.placement.measuring import SHAPES, buffer_bytes
from hotcold.tasks import doctor

GOOD = {
    "access": "memory",
    "run_bytes": 0,
    "threads": 1,
    "least_gb_s": 1,
    "gb_s": 1,
    "most_gb_s": 1,
    "streams": 4,
}

MIB = 1 << 20

Doctor = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs it with a cache of this test's own; its report, and stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "buffer_bytes", lambda caches, available: 1 << 20)

    def call(*arguments: str) -> tuple[dict[str, Any], str]:
        assert cli.main(["doctor", *arguments, "--json"]) == 0
        out, err = capsys.readouterr()
        *lines, last = out.splitlines()
        assert max(map(len, lines)) <= 80 and "GPU         not looked for" in out
        assert any("not measured" in line for line in lines)
        return json.loads(last), err

    return call


def test_the_first_call_measures_and_later_ones_read(run: Doctor, tmp_path: Path) -> None:
    first, _ = run()
    cache = tmp_path / "cache" / "hotcold" / "hardware.json"
    assert not first["from_cache"] and first["cache"] == str(cache)
    assert json.loads(cache.read_bytes()) == first["hardware"] and list(cache.parent.iterdir()) == [cache]
    second, err = run()
    assert second["from_cache"] and second["hardware"] == first["hardware"] and f"figures from {cache}" in err
    again, _ = run("--again")
    assert not again["from_cache"] and again["hardware"] != first["hardware"]
    assert json.loads(cache.read_bytes()) == again["hardware"]


def test_what_is_measured(run: Doctor, tmp_path: Path) -> None:
    report, _ = run("-o", str(tmp_path / "new.json"))
    found = find_hardware(str(tmp_path / "new.json"))
    assert found == find_hardware(report["cache"]) and found.machine
    bandwidths = found.machine["bandwidths"]
    assert all(0 < each["least_gb_s"] <= each["gb_s"] <= each["most_gb_s"] for each in bandwidths)
    cores = available_cores()
    assert {each["threads"] for each in bandwidths} == {cores} | {
        1 << i for i in range(10) if 1 << i <= cores
    }
    assert len(bandwidths) == (2 + len(SHAPES)) * len({each["threads"] for each in bandwidths})
    assert all(each["streams"] in STREAMS for each in bandwidths if each["access"] == "memory")
    best = {(e["access"], e["run_bytes"]): e["gb_s"] for e in bandwidths if e["threads"] == cores}
    assert found.cpu_stream_gb_s == best.pop(("dense", 0)) and best.pop(("memory", 0)) > 0
    # A neuron of Q4_0 and dim 1024 has three rows of 32 blocks of 18 bytes, in two places.
    assert found.cpu_gather_gb_s[0][0] == 3 * 32 * 18 / 2
    assert found.cpu_gather_gb_s == [[length, gb_s] for (_, length), gb_s in best.items()]


@pytest.mark.parametrize(
    ("cache", "free", "nbytes"),
    [
        (4 * MIB, None, 128 * MIB),
        (33 * MIB, None, 132 * MIB),
        (300 * MIB, 512 * MIB, 128 * MIB),
        (1 << 30, 512 * MIB + 12_345, 128 * MIB),
        (0, 100_000_007, 23 * MIB),
        (3 * MIB + 77, 64 * MIB, 16 * MIB),
    ],
)
def test_caches_and_memory_of_any_size(
    cache: int,
    free: int | None,
    nbytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A buffer of 128 MiB holds more of the smallest neurons than one layer may have."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "cache_bytes", lambda cpus: cache)
    monkeypatch.setattr(doctor, "available_memory", lambda: free)
    assert cli.main(["doctor", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert report["hardware"]["machine"]["buffer_bytes"] == nbytes
    assert [note[:4] for note in report["notes"]] == ["only"] * (nbytes < 2 * cache)
    assert ("caches      unknown" in lines) == (not cache)


def test_little_memory_is_said(
    run: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a note where caches keep much of what fits, and where nothing can be measured. A file is not written
    without figures."""
    monkeypatch.setattr(doctor, "cache_bytes", lambda cpus: 1 << 20)
    message = "since memory is short: much of it fits in the caches (1.00 MiB)"
    assert message in run()[1]
    monkeypatch.setattr(doctor, "buffer_bytes", buffer_bytes)
    monkeypatch.setattr(doctor, "available_memory", lambda: 40 << 20)
    report, err = run("--again")
    needed = "memory was not measured: 40 MiB of memory are available: 64 MiB are needed"
    assert needed in err and err.count("\n") == 1 and report["hardware"] is None
    assert "memory" in report["unmeasured"]
    path = tmp_path / "new.json"
    assert cli.main(["doctor", "--again", "-o", str(path)]) == 2
    assert f"new.json was not written: {needed}" in capsys.readouterr().err and not path.exists()


@pytest.mark.parametrize("error", [MemoryError(), ValueError("odd rows"), OSError(12, "no memory")])
def test_a_measurement_that_fails_costs_a_line(
    error: Exception, run: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are measured and kept, and what failed is missing."""

    def fails(*given: object) -> object:
        raise error

    monkeypatch.setattr(CPUBackend, "read_probe", fails)
    report, err = run()
    (line,) = [line for line in err.splitlines() if "note: only" not in line]
    assert line == f"note: memory was not measured: {str(error) or 'MemoryError'}"
    accesses = [each["access"] for each in report["hardware"]["machine"]["bandwidths"]]
    assert {*accesses} == {"dense", "rows"} and report["hardware"]["cpu_stream_gb_s"] > 0
    monkeypatch.setattr(measuring, "NeuronProbe", fails)
    report, err = run("--again")
    assert report["hardware"] is None and err.count("was not measured") == 1 + len(SHAPES)


def test_a_section_is_printed_when_it_is_known(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next measurement begins, with all of its lines."""
    printed: list[str] = []
    at: list[int] = []
    measure = doctor.measure

    def measured(*given: Any) -> Any:
        at.append(len(printed))
        return measure(*given)

    monkeypatch.setattr(doctor, "measure", measured)
    found = doctor.doctor(gpu="off", show=printed.append)
    assert at == [1] and printed[0].startswith("processor ") and "GB/s, median of" in printed[1]
    assert tuple(printed) == found.sections and str(found) == "\n".join(printed)
    again = doctor.doctor(gpu="off")
    assert again.sections[1:] == found.sections[1:]


def test_missing_packages_of_each_extra(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing", lambda extra: [f"package_{extra}"])
    assert run()[0]["missing_extras"] == {extra: [f"package_{extra}"] for extra in EXTRAS}
    text = " ".join(str(doctor.doctor(gpu="off")).split())
    packages = [f"{extra}, for {EXTRAS[extra].purpose}: package_{extra}" for extra in EXTRAS]
    heading = "optional pip install '.[EXTRA]' in Hotcold's source folder adds packages:"
    assert " ".join([heading, *packages]) in text
    monkeypatch.setattr(doctor, "missing", lambda extra: [])
    assert "optional" not in str(doctor.doctor(gpu="off"))


@pytest.mark.parametrize("text", ["", "{", "[]", "\0", "{}"])
def test_a_damaged_cache_is_measured_anew(text: str, run: Doctor, tmp_path: Path) -> None:
    run()
    cache = tmp_path / "cache" / "hotcold" / "hardware.json"
    cache.write_text(text)
    report, err = run()
    assert not report["from_cache"] and err.count("\n") == 1 + err.count("note: only")
    assert "note: measured anew, since the cached figures cannot be used: hardware '" in err
    assert run()[0]["from_cache"]


@pytest.mark.parametrize(
    "machine",
    [
        None, {}, {"bandwidths": 3}, {"bandwidths": [3]}, {"bandwidths": [{}]},
        {"bandwidths": [GOOD | {"access": 3}]}, {"bandwidths": [GOOD | {"run_bytes": "x"}]},
        {"bandwidths": [GOOD | {"gb_s": 0}]}, {"bandwidths": [GOOD | {"gb_s": []}]},
        {"bandwidths": [GOOD | {"threads": 1.5}]}, {"bandwidths": [GOOD], "x": float("nan")},
        {"bandwidths": [GOOD], "x": "990 lists"},
    ],
)  # fmt: skip
def test_a_cache_whose_table_makes_no_sense(machine: Any, run: Doctor) -> None:
    first, _ = run()
    text = json.dumps(first["hardware"] | {"machine": machine})
    Path(first["cache"]).write_text(text.replace('"990 lists"', 990 * "[" + 990 * "]"), encoding="utf-8")
    report, err = run()
    assert not report["from_cache"] and "measured anew" in err


def test_a_cache_whose_table_makes_sense(run: Doctor) -> None:
    first, _ = run()
    first["hardware"]["machine"] = {"bandwidths": [GOOD]}
    Path(first["cache"]).write_text(json.dumps(first["hardware"]), encoding="utf-8")
    assert run()[0]["from_cache"]


def test_another_machine_s_cache(run: Doctor) -> None:
    first, _ = run()
    Path(first["cache"]).write_text(
        json.dumps(first["hardware"] | {"name": "a better one"}), encoding="utf-8"
    )
    report, err = run()
    assert not report["from_cache"] and report["hardware"]["name"] == first["hardware"]["name"]
    assert "they are from 'a better one', and this machine is" in err


def test_a_cache_that_cannot_be_written(run: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("no folder")
    report, err = run("-o", str(tmp_path / "new.json"))
    note = f"note: not cached, so the next call measures again: {tmp_path / 'cache' / 'hotcold'}: "
    assert note in err and "Errno" not in err and not report["from_cache"]
    assert find_hardware(str(tmp_path / "new.json")).cpu_stream_gb_s > 0
    (tmp_path / "cache").unlink()
    (tmp_path / "cache" / "hotcold" / "hardware.json").mkdir(parents=True)
    assert "not cached" in run()[1]


def test_plan_says_that_no_gpu_was_measured(
    run: Doctor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, _ = run()
    assert report["hardware"]["vram_bytes"] == 0
    assert cli.main(["plan", "--hardware", report["cache"]]) == 2
    err = capsys.readouterr().err
    assert "no GPU was measured" in err and "rtx4090-i9, rtx2080ti-i7" in err and err.count("\n") == 1


def test_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").touch()
    assert cli.main(["doctor", "-o", str(tmp_path / "old")]) == 2
    assert "the file exists: give another name, or --force to replace it" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cli.main(["doctor"]) == 2
    assert "cache folder 'here': set XDG_CACHE_HOME to an absolute path" in capsys.readouterr().err
