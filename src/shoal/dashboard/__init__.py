"""The dashboard: what run directories say, as numbers, views, a page and words for other tools. Reads, and never writes, them."""
