"""What users start, one thin file each: flags, then a call into a room."""
