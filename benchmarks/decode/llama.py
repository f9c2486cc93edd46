"""libllama, built from the sources in the registry package llama-cpp-python, and the driver that decodes with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_CURL=OFF",
)  # fmt: skip
DRIVER = Path(__file__).with_name("llama_driver.cpp")


def driver(work: Path, built: Path | None = None) -> Path:
    """The compiled driver; downloads and builds libllama the first time (5 to 10 minutes).

    built: a folder with llama.cpp's sources in src/vendor/llama.cpp and its libraries in lbuild/bin, instead of a build.
    """
    home = built or work / "llama"
    libraries = home / "lbuild" / "bin"
    if not (libraries / "libllama.so").exists():
        build(home)
    sources = home / "src/vendor/llama.cpp"
    program = work / "llama_driver"
    if not program.exists() or program.stat().st_mtime < DRIVER.stat().st_mtime:
        _do(
            "g++", "-O2", f"-I{sources}/include", f"-I{sources}/ggml/include", str(DRIVER), "-o", str(program),
            f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries.resolve()}",
        )  # fmt: skip
    return program


def build(home: Path) -> None:
    """Needs pip, cmake, ninja and a C++ compiler."""
    home.mkdir(parents=True, exist_ok=True)
    print(f"building libllama from {PACKAGE} in {home} (5 to 10 minutes)", file=sys.stderr)
    if not (home / "src").is_dir():
        _do(sys.executable, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps", PACKAGE, "-d", str(home))
        with tarfile.open(next(home.glob("*.tar.gz"))) as archive:
            archive.extractall(home, filter="data")
        next(folder for folder in home.iterdir() if folder.is_dir()).rename(home / "src")
    _do("cmake", "-S", str(home / "src/vendor/llama.cpp"), "-B", str(home / "lbuild"), "-G", "Ninja", *FLAGS)
    _do("ninja", "-C", str(home / "lbuild"), "llama")


def command(program: Path, model: Path, *, threads: int, prompt: int, mapped: bool) -> list[str]:
    return [str(program), str(model), str(threads), str(prompt), str(int(mapped))]


def ids_text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids)) + os.linesep


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} failed: {(done.stderr or done.stdout).strip()[-800:]}")
