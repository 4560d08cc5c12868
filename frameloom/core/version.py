"""The version of Frameloom, as runs, exports and files of samples record it."""

VERSION = "0.1.0"
