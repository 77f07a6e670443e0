"""The `unembed` command; heavy imports happen inside the commands."""

from unembed.cli._main import main

__all__ = ["main"]
