"""The commands, one thin file each: flags and a call into the package."""
