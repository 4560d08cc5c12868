"""Errors that users can cause and fix. Each prints as one message and ends the command with exit code 2.

    FrameloomError
    ├── ConfigError       a recipe or an override is wrong
    ├── DataError         a media file, a manifest or a table is wrong
    ├── CacheError        a latent or text cache is stale or damaged
    ├── CheckpointError   a checkpoint is incomplete, damaged or does not fit
    ├── RunError          a run folder is in use, or a run cannot go on
    │   └── PeerFailed    another process ended the run and reports why
    └── MissingExtra      an optional package is not installed

Bugs stay ordinary Python exceptions and keep their traceback.
"""


class FrameloomError(Exception):
    """Something the user can fix; the message says how."""

    exit_code = 2


class ConfigError(FrameloomError):
    """A recipe or an override is wrong. `problems` lists every mistake that was found."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(FrameloomError):
    """A media file, a manifest or a table is wrong."""


class CacheError(FrameloomError):
    """A latent or text cache is stale or damaged."""


class CheckpointError(FrameloomError):
    """A checkpoint is incomplete, damaged or does not fit."""


class RunError(FrameloomError):
    """A run folder is in use, or a run cannot go on."""


class PeerFailed(RunError):
    """This process ends because another one failed, which reports the error."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process ended the run; its message says why")
        self.exit_code = exit_code


class MissingExtra(FrameloomError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; it comes with: pip install 'frameloom[{extra}]'")
