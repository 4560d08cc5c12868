"""The version of Frameloom, recorded in runs, exports and samples."""

VERSION = "0.1.0"
