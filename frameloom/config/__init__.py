"""The typed recipe: schema, reading, inheritance, overrides and errors."""
