"""C++ of ours, compiled for the processor at hand when it is first needed, and kept for the next time.

Nothing depends on it: where there is no compiler, what it would make faster is done in another way.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from frameloom.core.files import atomic_file
from frameloom.core.host_cpu import describe_cpu
from frameloom.core.log import get_logger

_log = get_logger(__name__)

_COMPILERS = ("c++", "g++", "clang++")
# Functions for several threads come from the library of torch, which has to be loaded before.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_LONGEST = 120


@cache
def load_native(folder: Path) -> ctypes.CDLL | None:
    """The functions of a folder's files; None where they cannot be compiled here."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        _log.debug("no C++ compiler here: what is in %s is not used (CXX names one)", folder.name)
        return None
    try:
        return ctypes.CDLL(str(_build(folder, compiler)))
    except subprocess.CalledProcessError as error:
        reason = next(filter(None, error.stderr.splitlines()), f"exit code {error.returncode}")
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    _log.warning("what is in %s could not be compiled, and a slower way is taken: %s", folder, reason)
    return None


def _build(folder: Path, compiler: str) -> Path:
    """The compiled file, made now or earlier."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.[ch]*"))]
    digest = hashlib.sha256("\0".join((*texts, compiler, *_FLAGS, describe_cpu())).encode())
    built = _kept_folder() / f"{folder.name}-{digest.hexdigest()[:16]}.so"
    if not built.exists():
        with atomic_file(built) as temporary:
            command = [compiler, *_FLAGS, *map(str, sorted(folder.glob("*.cpp"))), "-o", str(temporary)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LONGEST)
        _log.debug("compiled %s into %s", folder, built)
    if built.stat().st_uid != os.getuid():
        raise PermissionError(f"{built} belongs to somebody else; set XDG_CACHE_HOME to a folder of your own")
    return built


def _kept_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "frameloom" / "native"
