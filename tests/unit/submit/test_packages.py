from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from training.submit import inside, packages


@pytest.fixture
def wheel(tmp_path: Path) -> str:
    """A requirement on the smallest wheel that pip takes."""
    path = tmp_path / "unitextra-1.0-py3-none-any.whl"
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("unitextra.py", "VALUE = 1\n")
        archive.writestr(
            "unitextra-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: unitextra\nVersion: 1.0\n"
        )
        archive.writestr("unitextra-1.0.dist-info/WHEEL", tag)
        archive.writestr("unitextra-1.0.dist-info/RECORD", "")
    return f"unitextra @ file://{path}"


def resolved(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    """pip would install this, and installs nothing."""

    def pip(arguments: list[str]) -> None:
        if "--report" in arguments:
            item = {
                "metadata": {"name": name, "version": version},
                "download_info": {"url": "https://x/y.whl"},
            }
            Path(arguments[arguments.index("--report") + 1]).write_text(json.dumps({"install": [item]}))

    monkeypatch.setattr(packages, "_pip", pip)


def test_a_package_is_installed_beside_the_code_and_once(
    wheel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "job.yaml").write_text("name: x\n")
    monkeypatch.chdir(code)
    folder = tmp_path / "code-packages"
    assert inside.main(["install", str(folder), wheel]) == {"packages": {"unitextra": "1.0"}, "error": None}
    assert (folder / "unitextra.py").is_file()
    assert (folder / "job.yaml").is_file()
    assert inside.main(["install", str(folder), wheel]) == {"packages": {}, "error": None}


def test_what_cannot_be_installed_is_told_in_pips_words_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.chdir(code)
    answer = inside.main(
        ["install", str(tmp_path / "out"), "absent @ file:///nowhere/absent-1.0-py3-none-any.whl"]
    )
    assert answer["error"].startswith("ERROR: Could not install packages")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code"]


def test_a_package_of_the_image_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved(monkeypatch, "torch", "1.0")
    with pytest.raises(packages.PackageError, match=r"replace packages of the image \(torch .* by 1\.0\)"):
        packages.resolve(["something==1"])


def test_too_many_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved(monkeypatch, "something", "1.0")
    monkeypatch.setattr(packages, "MAX_BYTES", 2**20)
    (tmp_path / "large.so").write_bytes(b"x" * 2**21)
    with pytest.raises(packages.PackageError, match="has 2 MiB; 1 are allowed"):
        packages.install(["something==1.0"], tmp_path)


def test_an_image_without_pip_uses_the_one_that_virtualenv_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    command = packages._command()  # pyright: ignore[reportPrivateUsage]
    assert command[1].endswith(".whl/pip")
