"""`frameloom import` and `recipe arguments`, run as a person would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import frameloom
from frameloom.config.loading.recipe import load_recipe
from tests.faults.warm import run_frameloom

ROOT = Path(frameloom.__file__).parent.parent
DOCUMENTS = Path(__file__).parents[1] / "interop" / "importers" / "documents"
COMMAND = (DOCUMENTS / "cogvideox_fun-train.sh").read_text()


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_frameloom(*words, cwd=folder, env={**os.environ, "COLUMNS": "100"})


def test_a_command_is_printed_or_written_as_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(COMMAND)
    printed = call(tmp_path, "import", "train.sh")
    written = call(tmp_path, "import", "train.sh", "-o", "my.yaml")
    assert printed.returncode == written.returncode == 0
    assert (tmp_path / "my.yaml").read_text() == printed.stdout
    assert call(tmp_path, "import-command", "train.sh").stdout == printed.stdout  # its earlier name
    assert "frameloom recipe check my.yaml" in written.stdout
    assert load_recipe(tmp_path / "my.yaml").optim.name == "came"
    again = call(tmp_path, "import", "train.sh", "-o", "my.yaml")
    assert again.returncode == 2 and "exists already" in again.stderr
    checked = call(tmp_path, "recipe", "check", "my.yaml", "--skip-files")
    assert checked.returncode == 0 and checked.stdout.startswith(
        "ok: output_dir trains denoiser cogvideox_fun/2b-inpaint"
    )


def test_a_mistake_ends_with_code_2_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(COMMAND.replace("--train_batch_size", "--train_batchsize"))
    result = call(tmp_path, "import", "train.sh", "-o", "my.yaml")
    assert result.returncode == 2 and "did you mean --train_batch_size?" in result.stderr
    assert "Traceback" not in result.stderr and sorted(path.name for path in tmp_path.iterdir()) == ["train.sh"]
    lenient = call(tmp_path, "import", "train.sh", "-o", "my.yaml", "--lenient")
    assert lenient.returncode == 0 and "--train_batchsize 4: unknown" in (tmp_path / "my.yaml").read_text()


def test_a_file_that_is_missing_or_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00python train.py")
    for name in ("gone.sh", "binary.sh", "."):
        result = call(tmp_path, "import", name)
        assert result.returncode == 2 and result.stderr and "Traceback" not in result.stderr


def test_importing_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from frameloom.interop.importers.importer import import_command; "
        f"import_command(Path({str(DOCUMENTS / 'cogvideox_fun-train.sh')!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


def test_the_page_of_arguments_is_what_the_command_prints(tmp_path: Path) -> None:
    printed = call(tmp_path, "recipe", "arguments")
    assert printed.returncode == 0
    assert printed.stdout == (ROOT / "docs" / "arguments.md").read_text()
