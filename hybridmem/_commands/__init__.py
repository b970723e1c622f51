"""The commands of `hybridmem`, one module for each kind of work."""

from hybridmem._commands import audit, change, check, look, measure, run
from hybridmem._commands.group import commands

__all__ = ["audit", "change", "check", "commands", "look", "measure", "run"]
