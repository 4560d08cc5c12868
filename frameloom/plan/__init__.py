"""Know before you run: what a recipe costs in memory, arithmetic and time, found without weights."""
