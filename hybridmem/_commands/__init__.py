"""The commands of `hybridmem`, one module for each kind: look, change, check, measure, run."""

from hybridmem._commands import change, check, look, measure, run
from hybridmem._commands.group import commands

__all__ = ["change", "check", "commands", "look", "measure", "run"]
