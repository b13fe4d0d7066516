"""The wheel has all that the source tree has, so that what is installed from it runs outside of a checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"


def test_a_wheel_has_the_source_trees_files_byte_for_byte(tmp_path: Path) -> None:
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    source = {
        path.relative_to(tmp_path / "src").as_posix(): path.read_bytes()
        for path in (tmp_path / "src").rglob("*")
        if path.is_file() and ".egg-info" not in path.as_posix()
    }
    with zipfile.ZipFile(tmp_path / "dist" / done.stdout.split()[-1]) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist()}
    about = {name: content for name, content in found.items() if ".dist-info/" in name}
    assert {name for name in found if name not in about} == set(source)
    assert [name for name, content in source.items() if found[name] != content] == []
    for name in ("py.typed", "kernels/hopper_decode.cu", "kernels/hopper.cuh", "cli/main.py"):
        assert f"headrace/{name}" in source

    texts = {name.partition("/")[2]: content.decode() for name, content in about.items()}
    assert "headrace = headrace.cli.main:main" in texts["entry_points.txt"]
    assert Parser().parsestr(texts["METADATA"])["Requires-Python"] == ">=3.11"
