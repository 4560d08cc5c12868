"""The commands, one small file each: parse, call a library function, print."""
