"""The errors that a user meets.  Each message is one sentence: the value, the limit, what would work."""

from __future__ import annotations


class BadInput(ValueError):
    """The user's input cannot be used (exit code 2)."""


class NotInstalled(RuntimeError):
    """Something needed is not installed (exit code 3)."""


class Refused(BadInput):
    """A room refuses a layout: the two numbers that clash, and the nearest layout that works."""


class RunFailed(RuntimeError):
    """Something that ran for the user failed (exit code 1): one sentence, and what it said, for ``--debug``."""

    def __init__(self, sentence: str, trace: str = "") -> None:
        super().__init__(sentence)
        self.traceback = trace
