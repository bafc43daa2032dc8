"""Questions about data: the command line."""
