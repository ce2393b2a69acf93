"""One module per verb of the command line: parse, call, print."""
