"""The errors that a user meets.  Each message is one sentence: the value, the limit, what would work."""

from __future__ import annotations


class BadInput(ValueError):
    """The user's input cannot be used (exit code 2)."""


class NotInstalled(RuntimeError):
    """Something needed is not installed (exit code 3)."""


class Refused(BadInput):
    """A room refuses a layout: the two numbers that clash, and the nearest layout that works."""
