"""The loop and its tasks."""
