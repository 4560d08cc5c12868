"""What the place Data does when something is clicked; no layout in here."""

from __future__ import annotations

from collections.abc import Mapping

from frameloom.core.errors import DataError
from frameloom.studio.broken_view import show_broken
from frameloom.studio.bucket_view import count_totals, show_buckets, show_shapes
from frameloom.studio.caption_edits import MAX_EDITS, check_caption, free_name, write_edited
from frameloom.studio.clip_media import ClipMedia
from frameloom.studio.clip_table import ClipFilter, ClipShelf, ClipTable
from frameloom.studio.clip_views import describe_page, show_clip, show_facts, show_page
from frameloom.studio.context import StudioContext
from frameloom.studio.markup import fact_tiles, note
from frameloom.studio.recipe_list import find_recipe_file

OWN_SHAPES = "the clips' own shapes"
_HOW_TO_SCAN = "`frameloom data scan clips/ --out clips/manifest.parquet`"
Edits = dict[int, str]
"""New captions that are not written yet, by row."""


class DataDesk:
    """Everything a handler needs; the edits of a visitor travel with their page, not in here."""

    def __init__(self, context: StudioContext) -> None:
        self.context = context
        self.shelf = ClipShelf()
        self.media = ClipMedia(context, self.shelf)

    def open(self, name: str) -> ClipTable:
        path = self.context.resolve(name, where="manifest")
        if not path.is_file():
            raise DataError(f"{name}: no such manifest; look again")
        return self.shelf.open(path)

    def summarize(self, name: str | None) -> tuple[str, str, str]:
        """(totals, broken files, a name for the next manifest)."""
        if not name:
            return note(f"No manifest below this folder yet; {_HOW_TO_SCAN} makes one."), "", ""
        table = self.open(name)
        return fact_tiles(count_totals(table.table)), show_broken(self.context, table), free_name(table.path)

    def group(self, name: str | None, policy: str) -> str:
        if not name:
            return ""
        table = self.open(name)
        if policy == OWN_SHAPES:
            return show_shapes(table)
        return show_buckets(table, find_recipe_file(self.context, policy))

    def show(
        self, name: str | None, wanted: ClipFilter, number: int, edits: Mapping[int, str], chosen: int | None
    ) -> tuple[str, str, int]:
        """(the table, where it stands, the number of the page that is shown)."""
        if not name:
            return "", "", 0
        table = self.open(name)
        page = table.page(wanted, number)
        return show_page(table, page, self.media, edits, chosen), describe_page(page), page.number

    def choose(self, name: str, row: int, edits: Mapping[int, str]) -> tuple[str, str, str]:
        """(the player, the caption, the facts)."""
        table = self.open(name)
        caption = edits.get(row, table.row(row)["caption"] or "")
        return show_clip(table, row, self.media), caption, show_facts(table, row)

    def keep(self, name: str | None, row: int | None, text: str, edits: Edits) -> Edits:
        """The edits with one more; a caption that is as it was is no edit."""
        if not name or row is None:
            raise DataError("no clip is chosen; choose one in the table first")
        caption, table = check_caption(text), self.open(name)
        others = {known: words for known, words in edits.items() if known != row}
        if caption == (table.row(row)["caption"] or ""):
            return others
        if len(others) >= MAX_EDITS:
            raise DataError(f"{MAX_EDITS:,} captions are waiting; write them to a manifest first")
        return {**others, row: caption}

    def write(self, name: str | None, edits: Edits, target: str) -> str:
        """Write the new manifest; its name relative to the root."""
        if not name:
            raise DataError("no manifest is chosen; pick one first")
        return self.context.name_of(write_edited(self.open(name), edits, target))


def describe_edits(edits: Edits) -> str:
    if not edits:
        return note("No caption is changed.")
    return note(f"{len(edits):,} caption{'s' if len(edits) > 1 else ''} changed, not written yet.", kind="good")
