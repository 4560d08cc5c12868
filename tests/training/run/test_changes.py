import polars
import pytest

from frameloom.builders.data import read_manifest
from frameloom.data.manifest.manifest import Manifest
from frameloom.training.run.changes import describe_changes, write_rows


@pytest.fixture
def opened(world):
    """(the manifest of a recipe, a function that gives it with another table)"""
    recipe = world.recipe()
    table = polars.read_parquet(recipe.data.manifest)

    def change(alter) -> Manifest:
        path = world.folder / "changed.parquet"
        alter(table).write_parquet(path)
        words = ("--data.manifest", str(path), "--data.root", str(world.shared / "data"))
        return read_manifest(world.recipe(*words))

    return read_manifest(recipe), change


def test_removed_added_edited_and_reordered_rows_are_told_apart(opened, tmp_path):
    manifest, change = opened
    rows = tmp_path / "rows.parquet"
    write_rows(rows, manifest)
    path = manifest.clip(0).path
    is_first = polars.col("path") == path
    cases = (
        (lambda table: table.filter(~is_first), f"1 removed ({path})"),
        (lambda table: polars.concat([table, table.filter(is_first)]), f"1 added ({path})"),
        (
            lambda table: table.with_columns(
                caption=polars.when(is_first).then(polars.lit("other")).otherwise("caption")
            ),
            f"1 edited ({path}: caption)",
        ),
        (lambda table: table.reverse(), "the rows are in another order"),
    )
    for alter, words in cases:
        assert describe_changes(rows, change(alter)) == words
    many = describe_changes(rows, change(lambda table: table.head(len(table) // 4)))
    assert " removed (" in many and " and " in many and many.endswith("more)")


def test_without_a_copy_only_the_number_is_known(opened, tmp_path):
    manifest, _ = opened
    assert f"{len(manifest):,} rows now" in describe_changes(tmp_path / "none.parquet", manifest)
    damaged = tmp_path / "rows.parquet"
    damaged.write_bytes(b"PAR1 and no more")
    assert f"{len(manifest):,} rows now" in describe_changes(damaged, manifest)
