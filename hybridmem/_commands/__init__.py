"""The commands of `hybridmem`, one module for each kind: look, change, check, run."""

from hybridmem._commands import change, check, look, run
from hybridmem._commands.group import commands

__all__ = ["change", "check", "commands", "look", "run"]
