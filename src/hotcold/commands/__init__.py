"""The command line: one file per command, which parses options, calls the library and prints the result."""
