"""The commands, one thin file each: flags, then a call into the package."""
