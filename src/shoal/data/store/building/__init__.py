"""What a build reads: files and parts of files as units, which processes share out among themselves."""
