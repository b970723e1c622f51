"""The commands of `hybridmem`, one module for each kind of work."""

from hybridmem._commands import audit, change, check, look, measure, move, run, sessions
from hybridmem._commands.group import commands

__all__ = ["audit", "change", "check", "commands", "look", "measure", "move", "run", "sessions"]
