"""Folders that take the place of another one in a single rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from frameloom.core.files import PARTIAL, atomic_folder, sync_folder


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` when the block ends without an error, whatever was there."""
    old = folder.with_name(f"{PARTIAL}{uuid4().hex[:8]}-old")
    fresh = folder.with_name(f"{PARTIAL}{uuid4().hex[:8]}-new")
    with atomic_folder(fresh) as temporary:
        yield temporary
    if folder.exists():
        os.rename(folder, old)
    os.rename(fresh, folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
