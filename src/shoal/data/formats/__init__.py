"""Files of the formats that people have, read as tables in bounded memory: one file for each format."""
